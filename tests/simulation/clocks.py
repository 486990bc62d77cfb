"""Clocks of owners' machines that are an hour behind, or that are set back while they run."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.kernel import Machine, World

BEHIND_S = 3600.0
"""What a clock may be behind, seconds. Source: a host whose time zone is that of the winter."""
BACK_S = (5.0, 3600.0)
"""What a clock is set back by, seconds. Chosen: a correction of NTP, and an hour."""
EVERY_S = 1800.0
"""How often a clock may be set, seconds. Chosen."""


def go_wrong(world: World, machines: Sequence[Machine]) -> None:
    """Let the wall clock of one of *machines* be wrong from the start, and those of all be set back."""
    stream = world.stream("wrong clocks")
    machine = stream.choice(machines)
    if world.strikes("clock-behind", machine.name):
        machine.skew_s = -BEHIND_S

    def set_back() -> None:
        while True:
            world.sleep(EVERY_S)
            one = stream.choice(machines)
            if world.strikes("clock-back", one.name):
                one.skew_s -= stream.uniform(*BACK_S)

    if "clock-back" in world.rates:
        world.spawn("clock", set_back, machine=machine, name="clocks")
