"""Scenarios that run at the same time, since each of them mostly waits."""

from __future__ import annotations

from collections.abc import Callable


class Scenarios(dict[str, Callable]):
    """Those of a module, by the name of their test; the fixture ``crowd`` plays them.

    Args:
        at_once: How many run at the same time. Two stages of one CPU each fit on a machine of two; pods of
            the fake cluster are not counted there.
    """

    def __init__(self, at_once: int = 2) -> None:
        """Start empty."""
        super().__init__()
        self.at_once = at_once

    def together(self, scenario: Callable) -> Callable:
        """A test that waits for *scenario*, which runs beside others."""
        self[scenario.__name__] = scenario

        def test(crowd: dict) -> None:
            crowd[scenario.__name__].result()

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test
