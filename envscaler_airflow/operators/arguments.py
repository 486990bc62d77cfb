"""What a task requests, from its rendered arguments and its DAG run's params."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import timezone
from airflow.sdk._shared.secrets_masker import redact

from envscaler_airflow.backends import all_backends, backend_names
from envscaler_airflow.backends.base import Backend, PreparesSpecs
from envscaler_airflow.envspec import load_spec, spec_params
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.envspec.quantities import duration_s
from envscaler_airflow.envspec.secret_forms import has_userinfo
from envscaler_airflow.envspec.secrets import REFERENCE_FORMS
from envscaler_airflow.errors import EnvScalerError, SpecError, refuse
from envscaler_airflow.hooks.connections import resolve_secret
from envscaler_airflow.hooks.settings import StorePlace, store_place
from envscaler_airflow.images.spec_registry import SpecRegistry
from envscaler_airflow.operators.params import RESTART, RESTARTS
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning import STRATEGIES
from envscaler_airflow.run.event_bodies import NewGeneration
from envscaler_airflow.scaling.registry import check_policy

if TYPE_CHECKING:
    from airflow.sdk import Context

    from envscaler_airflow.operators.stage import EnvStageOperator


def word(name: str, value: str, known: Collection[str]) -> str:
    """Return *value* if it is one of *known*. Raises SpecError."""
    if value not in known:
        raise SpecError(f"{name}: {value!r:.40} must be one of {', '.join(known)}")
    return value


def usd(name: str, value: float | str | None) -> float | None:
    """Return an amount in USD; None if none is given.

    Raises:
        SpecError: Not an amount, negative or not finite.
    """
    if value is None or value == "":
        return None
    try:
        amount = float(value)
    except (TypeError, ValueError, OverflowError) as err:
        raise SpecError(f"{name}: got {value!r:.40}, expected an amount in USD such as 25") from err
    if not 0 <= amount < math.inf:
        raise SpecError(f"{name}: got {amount}, expected an amount in USD that is finite and >= 0")
    return amount


def pause_s(name: str, value: object) -> float:
    """Return the seconds between two polls of a trigger, as argument *name* gives them.

    Raises:
        SpecError: Not a number above 0: the trigger would fail, or poll without a pause.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise SpecError(f"{name}: got {value!r:.40}, expected seconds above 0")


def spec_path(spec: str, dag_file: str) -> str:
    """Return *spec* as a path to open, relative to *dag_file*'s folder; a registry reference is unchanged.

    Raises:
        SpecError: It is not text.
    """
    if not isinstance(spec, str):
        raise SpecError(f"spec: got {spec!r:.80}, expected text: the path of a spec file")
    return spec if "://" in spec else str(Path(dag_file).parent / spec)


def deadline_of(deadline: str | datetime | None) -> tuple[float | None, float | None]:
    """Return the seconds of a duration such as ``4h`` and the epoch seconds of a point in time; one is None.

    A point without a zone is in Airflow's ``[core] default_timezone``; :func:`zone_note` reports it.

    Raises:
        SpecError: Neither a duration nor ISO 8601.
    """
    if deadline is None or deadline == "":
        return None, None
    point = _point(deadline)
    if point is not None:
        return None, timezone.convert_to_utc(point).timestamp()
    try:
        return duration_s(str(deadline)), None
    except ValueError as err:
        raise SpecError(f"deadline: {deadline!r}: write '4h' or '2026-01-31T18:00:00+00:00'") from err


def zone_note(deadline: str | datetime | None) -> str:
    """Return which time zone a deadline without a zone was taken to be in; "" for any other."""
    point = _point(deadline)
    if point is None or point.tzinfo is not None:
        return ""
    return f"deadline {point.isoformat()} has no time zone; it is taken as {_with_zone(point).isoformat()}"


def _with_zone(point: datetime) -> datetime:
    """Return *point* in Airflow's default time zone."""
    return timezone.coerce_datetime(point)


def _point(deadline: str | datetime | None) -> datetime | None:
    if isinstance(deadline, datetime):
        return deadline
    try:
        return datetime.fromisoformat(str(deadline))
    except ValueError:
        return None


def meant(operator: type, unknown: Iterable[str]) -> str:
    """Return ``; startegy: write strategy``: what to write for each of *unknown*, if that can be guessed."""
    made = (vars(kind).get("__init__") for kind in operator.__mro__)
    own = {name for init in made if init is not None for name in signature(init).parameters}
    found = ""
    for name in sorted(set(unknown) - own):
        near = get_close_matches(name, sorted(own - {"self", "args", "kwargs"}), n=1)
        if name in EnvSpec.model_fields:
            found += f"; {name}: it is a field of the spec, write it there"
        elif near:
            found += f"; {name}: write {near[0]}"
    return found


def check_literals(operator: Any) -> None:
    """Refuse literals of an EnvStageOperator that can only be wrong.

    Templates and outputs of other tasks are known only at run time.

    Raises:
        SpecError: Names each fault.
    """
    faults = list(_faults(operator))
    if faults:
        raise SpecError(f"task {operator.task_id}: {'; '.join(faults)}", faults=faults)


def _faults(operator: Any) -> Iterator[str]:
    checks: dict[str, Callable[[], object]] = {
        "strategy": lambda: word("strategy", operator.strategy, STRATEGIES),
        "compute": lambda: word("compute", operator.compute, backend_names()),
        "restart": lambda: word("restart", operator.restart or "resume", RESTARTS),
        "budget_usd": lambda: usd("budget_usd", operator.budget_usd),
        "value_of_hour": lambda: usd("value_of_hour", operator.value_of_hour),
        "deadline": lambda: deadline_of(operator.deadline),
        "poll_interval": lambda: pause_s("poll_interval", operator.poll_interval),
        "spec": lambda: _check_file(operator),
        "inputs": lambda: _check_inputs(operator.inputs),
    }
    for name, check in checks.items():
        if is_literal(getattr(operator, name)):
            try:
                check()
            except SpecError as err:
                yield str(err)


def is_literal(value: object) -> bool:
    """Return True for a value that a DAG file states directly: no template and no output of another task."""
    if isinstance(value, str):
        return "{{" not in value and "{%" not in value
    return isinstance(value, int | float | datetime | timedelta | Mapping | list)


def _check_inputs(inputs: object) -> None:
    """Refuse empty literals: most values are outputs of other tasks, but a literal never becomes one."""
    if not isinstance(inputs, Mapping):
        raise SpecError(f"inputs: got {inputs!r:.80}, expected names: write {{'data': other.output['data']}}")
    for name, value in inputs.items():
        if value is None:
            raise SpecError(f"inputs[{name!r}]: got None; write the URI of an output: other.output[{name!r}]")


def _check_file(operator: Any) -> None:
    path = spec_path(operator.spec, operator.dag.fileloc)
    if "://" not in path and not Path(path).is_file():
        raise SpecError(f"spec: {path}: no such file; a relative path counts from the folder of the DAG file")


_NOTHING = frozenset({"none", "null", "undefined", "nan"})
"""Texts that templates render for a missing value."""


def stage_of(
    operator: EnvStageOperator,
    context: Context,
    *,
    begun: Callable[[], NewGeneration] | None,
    backend: Backend | None = None,
) -> Stage:
    """Return the stage as requested now; without a spec in a resumed execution, which uses the frozen one.

    Parameters come from the spec's defaults, then from DAG params of the same names (what a user
    entered in the form), then from the operator's own.

    *begun* returns what the generation of a resumed execution was begun with, its ``generation`` event. It
    replaces an argument that an edit has made invalid meanwhile. None at an entry, which refuses those.

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
        store_login=place.login,
    )


def _asked_anew(
    operator: EnvStageOperator, context: Context, backend: Backend | None, place: StorePlace
) -> dict[str, Any]:
    """Return what counts only at an entry: spec, parameters, inputs, and where to begin."""
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
    if isinstance(backend, PreparesSpecs):
        spec = backend.prepare(spec)
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


def _terms(operator: EnvStageOperator, begun: Callable[[], NewGeneration] | None) -> dict[str, Any]:
    """Return strategy, deadline and money; in a resumed execution the generation's own replace invalid ones.

    An edit of the DAG file does not fail a stage that trains.
    """
    terms: dict[str, Any] = {}
    for name, read in _TERMS.items():
        try:
            terms |= read(operator)
        except SpecError as err:
            if begun is None:
                raise
            field = "deadline_s" if name == "deadline" else name
            kept = getattr(begun(), field, None)
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
    """Register the secrets that the spec refers to with Airflow's masker, which redacts known values.

    A secret value that a user typed into the form is then found, too. A reference that cannot be resolved is
    reported where its value is needed.
    """
    resolve = _resolver(operator)
    for item in spec.env:
        if item.is_secret:
            with contextlib.suppress(SpecError):
                resolve(str(item.reference))


def _resolver(operator: EnvStageOperator) -> Callable[[str], str]:
    kind = all_backends().get(operator.compute)
    return resolve_secret if kind is None else kind.resolver(resolve_secret)


def _refuse_masked(body: Mapping[str, Any]) -> None:
    """Raise SpecError if a value contains text that Airflow's secrets masker would redact."""
    faults = [
        f"{path}: contains a secret; write an env entry with value_from: {REFERENCE_FORMS}"
        for path, text in _texts(body, "")
        if redact(text) != text
    ]
    refuse(faults)


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text in *value* with its path: ``env[0].value``."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]")


def shown_parameters(operator: EnvStageOperator, context: Context) -> Any:
    """Return what a run would be made with: the spec's defaults, then DAG params, then the operator's own.

    If that cannot be determined, the operator's argument unchanged; its execution reports the reason.
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
    """Return the DAG params that the spec knows, overridden by the operator's own."""
    form = {name: params[name] for name in known if name in params and params[name] is not None}
    return {**form, **own}


def _uri(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or value.strip().lower() in _NOTHING:
        raise SpecError(
            f"inputs[{name!r}]: got {value!r:.80}, expected the URI of an output: use other.output[NAME], "
            "where NAME is a key of outputs in that stage's spec"
        )
    return value


def _origin(uri: object) -> str | None:
    """Return the checkpoint to begin from, once checked: the run's events will contain it."""
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
