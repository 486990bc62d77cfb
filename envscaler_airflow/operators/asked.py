"""What a task asks for, from its rendered arguments and its DAG run's params."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk._shared.secrets_masker import redact

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.backends.kubernetes import KubernetesBackend
from envscaler_airflow.build.registry import SpecRegistry
from envscaler_airflow.build.stage_image import with_image
from envscaler_airflow.controller.stage import Stage
from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.hooks.secrets import resolve_secret, resolve_unmounted
from envscaler_airflow.hooks.settings import StorePlace, store_place
from envscaler_airflow.operators.argument_values import (
    deadline_of,
    pause_s,
    spec_path,
    usd,
    word,
    zone_note,
)
from envscaler_airflow.operators.params import RESTART, RESTARTS
from envscaler_airflow.planning import STRATEGIES
from envscaler_airflow.scaling.registry import check_policy
from envscaler_airflow.spec import load_spec, spec_params
from envscaler_airflow.spec.literals import has_userinfo
from envscaler_airflow.spec.models import EnvSpec
from envscaler_airflow.spec.secrets import REFERENCE_FORMS

if TYPE_CHECKING:
    from airflow.sdk import Context

    from envscaler_airflow.operators.stage import EnvStageOperator


_NOTHING = frozenset({"none", "null", "undefined", "nan"})
"""Texts that templates make of a value that is not there."""


def stage_of(
    operator: EnvStageOperator,
    context: Context,
    *,
    begun: Callable[[], Mapping[str, Any]] | None,
    backend: Backend | None = None,
) -> Stage:
    """The stage as it is asked for now; without a spec in a resumed slice, which goes by the frozen one.

    Parameters come from the spec's defaults, then from DAG params of the same names (what a person
    filled into the form), then from the operator's own.

    *begun* tells what the generation of a resumed slice was begun with, its ``generation`` event, for an
    argument that was edited into nonsense meanwhile; None at an entry, which refuses that.

    Raises:
        SpecError: The spec or an argument is wrong.
    """
    place = store_place(operator.store_url, operator.store_conn_id)
    asked = {"spec": None} if begun is not None else _asked_anew(operator, context, backend, place)
    return Stage(
        **asked,
        **_terms(operator, begun),
        spec_source=operator.spec,
        resolve_secret=_resolver(operator),
        store_options=place.options,
    )


def _asked_anew(
    operator: EnvStageOperator, context: Context, backend: Backend | None, place: StorePlace
) -> dict[str, Any]:
    """What counts at an entry alone: spec, parameters, inputs, and where to begin."""
    parameters = dict(_mapping("parameters", operator.parameters))
    inputs = {name: _uri(name, value) for name, value in _mapping("inputs", operator.inputs).items()}
    pause_s("poll_interval", operator.poll_interval)
    word("restart", operator.restart or "resume", RESTARTS)
    if note := zone_note(operator.deadline):
        operator.log.warning("%s", note)
    origin = _origin(operator.restore_from)
    path = spec_path(operator.spec, context["dag"].fileloc)
    registry = SpecRegistry(place.open)
    known = spec_params(path, registry=registry)
    by_form = None if RESTART in known else context["params"].get(RESTART)
    parameters = chosen_parameters(known, context["params"], parameters)
    target = operator.target or operator.compute
    _refuse_masked({"parameters": parameters, "inputs": inputs})
    spec = load_spec(path, parameters=parameters, target=target, inputs=inputs, registry=registry)
    if isinstance(backend, KubernetesBackend):
        settings = backend.settings
        spec = with_image(spec, image=settings.image, repository=settings.image_repository)
    check_policy(spec)
    _mask_references(spec, operator)
    _refuse_masked(spec.to_dict())
    return {
        "spec": spec,
        "parameters": parameters,
        "inputs": inputs,
        "restart": "fresh" if "fresh" in (operator.restart, by_form) else "resume",
        "restore_from": origin,
    }


def _terms(operator: EnvStageOperator, begun: Callable[[], Mapping[str, Any]] | None) -> dict[str, Any]:
    """Strategy, deadline and money; in a resumed slice an unusable one is as the generation was begun with.

    A stage that trains is not failed for a DAG file that was edited meanwhile.
    """
    terms: dict[str, Any] = {}
    for name, read in _TERMS.items():
        try:
            terms |= read(operator)
        except SpecError as err:
            if begun is None:
                raise
            field = "deadline_s" if name == "deadline" else name
            kept = begun().get(field)
            if kept is not None:
                terms[field] = kept
            words = f"goes on without {name}" if kept is None else f"goes on with {field}={kept}"
            operator.log.warning("%s; the stage was begun before that, and %s", err, words)
    if begun is None and terms["strategy"] == "deadline" and not _has_deadline(terms):
        operator.log.warning("no deadline was given: strategy 'deadline' is 'cost' here; write deadline='4h'")
    return terms


def _has_deadline(terms: Mapping[str, Any]) -> bool:
    return terms["deadline_s"] is not None or terms["deadline_at"] is not None


def _deadline(operator: EnvStageOperator) -> dict[str, Any]:
    deadline_s, deadline_at = deadline_of(operator.deadline)
    return {"deadline_s": deadline_s, "deadline_at": deadline_at}


_TERMS: Mapping[str, Callable[[EnvStageOperator], dict[str, Any]]] = {
    "strategy": lambda operator: {"strategy": word("strategy", operator.strategy, STRATEGIES)},
    "value_of_hour": lambda operator: {"value_of_hour": usd("value_of_hour", operator.value_of_hour)},
    "deadline": _deadline,
    "budget_usd": lambda operator: {"budget_usd": usd("budget_usd", operator.budget_usd)},
}


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{name}: got {value!r:.80}, expected names with their values")
    return value


def _mask_references(spec: EnvSpec, operator: EnvStageOperator) -> None:
    """Register the secrets that the spec refers to with Airflow's masker, which redacts what it knows.

    A value that was typed into the form is then found, too. A reference that cannot be resolved is
    reported where its value is needed.
    """
    resolve = _resolver(operator)
    for item in spec.env:
        if item.is_secret:
            with contextlib.suppress(SpecError):
                resolve(str(item.reference))


def _resolver(operator: EnvStageOperator) -> Callable[[str], str]:
    return resolve_unmounted if operator.compute == "kubernetes" else resolve_secret


def _refuse_masked(body: Mapping[str, Any]) -> None:
    """Raise SpecError where a value holds what Airflow's secrets masker would redact."""
    faults = [
        f"{path}: holds a secret; write an env entry with value_from: {REFERENCE_FORMS}"
        for path, text in _texts(body, "")
        if redact(text) != text
    ]
    if faults:
        raise SpecError("\n".join(faults), faults=faults)


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Every text in *value* with where it stands: ``env[0].value``."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]")


def shown_parameters(operator: EnvStageOperator, context: Context) -> Any:
    """What a run would be made with: the spec's defaults, DAG params over them, the operator's own over both.

    What the operator was given where that cannot be known; its own execution says why.
    """
    own = operator.parameters
    if own is not None and not isinstance(own, Mapping):
        return own
    try:
        path = spec_path(operator.spec, context["dag"].fileloc)
        registry = SpecRegistry(lambda: store_place(operator.store_url, operator.store_conn_id).open())
        known = spec_params(path, registry=registry)
    except (EnvScalerError, KeyError, OSError):
        return own
    defaults = {
        name: schema["default"] for name, schema in known.items() if schema.get("default") is not None
    }
    return {**defaults, **chosen_parameters(known, context["params"], own or {})}


def chosen_parameters(
    known: Mapping[str, Any], params: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """DAG params that the spec knows, with the operator's own over them."""
    form = {name: params[name] for name in known if name in params and params[name] is not None}
    return {**form, **own}


def _uri(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or value.strip().lower() in _NOTHING:
        raise SpecError(
            f"inputs[{name!r}]: got {value!r:.80}, expected the URI of an output: use other.output[NAME], "
            "where NAME stands under outputs in that stage's spec"
        )
    return value


def _origin(uri: object) -> str | None:
    """The checkpoint to begin from: it will stand in the run's events."""
    if not uri:
        return None
    if not isinstance(uri, str):
        raise SpecError(f"restore_from: got {uri!r:.80}, expected the URI of a checkpoint")
    if has_userinfo(uri):
        raise SpecError("restore_from: credentials in a URL end up in logs; use a connection")
    _refuse_masked({"restore_from": uri})
    if not uri.startswith("/") and "://" not in uri:
        raise SpecError(
            f"restore_from: {uri!r:.80} is not a URI; write an absolute path or a URL such as "
            "s3://bucket/.../checkpoints/g1-step-00000100-a1, and for a form's optional field "
            "{{ params.NAME or '' }}"
        )
    return uri
