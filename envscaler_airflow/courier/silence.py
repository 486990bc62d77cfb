"""Say so when a stage that is to be checkpointed has saved nothing after its interval.

The line stands in the status, so on the page and in ``envscaler status``, and in the training's log, to which
the wrapper adds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from envscaler_airflow.courier.settling import Selection
from envscaler_airflow.courier.site import Site
from envscaler_airflow.protocol import Progress

DEFAULT_S = 600.0
"""Interval where it counts in steps or epochs, seconds. Source: ``SNAPSHOT_EVERY``."""
SLACK = 0.5
"""Part of the interval that a save may be late. Chosen."""
SLACK_LEAST_S = 15.0
"""The same at least, seconds. Chosen: quiet, hurry, and a look."""
_PART = "silence"
MOST_NAMED = 5


class Silence:
    """Watches for node 0; :meth:`step` is called while nothing new could be saved."""

    def __init__(self, site: Site, every: Mapping[str, float] | None) -> None:
        """Expect a save *every* so often; None where the spec does not say."""
        self._site = site
        self._every = every
        self._since = site.monotonic()
        self._checkpoints = site.memory.state.checkpoints

    def saved(self) -> None:
        """Something was saved: count from now."""
        self._since = self._site.monotonic()
        self._say(None)

    def step(self, selection: Selection | None, progress: Progress) -> None:
        """Say so when it is time; *selection*: the folder's content, None for code that saves by itself."""
        site = self._site
        if site.who.node != 0 or (self._every is None and site.layout.checkpoint_path is None):
            return
        if site.memory.state.checkpoints > self._checkpoints or site.exchange.saved(site.who):
            self._checkpoints = site.memory.state.checkpoints
            self.saved()
            return
        due_s = self._due_s()
        if site.monotonic() - self._since < due_s + max(SLACK * due_s, SLACK_LEAST_S):
            return
        self._say(f"no checkpoint after {self._interval(progress)}: {self._reason(selection)}")

    def _due_s(self) -> float:
        return (self._every or {}).get("seconds", DEFAULT_S)

    def _interval(self, progress: Progress) -> str:
        for unit, now in (("steps", progress.step), ("epochs", progress.epoch)):
            if unit in (self._every or {}):
                of = "" if now is not None else f", and no {unit[:-1]} is reported"
                return f"its interval ({self._every[unit]:g} {unit}{of})" if self._every else ""
        return f"its interval of {self._due_s():g} s"

    def _reason(self, selection: Selection | None) -> str:
        path = self._site.layout.checkpoint_path
        if selection is None:
            if self._site.exchange.saves():
                return (
                    "the training's Session has saved nothing in that time; it saves at the next "
                    "checkpoint(), with align: epoch at the next end of an epoch"
                )
            return "the training has no Session that saves, and the spec has no checkpoint.path to look at"
        head = f"{path}: "
        waits = list(selection.waits_for) or list(selection.left_out)
        if waits:
            words = [f"{name} ({selection.left_out.get(name, 'is being written')})" for name in waits]
            more = f", and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
            begin = "waits for" if selection.is_empty or selection.waits_for else "nothing new; left out:"
            return f"{head}{begin} {', '.join(words[:MOST_NAMED])}{more}"
        if selection.is_empty:
            return f"{head}has no files; does the training save there?"
        names = [unit.name for unit in selection.units]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"{head}nothing new since the last one ({', '.join(names[:MOST_NAMED])}{more})"

    def _say(self, line: str | None) -> None:
        self._site.messages.say(_PART, line)
        self._site.exchange.notice(line)
