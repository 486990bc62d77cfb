"""A sidecar's environment in a temporary folder: spool, clock, and a store that fails on demand."""

import json

import pytest

from envscaler_agent.protocol import (
    Control,
    Ended,
    Manifest,
    Progress,
    Status,
    control_name,
    status_name,
)
from envscaler_airflow.errors import StoreError
from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.sidecar.snapshots import Snapshots
from envscaler_airflow.sidecar.spool_state import AttemptNode, Layout, Memory, Spool
from envscaler_airflow.store import manifests
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.run import Run

CALLS = (
    "read",
    "write",
    "create",
    "delete",
    "delete_tree",
    "names",
    "children",
    "size",
    "sizes",
    "put_file",
    "get_file",
)


class Clock:
    """Monotonic time that only a test moves."""

    def __init__(self):
        """Begin at a fixed time."""
        self.now = 1000.0

    def __call__(self):
        """Return the time in seconds."""
        return self.now


class FlakyStore:
    """A store that fails while ``down``, and records the order of its writes."""

    def __init__(self, store):
        """Wrap *store*."""
        self._store = store
        self.down = False
        self.puts = []

    def __getattr__(self, name):
        """Return the store's attribute, with failures injected."""
        call = getattr(self._store, name)
        if name not in CALLS:
            return call

        def checked(*args, **kwargs):
            if self.down:
                raise StoreError("the store is down", transient=True)
            if name in ("write", "put_file"):
                self.puts.append(args[0])
            return call(*args, **kwargs)

        return checked


class Bench:
    """One node of one attempt, and the actions of its wrapper and owner."""

    def __init__(self, root, *, store, generation=1, attempt=2, node=0, nodes=1, layout=None):
        """Begin before any message."""
        self.root, self.store, self.clock = root, store, Clock()
        self.who = AttemptNode(generation, attempt, node, nodes)
        self.layout = Layout.model_validate(layout or {})
        self.spool = Spool(root / f"n{node}" / "spool")
        self.context = self.restarted()

    def restarted(self):
        """Return the context of a sidecar that was killed and restarted."""
        self.context = SidecarContext(
            spool=self.spool,
            run=self.store,
            who=self.who,
            layout=self.layout,
            memory=Memory(self.spool, own=self.layout.private_path),
            monotonic=self.clock,
            patience_s=0,
        )
        return self.context

    @property
    def state(self):
        """Return the sidecar's stored state."""
        return self.context.memory.state

    def owner_asks(self, **fields):
        """Write the control into the store."""
        control = Control(**fields)
        self.store.write(control_name(self.who.generation, self.who.attempt), control.to_json())
        return control

    def heard(self, **fields):
        """Write the control into the store and pass it to the wrapper."""
        control = self.owner_asks(**fields)
        self.spool.write(self.spool.control, control.to_json())
        return control

    def wrapper_says(self, *, ended=None, progress=None, **fields):
        """Write wrapper.json."""
        status = Status(
            ended=Ended(**ended) if ended else None,
            progress=Progress(**(progress or {})),
            **({"phase": "ended" if ended else "running"} | fields),
        )
        self.spool.write(self.spool.wrapper, status.to_json())

    def session_saves(self, name, files=None, **facts):
        """Make a complete local save as Session does."""
        folder = self.spool.checkpoints / name
        for path, data in (files or {"model.bin": b"weights"}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        (folder / "agent.json").write_text(json.dumps(facts))
        return folder

    def in_store(self, name, files=None, *, source=None, **facts):
        """Put a complete checkpoint into the store, of the attempt in its name; *source*: its folder."""
        generation, _, step, attempt = name.split("-")
        folder = source or self.root / "made" / name
        for path, data in ({"model.bin": name.encode()} if files is None else files).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        done = manifests.upload(self.store, f"checkpoints/{name}", manifests.walk(folder))
        fields = {"step": int(step), "generation": int(generation[1:]), "attempt": int(attempt[1:])} | facts
        manifest = Manifest(files=done, **fields)
        manifests.write_manifest(self.store, f"checkpoints/{name}", manifest, name="manifest-c1.json")
        return name

    def status(self, node=None):
        """Return a node's status from the store."""
        node = self.who.node if node is None else node
        body = self.store.read(status_name(self.who.generation, self.who.attempt, node))
        return None if body is None else Status.from_json(body, where="test")

    def start(self):
        """Return the content of start.json."""
        return json.loads(self.spool.start.read_bytes())


@pytest.fixture
def store(tmp_path):
    """The store of the run."""
    (tmp_path / "store").mkdir()
    return FlakyStore(Run(FileStore(tmp_path / "store"), "d/run"))


@pytest.fixture
def make_bench(tmp_path, store):
    """Return a factory of benches that share the store."""

    def make(**options):
        return Bench(tmp_path, store=store, **options)

    return make


@pytest.fixture
def bench(make_bench):
    """Node 0 of attempt 2."""
    return make_bench()


@pytest.fixture
def trained(make_bench, tmp_path):
    """A running attempt whose code saves into ``ck``, and its snapshots."""

    def make(every=None, **options):
        bench = make_bench(layout={"checkpoint_path": str(tmp_path / "ck")}, **options)
        bench.ck = tmp_path / "ck"
        bench.ck.mkdir(exist_ok=True)
        bench.context.memory.update(is_laid_out=True, start_step=0)
        bench.wrapper_says(progress={"step": 0})
        bench.snapshots = Snapshots(bench.context, every or {"seconds": 60})
        return bench

    return make
