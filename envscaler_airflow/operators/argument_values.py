"""Single arguments of a stage: read at each start, and checked as literals where a DAG file is parsed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from airflow.sdk import timezone

from envscaler_airflow.backends import BACKENDS
from envscaler_airflow.errors import SpecError
from envscaler_airflow.operators.params import RESTARTS
from envscaler_airflow.planning import STRATEGIES
from envscaler_airflow.spec.models import EnvSpec
from envscaler_airflow.spec.quantities import duration_s


def word(name: str, value: str, known: Collection[str]) -> str:
    """*value*, one of *known*. Raises SpecError."""
    if value not in known:
        raise SpecError(f"{name}: {value!r:.40} must be one of {', '.join(known)}")
    return value


def usd(name: str, value: float | str | None) -> float | None:
    """An amount in USD; None where none is given.

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
    """Seconds between two looks of a trigger, as argument *name* gives them.

    Raises:
        SpecError: Not a number above 0: the trigger would fail, or look without a pause.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise SpecError(f"{name}: got {value!r:.40}, expected seconds above 0")


def spec_path(spec: str, dag_file: str) -> str:
    """*spec* as it can be opened: relative to the folder of *dag_file*; a registry reference as it is.

    Raises:
        SpecError: It is not text.
    """
    if not isinstance(spec, str):
        raise SpecError(f"spec: got {spec!r:.80}, expected text: the path of a spec file")
    return spec if "://" in spec else str(Path(dag_file).parent / spec)


def deadline_of(deadline: str | datetime | None) -> tuple[float | None, float | None]:
    """Seconds of a duration such as ``4h``, else None, and the epoch seconds of a point in time, else None.

    A point without a zone is in Airflow's ``[core] default_timezone``; :func:`zone_note` says so.

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
    """What a deadline without a zone was taken for; "" for any other."""
    point = _point(deadline)
    if point is None or point.tzinfo is not None:
        return ""
    return f"deadline {point.isoformat()} has no time zone; it is taken as {_with_zone(point).isoformat()}"


def _with_zone(point: datetime) -> datetime:
    """*point* in Airflow's default time zone."""
    return timezone.coerce_datetime(point)


def _point(deadline: str | datetime | None) -> datetime | None:
    if isinstance(deadline, datetime):
        return deadline
    try:
        return datetime.fromisoformat(str(deadline))
    except ValueError:
        return None


def meant(operator: type, unknown: Iterable[str]) -> str:
    """``; startegy: write strategy``: what to write for each of *unknown*, where that can be guessed."""
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

    Templates and outputs of other tasks are known at run time only.

    Raises:
        SpecError: Names each fault.
    """
    faults = list(_faults(operator))
    if faults:
        raise SpecError(f"task {operator.task_id}: {'; '.join(faults)}", faults=faults)


def _faults(operator: Any) -> Iterator[str]:
    checks: dict[str, Callable[[], object]] = {
        "strategy": lambda: word("strategy", operator.strategy, STRATEGIES),
        "compute": lambda: word("compute", operator.compute, BACKENDS),
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
    """True for what a DAG file states outright: neither a template nor an output of another task."""
    if isinstance(value, str):
        return "{{" not in value and "{%" not in value
    return isinstance(value, int | float | datetime | timedelta | Mapping | list)


def _check_inputs(inputs: object) -> None:
    """Values are mostly outputs of other tasks; a literal that is nothing never becomes one."""
    if not isinstance(inputs, Mapping):
        raise SpecError(f"inputs: got {inputs!r:.80}, expected names: write {{'data': other.output['data']}}")
    for name, value in inputs.items():
        if value is None:
            raise SpecError(f"inputs[{name!r}]: got None; write the URI of an output: other.output[{name!r}]")


def _check_file(operator: Any) -> None:
    path = spec_path(operator.spec, operator.dag.fileloc)
    if "://" not in path and not Path(path).is_file():
        raise SpecError(f"spec: {path}: no such file; a relative path counts from the folder of the DAG file")
