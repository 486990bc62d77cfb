"""A session on a spool in a temporary folder, with a clock set by hand."""

from envscaler_agent import spool as ex
from envscaler_agent.session import Session

LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "ENVSCALER_SPOOL",
    "TORCHELASTIC_RESTART_COUNT",
)
"""Variables that a launcher, or a wrapper around the tests, would set for a session."""


class Rig:
    """A spool folder, a clock, and a session that uses both."""

    def __init__(self, root, **session):
        """Write ``start.json`` with *session*."""
        self.spool = ex.Spool(root)
        self.now = 0.0
        self.saved = []
        body = {"generation": 1, "attempt": 2, **session}
        ex.write_json(self.spool.start, {"session": body, "restore": None})
        self.sequence = 0

    def session(self, *arguments, **keywords):
        """A session on this spool and clock."""
        timed = type("Timed", (Session,), {"_clock": staticmethod(lambda: self.now)})
        return timed(*arguments, spool=self.spool.root, **keywords)

    def ask(self, action, **fields):
        """Write the owner's request."""
        self.sequence += 1
        ex.write_json(self.spool.control, {"sequence": self.sequence, "action": action, **fields})

    def save(self, folder):
        """A save that writes one file."""
        assert not list(folder.iterdir())
        (folder / "w").write_text("weights", encoding="utf-8")
        self.saved.append(folder)

    def said(self):
        """The progress file."""
        return ex.parse_report(self.spool.progress.read_bytes())

    def names(self):
        """Complete checkpoints."""
        folder = self.spool.checkpoints
        return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []

    def walk(self, session, steps, *, dt=1.0, epoch=0):
        """Train *steps* steps of *dt* seconds; every *epoch*-th is an epoch's last."""
        for _ in range(steps):
            self.now += dt
            session.step(samples=32, loss=0.5, data_s=0.25, sync_s=0.125)
            session.checkpoint(self.save, epoch_end=bool(epoch) and session.steps % epoch == 0)


def name(step):
    """Name of this attempt's checkpoint."""
    return f"g1-step-{step:08d}-a2"
