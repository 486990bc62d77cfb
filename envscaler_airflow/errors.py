"""Every error of envscaler-airflow, by what the caller can do about it.

Those that the training's side raises too come from :mod:`envscaler_agent.errors`.
"""

from __future__ import annotations

from envscaler_agent.errors import CheckpointError, EnvScalerError, ProtocolError

__all__ = [
    "BackendError",
    "BudgetError",
    "CapacityError",
    "CheckpointError",
    "EnvScalerError",
    "NoOfferError",
    "ProtocolError",
    "RunFailedError",
    "SpecError",
    "StoreError",
    "refuse",
]


class SpecError(EnvScalerError):
    """The spec is wrong: change it. Never retried.

    Attributes:
        faults: One message for each fault, ``file:line: path: got; write this``.
    """

    def __init__(self, message: str, *, faults: list[str] | None = None) -> None:
        """Keep *faults* apart, so that a tool can list them; *message* is what is shown."""
        super().__init__(message)
        self.faults = faults if faults is not None else [message]


def refuse(faults: list[str]) -> None:
    """Raise all *faults* of a spec as one error; do nothing if there are none.

    Raises:
        SpecError: There is a fault.
    """
    if faults:
        raise SpecError("\n".join(faults), faults=faults)


class NoOfferError(EnvScalerError):
    """No offer fits the request; the message names the nearest miss. Never retried."""


class BudgetError(EnvScalerError):
    """The money is spent: the stage is checkpointed and stopped."""


class CapacityError(EnvScalerError):
    """No capacity now: the next offer is tried, then this one later."""


class BackendError(EnvScalerError):
    """The provider or the system said no.

    Attributes:
        status: The provider's status code, None when there was no answer.
        transient: True when the same call may succeed later.
    """

    def __init__(self, message: str, *, status: int | None = None, transient: bool = False) -> None:
        """Say whether the same call may succeed later."""
        super().__init__(message)
        self.status = status
        self.transient = transient


class StoreError(BackendError):
    """The run store cannot be read or written. Unknown, never 'absent' and never 'dead'."""


class RunFailedError(EnvScalerError):
    """The stage itself failed: its exit code and last lines are in the message."""
