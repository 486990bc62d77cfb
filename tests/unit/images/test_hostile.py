"""Hostile text at every place of a document: it is refused, or stays one value in every artefact."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.cli.run_commands import render_attempt
from envscaler_airflow.envspec import EnvSpec, load_spec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.requirement_files import read_requirements
from envscaler_airflow.images.targets import RENDERINGS, render

DOCUMENT: dict[str, Any] = {
    "version": "v1", "name": "stage", "description": "text",
    "parameters": {"rate": {"type": "string", "default": "a", "description": "text"}},
    "base": {"image": "python:3.11-slim", "credentials": "env:LOGIN", "provides": {"torch": "2.1.0"}},
    "system_packages": ["git"],
    "runtimes": [
        {
            "type": "python", "version": "3.11", "package_manager": "pip", "packages": ["attrs==25.1.0"],
            "index_url": "https://wheels.example.com/simple", "credentials": "env:WHEELS",
            "extra_index_urls": ["https://more.example.com/simple"],
        }
    ],
    "resources": {
        "requests": {
            "cpu": "2", "memory": "4Gi", "gpu": {"count": 1, "type": ["A100-80GB"], "memory": "80GB"},
        },
        "limits": {"cpu": "4", "memory": "8Gi"}, "cloud": "aws", "region": "us-east-1", "zone": "us-east-1a",
        "instance_type": "p4de.24xlarge", "disk_size": "100Gi", "disk_tier": "high", "shm_size": "1Gi",
    },
    "workdir": ".",
    "volumes": [
        {"name": "data", "source": "s3://bucket/glue", "mount_path": "/data", "access_mode": "ReadOnly"},
        {"name": "host", "source": "hostPath:/srv/data", "mount_path": "/host"},
        {"name": "claim", "source": "pvc://claim", "mount_path": "/claim"},
        {"name": "export", "source": "nfs://filer/export", "mount_path": "/export"},
    ],
    "env": [{"name": "MODE", "value": "x"}, {"name": "KEY", "value_from": "secret:wandb/api-key"}],
    "entrypoint": ["python", "train.py", "--rate", "{{ parameters.rate }}"],
    "outputs": {"model": "/output/model"},
    "distributed": {"launcher": "torchrun", "backend": "nccl"},
    "checkpoint": {"path": "/output/checkpoints", "every": "10m", "align": "epoch", "align_timeout": "1h"},
    "scaling": {
        "policy": "threshold", "cooldown": "1h", "rules": [{"metric": "loss", "above": 2, "for": "5m"}],
        "speedup": [
            {"offer": "local/cpu-2", "relative_to": "local/cpu-1", "mean": 1.7, "stdev": 0.1, "source": "a"}
        ],
    },
    "capacity": "auto",
    "metrics": {"log_patterns": {"loss": "loss ([0-9.]+)"}},
    "stall": {"min": "5m"}, "failure": {"oom_memory_cap": "64Gi", "orphan_after": "30m"},
    "targets": {"vm": {"env": [{"name": "MODE", "value": "vm"}]}},
}  # fmt: skip
MARKS = [
    "\nRUN touch /hacked\n", "\r", "\u2028", "\x85", "\0", "\ud800", '"', "'", "'; touch hacked; '",
    "$(touch hacked)", "`touch hacked`", "${HOME}", "\\", "\\\n", "..", "../..", "/", "//", "~", "#", ": ",
    "- ", "{{", "}}", "{% raw %}", "{{ ''.__class__ }}", "!!python/object:os.system", "&a", "*a", "|", ">",
    "<<", "@", "%", "--privileged", " --mount=type=bind", ",readonly=false", "=", "x" * 3000, "\u202e", "",
]  # fmt: skip
"""Text with a meaning for a shell, YAML, Docker, Jinja2, a path, or a terminal."""
INSTRUCTION = re.compile(r"(ARG|FROM|RUN|COPY|ENV|WORKDIR|LABEL|USER|ENTRYPOINT|CMD)( |\Z)")


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Path of every text, and of every name in a map (``..., "key", NAME``)."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*path, name)
            yield from places(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))
    elif isinstance(value, str):
        yield path


def changed(path: tuple[str | int, ...], text: str, *, is_key: bool) -> dict[str, Any]:
    """The document with *text* at *path*, or as the name there."""
    body = copy.deepcopy(DOCUMENT)
    *above, last = path
    here: Any = body
    for step in above:
        here = here[step]
    if is_key and isinstance(here, dict):
        here[text] = here.pop(last)
    else:
        here[last] = text
    return body


PLACES = sorted(set(places(DOCUMENT)), key=str)
hostile = st.one_of(
    st.sampled_from(MARKS),
    st.tuples(st.sampled_from(["", "a", "/data", "python"]), st.sampled_from(MARKS)).map("".join),
    st.lists(st.sampled_from(MARKS), min_size=2, max_size=3).map("".join),
    st.text(min_size=1, max_size=8),
)


def loaded(folder, body: dict[str, Any]) -> EnvSpec | None:
    """The stage of *body*, read from a file; None when it is refused."""
    (folder / "e.yaml").write_bytes(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(SpecError):
        return load_spec(folder / "e.yaml")
    return None


def check_artefact(name: str, text: str) -> None:
    """It can be parsed, and keeps its meaning."""
    assert "\0" not in text
    text.encode()
    if name == "Dockerfile":
        joined = re.sub(r"\\\n", "", text)
        lines = [line for line in joined.split("\n") if line and not line.startswith("#")]
        assert all(INSTRUCTION.match(line) for line in lines), lines
        assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
        assert all(not line.startswith("FROM --") for line in lines)
        for line in lines:
            if line.startswith("ENTRYPOINT "):
                assert isinstance(json.loads(line.removeprefix("ENTRYPOINT ")), list)
    elif name.endswith((".yaml", ".yml")):
        assert all(isinstance(item, dict) for item in yaml.safe_load_all(text))
    elif name == "user-data":
        assert text.startswith("#cloud-config\n")
        assert isinstance(yaml.safe_load(text), dict)
    elif name.endswith(".sh"):
        done = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def check_all(folder, body: dict[str, Any]) -> None:
    """Every rendering of *body* keeps its meaning, or it is refused."""
    spec = loaded(folder, body)
    if spec is None:
        return
    image = "registry.example.com/x:1"
    for target in (*RENDERINGS, "kubernetes"):
        try:
            for item in (
                render_attempt(spec, KubernetesBackend(image=image))
                if target == "kubernetes"
                else render(target, spec, read_requirements(spec), image=image)
            ):
                assert re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", item.name)
                check_artefact(item.name, item.text)
        except SpecError:
            continue
    assert not (folder / "hacked").exists()


def test_the_document_itself_loads_and_renders(tmp_path):
    """Otherwise the tests below would check nothing."""
    spec = loaded(tmp_path, DOCUMENT)

    assert spec is not None
    assert render("dockerfile", spec, read_requirements(spec))
    check_all(tmp_path, DOCUMENT)


@pytest.mark.timeout(60)
@settings(
    max_examples=250,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(path=st.sampled_from(PLACES), text=hostile, is_key=st.booleans())
def test_hostile_text_anywhere_is_refused_or_stays_a_value(tmp_path, path, text, is_key):
    """Names of maps too."""
    check_all(tmp_path, changed(path, text, is_key=is_key))
