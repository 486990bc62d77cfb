"""What is left of an attempt of which a part has failed is ended by its owner."""

from envscaler_airflow.testing import ScriptedBackend


class Mending(ScriptedBackend):
    """Notes whose lost or unneeded nodes were given up."""

    def __init__(self, *offers, **options):
        """Nothing was."""
        super().__init__(*offers, **options)
        self.mended = []

    def mend(self, handle, *, quiet_s):
        """Note it, and let its node be on its way."""
        self.quiet_s = quiet_s
        self.mended.append(handle.name)
        self.set_state(handle, "running", detail="is being stopped")
        return ()


def test_a_part_that_is_unneeded_wakes_the_owner_who_ends_it(new_world):
    """Once: what is being ended wakes nobody."""
    world = new_world(backend=Mending)
    owner = world.controller()
    waiting = owner.enter()
    world.say()
    world.backend.set_state(world.handle, "running", reason="unneeded")

    wake = world.watch(waiting).poll()
    again = owner.resume(wake)

    assert wake.detail == "a part of it has failed"
    assert world.backend.mended == [world.handle.name]
    assert world.watch(again).poll() is None
