"""When a part of an attempt has failed, the owner ends the rest of it."""

from envscaler_airflow.testing import ScriptedBackend


class Mending(ScriptedBackend):
    """A backend that records which lost or unneeded nodes were replaced."""

    def __init__(self, *offers, **options):
        """Start with no replaced node."""
        super().__init__(*offers, **options)
        self.replaced = []

    def replace_nodes(self, handle, *, quiet_s):
        """Record the node and let it start again."""
        self.quiet_s = quiet_s
        self.replaced.append(handle.name)
        self.set_state(handle, "running", detail="is being stopped")
        return ()


def test_a_part_that_is_unneeded_wakes_the_owner_who_ends_it(new_world):
    """Once: a node that is being ended wakes no owner."""
    world = new_world(backend=Mending)
    owner = world.owner()
    waiting = owner.enter()
    world.say()
    world.backend.set_state(world.handle, "running", reason="unneeded")

    wake = world.watch(waiting).poll()
    again = owner.resume(wake)

    assert wake.detail == "a part of it has failed"
    assert world.backend.replaced == [world.handle.name]
    assert world.watch(again).poll() is None
