"""What a stage has tried: looks, places that disappointed, and the gradient noise; folded check by check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from envscaler_airflow.planning.record import NotNegative, Record
from envscaler_airflow.scaling.explore import Measured

BRIEF = 0.03
"""A place disappoints if the stage leaves it before doing this fraction of the work there. Chosen."""
LEAST_NOISE = 0.5
"""Smaller gradient noise counts as this much when it is compared with later noise. Chosen."""
MOST_LOOKS = 10
"""Looks that a measurement is the mean of. Chosen: ten of a sensor average out a few per cent of noise."""
MOST_BATCHES = 12
"""Batches of one place whose measurements are kept. Chosen: more than a training of a few days uses."""


@dataclass(frozen=True, slots=True)
class History(Record):
    """State of one generation that a decision needs besides the facts of its check.

    Attributes:
        here: Name of the place that the last check saw.
        moves: Moves carried out until then.
        looks: Samples of a step since the stage came there.
        done: Fraction of the work done at the last check; None: unknown.
        came_with: Fraction of the work done when the stage came there; None: unknown.
        disappointed: How often each place was left soon, halved with each doubling of the noise.
        noise: Gradient noise at the first sample or at the last halving; None: not reported.
    """

    here: str = ""
    moves: NotNegative[int] = 0
    looks: NotNegative[int] = 0
    done: NotNegative[float] | None = None
    came_with: NotNegative[float] | None = 0.0
    disappointed: Mapping[str, NotNegative[float]] = field(default_factory=dict)
    noise: NotNegative[float] | None = None

    def after(self, here: str, *, moves: int, done: float | None, step: Measured | None) -> History:
        """The history at a check on *here*; repeating a check adds at most a look.

        The first place never disappoints, and a place that was lost or left for another reason than a move
        does not either.

        Args:
            here: Name of the allocation.
            moves: Moves carried out in this generation.
            done: Fraction of the work done; None: unknown.
            step: A new measurement; None: there is none at this check.
        """
        now = self if self.here in ("", here) else self._left(here, is_move=moves > self.moves)
        is_known = done is not None
        now = replace(
            now,
            here=here,
            moves=moves,
            looks=now.looks + (step is not None),
            done=done if is_known else now.done,
            came_with=done if is_known and now.came_with is None else now.came_with,
        )
        return now if step is None or step.noise_scale is None else now.with_noise(step.noise_scale)

    def _left(self, here: str, *, is_move: bool) -> History:
        found = dict(self.disappointed)
        came, done = self.came_with, self.done
        if is_move and came is not None and done is not None and came > 0 and done - came < BRIEF:
            found[self.here] = found.get(self.here, 0.0) + 1
        return replace(self, here=here, looks=0, came_with=done, disappointed=found)

    def with_noise(self, noise: float) -> History:
        """Forget half of the disappointments once the noise has doubled: other counts are suitable now."""
        if self.noise is None:
            return replace(self, noise=noise)
        if noise < 2 * max(self.noise, LEAST_NOISE):
            return self
        halved = {name: times / 2 for name, times in self.disappointed.items()}
        return replace(self, noise=noise, disappointed=halved)


def averaged(before: Measured | None, step: Measured) -> Measured:
    """*step* averaged with earlier looks at the same batch; measurements at other batches are kept beside it.

    Args:
        before: The measurement of the place so far; None: it was never measured.
        step: The new look.
    """
    if before is None:
        return step
    known = {one.batch: one for one in (*before.earlier, replace(before, earlier=()))}
    same = known.pop(step.batch, None)
    earlier = tuple(known.values())[-MOST_BATCHES:]
    if same is None:
        return replace(step, earlier=earlier)
    times = min(same.times + 1, MOST_LOOKS)
    return replace(
        step,
        step_s=same.step_s + (step.step_s - same.step_s) / times,
        sync_s=same.sync_s + (step.sync_s - same.sync_s) / times,
        times=times,
        earlier=earlier,
    )
