"""The reference of spec files, written from the models, and the JSON Schema for editors."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from envscaler_airflow.envspec import EnvSpec, json_schema
from envscaler_airflow.envspec import fields as kinds
from envscaler_airflow.envspec.models import RESOLVED_FIELDS
from envscaler_airflow.envspec.parameters import TYPES

SCHEMA_FILE = "envspec.schema.json"
"""The shipped schema, beside this module."""

_HEAD = """\
# Fields of an environment spec

Written from the models by `envscaler schema --markdown`; a test holds it current. Short forms, merge
rules, parameters and references to secrets are explained in [spec.md](spec.md).

Editors complete and check `envscaler.yaml` by the shipped JSON Schema: `envscaler schema` prints it. With
the file beside the spec, its first line is `# yaml-language-server: $schema=./envspec.schema.json`.

Every value may be a template, such as `"{{ parameters.gpu_count }}"`, and `null` removes what a spec
below says.
"""

_UNITS: tuple[tuple[Any, str, str], ...] = (
    (kinds.Cpu, "quantity", "cores"),
    (kinds.Memory, "quantity", "bytes"),
    (kinds.GpuMemory, "quantity", "GB, nominal"),
    (kinds.Duration, "duration", "time"),
    (kinds.Count, "integer", "number"),
    (kinds.Fraction, "number", "share, 0 to 1"),
    (kinds.AbsolutePath, "path", ""),
    (kinds.LocalPath, "path", ""),
    (kinds.Argument, "text", ""),
    (kinds.WebUrl, "URL", ""),
)
"""Field types with a meaning of their own: what is written, and its unit."""
_PLAIN = {str: "text", int: "integer", float: "number", bool: "boolean"}
_EXAMPLES = {"GB, nominal": "80GB", "bytes": "32Gi", "cores": "8", "time": '"10m"', "share, 0 to 1": "0.1"}

_BY_FIELD: dict[str, str] = {
    "EnvSpec.description": "Fine-tuning on GLUE.",
    "EnvSpec.base": "{image: python:3.11-slim}",
    "EnvSpec.system_packages": "[git, git-lfs]",
    "EnvSpec.runtimes": "[{type: python, requirements: requirements.txt}]",
    "EnvSpec.resources": "{requests: {cpu: 8, memory: 32Gi}}",
    "EnvSpec.num_nodes": "1..4",
    "EnvSpec.volumes": "[{name: data, source: s3://bucket/glue, mount_path: /data}]",
    "EnvSpec.env": '[{name: OMP_NUM_THREADS, value: "4"}]',
    "EnvSpec.outputs": "{model: /output/model}",
    "EnvSpec.distributed": "{launcher: torchrun, global_batch: 256}",
    "EnvSpec.checkpoint": "{path: /output/checkpoints, every: 10m}",
    "EnvSpec.scaling": "{min_nodes: 1, max_nodes: 4}",
    "EnvSpec.metrics": "{log_patterns: {loss: 'loss ([0-9.]+)'}}",
    "EnvSpec.stall": "{factor: 20, min: 10m}",
    "EnvSpec.failure": "{max_fruitless_attempts: 3}",
    "Base.distro": "debian",
    "Base.credentials": "env:REGISTRY_LOGIN",
    "Base.provides": "{torch: 2.1.0}",
    "Runtime.version": '"3.10"',
    "Runtime.requirements": "requirements.txt",
    "Runtime.packages": "[torch==2.1.0]",
    "Runtime.extra_index_urls": "[https://wheels.example.com/simple]",
    "Runtime.channels": "[conda-forge]",
    "Runtime.credentials": "env:WHEELS_LOGIN",
    "Resources.requests": "{cpu: 8, memory: 32Gi}",
    "Resources.limits": "{memory: 64Gi}",
    "Resources.region": "us-east-1",
    "Resources.zone": "us-east-1a",
    "Resources.instance_type": "g5.xlarge",
    "Resources.disk_tier": "high",
    "Resources.disk_size": "200Gi",
    "Resources.any_of": "[{requests: {gpu: {type: H100}}}, {requests: {gpu: {type: A100}}}]",
    "Resources.ordered": "[{use_spot: true}, {use_spot: false}]",
    "Requests.gpu": "{count: 2, type: [A100-80GB, H100]}",
    "Limits.gpu": "{count: 2}",
    "Volume.name": "data",
    "Volume.source": "s3://bucket/glue",
    "Volume.mount_path": "/data",
    "Volume.region": "us-east-1",
    "Volume.zone": "us-east-1a",
    "Volume.size": "200Gi",
    "Volume.storage_class": "fast-ssd",
    "EnvVar.value": '"4"',
    "EnvVar.value_from": "secret:wandb/api-key",
    "Checkpoint.path": "/output/checkpoints",
    "Checkpoint.every": "100 steps",
    "Scaling.rules": "[{metric: gpu_utilization, above: 80, for: 3 samples}]",
    "Scaling.target": "{gpu_utilization: 70}",
    "Scaling.phases": "{warmup: {nodes: 1}, train: {nodes: 4}}",
    "Scaling.speedup": "[{offer: local/cpu-2, relative_to: local/cpu-1, mean: 1.7, stdev: 0.2, source: a}]",
    "MetricRule.for": "5m",
    "MetricRule.prometheus": "avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE)",
    "MetricRule.above": "80",
    "MetricRule.below": "20",
    "Distributed.world_size": "16",
    "Distributed.global_batch": "256",
    "Distributed.model_parallel": "8",
    "Stall.factor": "20",
    "Stall.min": "10m",
    "Failure.oom_memory_factor": "1.5",
    "Failure.oom_memory_cap": "128Gi",
    "Scaling.cooldown": "30m",
    "Scaling.max_nodes": "4",
    "Speedup.mean": "1.7",
    "Speedup.stdev": "0.2",
    "Speedup.offer": "local/cpu-2",
    "Speedup.relative_to": "local/cpu-1",
    "Speedup.source": "measured on 2026-01-10",
    "Metrics.log_patterns": "{loss: 'loss ([0-9.]+)'}",
}
"""Examples where the field's type has none that fits."""


def schema_text() -> str:
    """The JSON Schema, as it is shipped."""
    return json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"


def reference_text() -> str:
    """The reference as Markdown: the document, then each part in the order of its first appearance."""
    parts = [_HEAD, _section(EnvSpec, "The document"), _composition()]
    parts += [_section(model, model.__name__) for model in _models()]
    return "\n".join(parts)


def _models() -> list[type[BaseModel]]:
    found: dict[type[BaseModel], None] = {}
    waiting: list[type[BaseModel]] = [EnvSpec]
    while waiting:
        model = waiting.pop(0)
        for name, hint in _hints(model).items():
            if model is EnvSpec and name in RESOLVED_FIELDS:
                continue
            for inner in _inside(hint):
                if inner not in found and inner is not EnvSpec:
                    found[inner] = None
                    waiting.append(inner)
    return list(found)


def _hints(model: type[BaseModel]) -> dict[str, Any]:
    hints = typing.get_type_hints(model, include_extras=True)
    return {name: hints[name] for name in model.model_fields}


def _inside(hint: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        yield hint
    for argument in typing.get_args(hint):
        yield from _inside(argument)


def _section(model: type[BaseModel], title: str) -> str:
    text = inspect.cleandoc(model.__doc__ or "").replace("``", "`")
    if model is EnvSpec:
        text = text.partition("\n")[0]
    rows = ["| field | type | unit | default | example |", "|---|---|---|---|---|"]
    for name, hint in _hints(model).items():
        info = model.model_fields[name]
        if model is EnvSpec and name in RESOLVED_FIELDS:
            continue
        kind, unit = _kind(hint)
        cells = [f"`{info.alias or name}`", kind, unit, _default(info), _example(info, hint, unit)]
        written = _BY_FIELD.get(f"{model.__name__}.{info.alias or name}")
        cells[4] = f"`{_shown(written)}`" if written is not None else cells[4]
        rows.append(f"| {' | '.join(cells)} |")
    return f"## {title}\n\n{text}\n\n" + "\n".join(rows) + "\n"


def _kind(hint: Any) -> tuple[str, str]:
    """What is written, and its unit."""
    for known, kind, unit in _UNITS:
        if hint == known:
            return kind, unit
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " / ".join(f"`{value}`" for value in arguments), ""
    if origin in (typing.Union, types.UnionType):
        return _kind(next(item for item in arguments if item is not type(None)))
    if origin is tuple:
        kind, unit = _kind(arguments[0])
        return f"list of {kind}", unit
    if origin is dict:
        kind, unit = _kind(arguments[1])
        return f"map of name to {kind}", unit
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        return f"[{hint.__name__}](#{hint.__name__.lower()})", ""
    return _PLAIN.get(hint, "text"), ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or value in ((), {}, ""):
        return "none"
    if isinstance(value, BaseModel):
        kept = value.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        return f"`{_shown(kept)}`" if kept else "its own defaults"
    return f"`{_shown(value)}`"


def _example(info: FieldInfo, hint: Any, unit: str) -> str:
    examples = info.examples or list(_examples_in(hint))
    if examples:
        return f"`{_shown(examples[0])}`"
    if unit in _EXAMPLES:
        return f"`{_EXAMPLES[unit]}`"
    return _made_up(hint)


def _examples_in(hint: Any) -> Iterator[Any]:
    for argument in typing.get_args(hint):
        if isinstance(argument, FieldInfo) and argument.examples:
            yield argument.examples[0]
        else:
            yield from _examples_in(argument)


def _made_up(hint: Any) -> str:
    """The first choice, or a value of the plain type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"`{arguments[0]}`"
    if origin is not None and arguments and origin is not dict:
        return _made_up(next(item for item in arguments if item is not type(None)))
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        name, first = next(iter(_hints(hint).items()))
        return f"`{{{name}: {_example(hint.model_fields[name], first, _kind(first)[1]).strip('`')}}}`"
    shown = {bool: "`true`", int: "`2`", float: "`0.5`"}
    return shown.get(hint, "")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=list)
    return str(text).replace("|", "\\|")


def _composition() -> str:
    rows = [
        ("extends", "list of references", "specs below this one: `./base.yaml`, `registry://team/name@1.2`"),
        ("modules", "list of references", "modules that this spec uses, over what it extends"),
        ("parameters", "map of name to parameter", f"`type` ({', '.join(TYPES)}), `default`, `minimum`, ..."),
        ("inputs", "list of names", "inputs that the stage takes; `{{ inputs.model }}` is their URI"),
        (
            "targets",
            "map of target to overlay",
            "what differs on `local`, `docker`, `kubernetes`, `vm` or another",
        ),
    ]
    lines = ["| field | type | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in rows]
    return "## Composition\n\nWhat only a document has, and no resolved spec.\n\n" + "\n".join(lines) + "\n"
