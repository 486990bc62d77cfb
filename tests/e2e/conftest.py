"""One real Airflow for all e2e tests of a worker, and what the tests check in its runs."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from e2e.crowds import ByAirflow, Crowd, is_together
from e2e.postgres import postgres

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.security import rbac
from envscaler_airflow.backends.local.node_plan import attempt_name
from envscaler_airflow.run import AttemptState, Event, RunState
from envscaler_airflow.run.event_bodies import AttemptEnded, AttemptIntended
from envscaler_airflow.store import EventLog, RunKey, Store, open_store
from envscaler_airflow.store.checkpoints import complete_checkpoints
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.airflow_services import AirflowServices

if TYPE_CHECKING:
    from fakes.kubernetes import Cluster  # the suite for real clusters is below, and works without it

DAGS = Path(__file__).parent / "dags"
NAMESPACE = "ml"
"""Where stages on the cluster run."""
CANARIES = {"connection": "canary-k7Qp2wZx", "env": "canary-Vb93mLtR", "variable": "canary-T5hyN8sd"}
"""Secrets that no file or log may contain, by their source."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByAirflow:
    """One process has the demo's tests; the others share the remaining files, with an Airflow each."""
    return ByAirflow(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is e2e, with a longer limit than unit tests have.

    What runs together comes first: a test that needs the machine for itself then waits for it only once.
    """
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(300))
    items.sort(key=lambda item: not is_together(item))


@pytest.fixture(scope="session")
def canaries() -> dict[str, str]:
    """Secrets that no file or log may contain, by their source."""
    return CANARIES


@pytest.fixture(scope="session")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the gates at which ``dags/held.py`` stops an execution."""
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two nodes whose containers are processes of this machine, with a namespace for stages."""
    from fakes.kubernetes import Cluster  # only tests of this cluster need it
    from fakes.kubernetes.processes import Processes  # same

    executor = Processes(tmp_path_factory.mktemp("cluster"))
    with Cluster(nodes=2, executor=executor, namespaces=(NAMESPACE,), tls=True) as made:
        yield made


def way_in(cluster: Cluster, home: Path) -> str:
    """The connection to *cluster* as in a deployment: with the shipped rights alone."""
    rules = [rule for document in rbac(NAMESPACE) for rule in document.get("rules", ())]
    path = cluster.kubeconfig(home / "kubeconfig", token=cluster.user("airflow", rules), namespace=NAMESPACE)
    store = home / "store"
    store.mkdir()
    settings = {
        "store_volume": {"hostPath": {"path": str(store)}},
        "store_mount": str(store),
        "cluster_prices": [
            {"name": "small", "vcpus": 1, "memory_gib": 1, "usd_per_hour": 0.05},
            {"name": "large", "vcpus": 2, "memory_gib": 2, "usd_per_hour": 0.08},
        ],
    }
    extra = {"kube_config_path": str(path), "namespace": NAMESPACE, "envscaler": json.dumps(settings)}
    return json.dumps({"conn_type": "kubernetes", "extra": extra})


@pytest.fixture(scope="session")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, gates: Path, cluster: Cluster
) -> Iterator[AirflowServices]:
    """A running Airflow with the DAGs of ``tests/e2e/dags``, shared by all tests."""
    home = tmp_path_factory.mktemp("airflow")
    connection = way_in(cluster, home)
    given = {
        "AIRFLOW_CONN_CLUSTER": connection,
        "AIRFLOW_CONN_KUBERNETES_DEFAULT": connection,  # of the example that reaps
        "E2E_GATES": str(gates),
        "E2E_CANARY": CANARIES["env"],
        "AIRFLOW_CONN_CANARY": f"generic://someone:{CANARIES['connection']}@nowhere",
        "AIRFLOW_VAR_CANARY_JSON": json.dumps({"token": CANARIES["variable"]}),
    }
    config = {
        # Many tests wait until a killed worker is noticed: sooner than with the services' own setting.
        "scheduler": {"task_instance_heartbeat_timeout": "12"},
        # No test edits a DAG file, so each is parsed once. Chosen: longer than a worker's tests take.
        "dag_processor": {"min_file_process_interval": "3600"},
        # Four scenarios at once, of which two may hold an execution at a gate.
        "core": {"parallelism": "6"},
    }
    with ExitStack() as stack:
        two = bool(os.environ.get("E2E_POSTGRES"))
        if two:
            config["database"] = {"sql_alchemy_conn": stack.enter_context(postgres())}
        services = stack.enter_context(AirflowServices(home, DAGS, given, config=config))
        for component in ("scheduler", "triggerer") if two else ():
            stack.enter_context(services.second(component, timeout_s=120))
        yield services


@dataclass
class StageRun:
    """One run of the stage ``train`` in a DAG run, seen from outside: Airflow, store, processes and pods.

    Attributes:
        was_found: True once a process or pod of it was found, so that finding none means something.
    """

    airflow: AirflowServices
    cluster: Cluster
    dag_id: str
    run_id: str
    ledger: Path
    gates: Path
    task_id: str = "train"
    was_found: bool = False

    @property
    def key(self) -> RunKey:
        """The run's key; the services' deployment is ``local``."""
        return RunKey("local", self.dag_id, self.run_id, self.task_id)

    @property
    def store(self) -> Store:
        """The run store of the services."""
        return open_store(str(self.airflow.home / "store"))

    def wait(self, states: Any, *, timeout_s: float = 90) -> dict[str, Any]:
        """The task instance, once it is in one of *states*."""
        return self.airflow.wait_for_task(self.dag_id, self.run_id, self.task_id, states, timeout_s=timeout_s)

    def wait_end(self, *, timeout_s: float = 120) -> str:
        """Final state of the DAG run."""
        return self.airflow.wait_for_run(self.dag_id, self.run_id, timeout_s=timeout_s)

    def until(self, what: str, ask: Callable[[], Any], *, timeout_s: float = 120) -> Any:
        """The first true answer of *ask*."""
        return self.airflow.wait(ask, timeout_s=timeout_s, what=f"{self.run_id}: {what}", every_s=0.2)

    def steps(self) -> list[tuple[int, int, int]]:
        """``(generation, attempt, step)`` in the order of the steps."""
        if not self.ledger.exists():
            return []
        rows = (line.split() for line in self.ledger.read_text().splitlines())
        return [(int(row[0]), int(row[1]), int(row[2])) for row in rows]

    def wait_watched(self) -> None:
        """Return once the triggerer runs the newest try's trigger: before that, nothing acts on a kill."""
        folder = self.airflow.home / "logs" / f"dag_id={self.dag_id}" / f"run_id={self.run_id}"

        def is_watched() -> bool:
            number = self.wait("deferred")["try_number"]
            return any(folder.rglob(f"attempt={number}.log.trigger.*"))

        self.until("the trigger runs", is_watched)

    def wait_step(self, step: int, *, attempt: int | None = None, timeout_s: float = 120) -> None:
        """Return once *step* is done (by *attempt*)."""
        self.until(
            f"step {step}",
            lambda: any(s >= step and attempt in (None, a) for _, a, s in self.steps()),
            timeout_s=timeout_s,
        )
        self.was_found = self.was_found or bool(self.lives())
        assert self.was_found, "steps are made, so what makes them must be found"

    def wait_checkpoint(self, *, timeout_s: float = 60) -> None:
        """Return once a checkpoint of the current generation is complete in the store."""
        store = Run(self.store, self.key)
        self.until(
            "a checkpoint",
            lambda: complete_checkpoints(store, self.state().generation),
            timeout_s=timeout_s,
        )

    def log(self) -> EventLog:
        """The run's events."""
        return Run(self.store, self.key).events

    def events(self) -> list[Event]:
        """All of them."""
        return self.log().read()

    def state(self) -> RunState:
        """The state folded from the run's events."""
        return self.log().load()

    def gate(self, point: str) -> Path:
        """Stop an execution ``before`` or ``after`` the call of the backend."""
        return self.gates / f"{self.run_id}.{point}"

    def wait_held(self, point: str) -> None:
        """Return once an execution has reached the gate."""
        self.until(f"gate {point}", self.gate(point).with_suffix(f".{point}.reached").exists)

    def open_gates(self) -> None:
        """Open the gates."""
        for point in ("before", "after", "delivered", "unanswered", "asleep", "asleep.reached"):
            self.gate(point).unlink(missing_ok=True)

    def processes(self) -> list[psutil.Process]:
        """Live processes of any attempt of this run."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        root = str(self.airflow.home / "local")
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            env = process.environ()
            return env.get("ENVSCALER_SPOOL", "").startswith(root) and self._owns(env["ENVSCALER_SPOOL"])
        except (psutil.Error, OSError):
            return False

    def _owns(self, spool: str) -> bool:
        return any(f"/{attempt_name(self._request(attempt))}/" in spool for attempt in self.state().attempts)

    def _request(self, attempt: AttemptState) -> AttemptRequest:
        """The part of the backend's request that determines its folder's name."""
        return AttemptRequest(
            store_url=self.store.url,
            run_prefix=self.key.prefix,
            run_label=f"{self.dag_id}.{self.task_id}",
            generation=attempt.generation,
            attempt=attempt.number,
            allocation=attempt.allocation,
        )

    def pods(self) -> list[dict[str, Any]]:
        """Pods of this run that have not ended."""
        from fakes.kubernetes import PODS  # only tests of this cluster need it

        mine = names.run_hash(self.store.url, self.key.prefix)
        pods = [pod for pod in self.cluster.list(PODS, NAMESPACE) if _label(pod, names.RUN) == mine]
        return [pod for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]

    def lives(self) -> list[Any]:
        """Processes and pods that could make steps of this run."""
        return [*self.processes(), *self.pods()]

    def wait_gone(self, *, timeout_s: float = 120) -> None:
        """Return once nothing of this run can make steps any more."""
        try:
            self.until("nothing lives", lambda: not self.lives(), timeout_s=timeout_s)
        except TimeoutError as err:
            raise TimeoutError(f"{err}; alive: {self.lives()}") from err

    def check(self) -> None:
        """At most one live attempt ever, nothing of it left, and no committed step repeated.

        A committed step is in a complete checkpoint: the next attempt starts there.
        """
        self._check_one_at_a_time()
        self._check_resumes()
        assert self.lives() == []

    def _check_one_at_a_time(self) -> None:
        order = [(generation, attempt) for generation, attempt, _ in self.steps()]
        lives = [key for key, _ in itertools.groupby(order)]
        assert lives == sorted(set(lives)), f"two attempts made steps at the same time: {lives}"
        live: tuple[int, int] | None = None
        for event in self.events():
            if isinstance(event.body, AttemptIntended):
                key = (event.body.generation, event.body.attempt)
                assert live is None, f"{key} was intended while {live} was live"
                live = key
            elif isinstance(event.body, AttemptEnded):
                live = None

    def _check_resumes(self) -> None:
        committed: dict[int, int] = {}
        for attempt in self.state().attempts:
            start = attempt.end.start_step
            if start is not None:
                assert start >= committed.get(attempt.generation, 0), f"attempt {attempt.number} lost steps"
            if attempt.checkpoint_step is not None:
                newest = max(committed.get(attempt.generation, 0), attempt.checkpoint_step)
                committed[attempt.generation] = newest


def _label(body: Mapping[str, Any], name: str) -> str | None:
    return (body["metadata"].get("labels") or {}).get(name)


class Starter:
    """Starts DAG runs for one test: ``begin("stage", steps=50, held="before")``."""

    def __init__(
        self, airflow: AirflowServices, cluster: Cluster, gates: Path, folder: Path, name: str
    ) -> None:
        """Write ledgers to *folder*; run ids begin with the test's *name*."""
        self._airflow, self.cluster, self._gates, self._folder = airflow, cluster, gates, folder
        self._name = re.sub(r"[^a-zA-Z0-9_]", "_", name)[:50]
        self._runs: list[StageRun] = []

    def __call__(self, dag_id: str, *, held: str | None = None, **conf: Any) -> StageRun:
        """One DAG run with *conf* as params, stopped at a gate on request."""
        number = len(self._runs)
        run_id = f"{self._name}_{number}_{os.getpid()}"
        ledger = self._folder / f"ledger-{number}"
        run = StageRun(self._airflow, self.cluster, dag_id, run_id, ledger, self._gates)
        if held:
            run.gate(held).touch()
        self._airflow.trigger_dag(dag_id, run_id=run_id, conf={"ledger": str(run.ledger), **conf})
        self._runs.append(run)
        return run

    def end(self) -> None:
        """Leave no execution at a gate."""
        for run in self._runs:
            run.open_gates()


@pytest.fixture
def begin(
    airflow: AirflowServices,
    cluster: Cluster,
    gates: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Starter]:
    """Start DAG runs of this test."""
    starter = Starter(airflow, cluster, gates, tmp_path, request.node.name)
    yield starter
    starter.end()


@pytest.fixture(scope="session")
def finished(
    airflow: AirflowServices, cluster: Cluster, gates: Path, tmp_path_factory: pytest.TempPathFactory
) -> StageRun:
    """A stage of one step that has succeeded, for tests that only read its results."""
    run = Starter(airflow, cluster, gates, tmp_path_factory.mktemp("finished"), "finished")("stage", steps=1)
    assert run.wait_end() == "success"
    return run


@pytest.fixture(scope="session")
def crowd(
    airflow: AirflowServices,
    cluster: Cluster,
    gates: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Crowd]:
    """The selected scenarios, several at a time."""

    def play(name: str, scenario: Callable[[Starter], None]) -> None:
        starter = Starter(airflow, cluster, gates, tmp_path_factory.mktemp("scenario"), name)
        try:
            scenario(starter)
        finally:
            starter.end()

    made = Crowd(request.session.items, play)
    yield made
    made.close()
