"""Faults that a test orders: wrong answers, lost answers, delays, outages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fakes.kubernetes import errors
from fakes.kubernetes.errors import ApiError

When = Literal["before", "after"]


@dataclass(slots=True)
class Fault:
    """One kind of fault for the next `times` matching requests.

    Attributes:
        verb: RBAC verb, or ``*``.
        resource: ``pods``, ``jobs``, ``pods/log``, or ``*``.
        when: ``before``: nothing is done; ``after``: it is done, and only the answer is lost or wrong.
        drop: Close the connection instead of answering.
    """

    verb: str = "*"
    resource: str = "*"
    status: int = 500
    times: int = 1
    when: When = "before"
    drop: bool = False
    delay_s: float = 0.0
    retry_after: int = 1
    matches: Callable[[str], bool] = lambda _name: True

    def answer(self) -> ApiError:
        """The refusal in the real words."""
        if self.status == 429:
            return errors.too_many(self.retry_after)
        if self.status == 410:
            return errors.expired()
        if self.status == 401:
            return errors.unauthorized()
        if self.status == 409:
            message = "Operation cannot be fulfilled: the object has been modified"
            return ApiError(409, errors.status(409, "Conflict", message, {}))
        return errors.unavailable(self.status)


class DroppedError(Exception):
    """The connection is closed without an answer."""


@dataclass(slots=True)
class Faults:
    """Faults that remain."""

    pending: list[Fault] = field(default_factory=list)
    down: bool = False

    def take(self, verb: str, resource: str, name: str, when: When) -> Fault | None:
        """The next fault for this request; uses it up by one."""
        for fault in self.pending:
            fits = fault.verb in {"*", verb} and fault.resource in {"*", resource} and fault.when == when
            if fits and fault.matches(name):
                fault.times -= 1
                if fault.times <= 0:
                    self.pending.remove(fault)
                return fault
        return None

    def clear(self) -> None:
        """Remove all faults."""
        self.pending.clear()
        self.down = False
