"""What runs inside the training container: wrapper, sampler and :class:`Session`.

It needs only Python 3.8 and the standard library; it has no store access and no credentials. Everything that
leaves this package goes through the spool folder, see :mod:`.spool`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envscaler_agent.session import Session

__all__ = ["Session", "__version__"]
__version__ = "0.1.0"
"""The version of both packages."""


def __getattr__(name: str) -> Any:
    """Load :class:`Session` on first use (PEP 562): the wrapper never needs it."""
    if name == "Session":
        from envscaler_agent.session import Session  # noqa: PLC0415 - lazy on purpose

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
