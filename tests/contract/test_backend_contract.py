"""One suite for every backend: the behaviour that the owner relies on."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import attempts
import pytest

from envscaler_airflow.backends.base import Backend, CountsFree
from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.backends.local.node_plan import Programs
from envscaler_airflow.errors import BackendError, CapacityError, EnvScalerError, NoOfferError, SpecError
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Handle
from envscaler_airflow.testing import ScriptedBackend

STANDINS = Path(__file__).parents[1] / "standins"
CANARY = "canary-5c1f0e7a"


class ScriptedHarness:
    """Drives the public fake."""

    def __init__(self, tmp_path):
        """Create a backend for this test alone."""
        self.backend = ScriptedBackend(vcpus=4)
        self.full = 4.0

    def command(self):
        """Accept any command: nothing is started."""
        return ("train",)

    def end(self, handle, exit_code):
        """Let the command of every node end."""
        self.backend.end(handle, exit_code=exit_code, reason="failed" if exit_code else "succeeded")

    def vanish(self, handle):
        """Remove the machine."""
        self.backend.lose(handle)

    def close(self):
        """Nothing runs."""


class LocalHarness:
    """Drives real processes; the command waits for an exit code in a named pipe."""

    def __init__(self, tmp_path):
        """Create a backend for this test alone."""
        self.backend = LocalBackend(
            tmp_path / "root",
            programs=Programs(
                sidecar=(sys.executable, str(STANDINS / "sidecar.py")),
                wrapper=(sys.executable, str(STANDINS / "wrapper.py")),
            ),
        )
        self.full = float(len(self.backend.machine.cpus))
        self._pipe = tmp_path / "pipe"
        self._ends = []
        for node in range(2):
            os.mkfifo(f"{self._pipe}{node}")
            self._ends.append(os.open(f"{self._pipe}{node}", os.O_RDWR))

    def command(self):
        """Print the text before the number, and exit with the number."""
        script = f"""
            while read word; do
                case "$word" in [0-9]*) exit "$word";; *) printf %s "$word";; esac
            done < "{self._pipe}$ENVSCALER_NODE"
        """
        return ("sh", "-c", script)

    def end(self, handle, exit_code):
        """Let the command end."""
        for node in range(len(handle.details["nodes"])):
            os.write(self._ends[node], f"{exit_code}\n".encode())

    def vanish(self, handle):
        """Kill every process without a report."""
        self.backend.take_away(handle)

    def close(self):
        """Leave no process behind."""
        for handle in self.backend.attempts():
            self.backend.stop(handle, grace_s=0)
            self.backend.release(handle)
        for fd in self._ends:
            os.close(fd)


class KubernetesHarness:
    """Drives pods of a fake API server; their training plays the wrapper: 87 on SIGTERM."""

    def __init__(self, tmp_path):
        """Create a cluster of one node that fits four CPUs beside the sidecar."""
        from fakes.kubernetes import Cluster, Program

        self._cluster = Cluster(nodes=0, speed=5).start()
        self._cluster.add_node("node-0", cpu="4100m", memory="16Gi")
        self._cluster.script(Program(seconds=0), container="install")
        self._cluster.script(Program(term_code=0), container="sidecar")
        self._cluster.script(Program(term_code=87), container="main")
        self.backend = KubernetesBackend(
            kubeconfig=str(self._cluster.kubeconfig(tmp_path / "config")), image="train:1", wait_for_node_s=0
        )
        self.full = 4.0

    def command(self):
        """Accept any command: the training is scripted."""
        return ("train",)

    def end(self, handle, exit_code):
        """Let the training of every pod end."""
        for _, pod in self.backend.pods(handle):
            self._cluster.pod(pod["metadata"]["name"]).exit(exit_code)

    def vanish(self, handle):
        """Delete the Job, since the Job recreates the pod of a node that disappears."""
        path = f"/apis/batch/v1/namespaces/default/jobs/{handle.name}"
        self.backend.cluster.delete(path, uid=handle.details["uid"])

    def close(self):
        """Stop the server."""
        self._cluster.stop()


@pytest.fixture(
    params=[ScriptedHarness, LocalHarness, KubernetesHarness], ids=["scripted", "local", "kubernetes"]
)
def harness(request, tmp_path):
    """A backend with control over its machines."""
    made = request.param(tmp_path)
    yield made
    made.close()


def request_for(harness, **changes):
    """A request for one node of the smallest offer; *changes* are fields."""
    fields = {
        "store_url": "file:///store",
        "run_prefix": "dep/dag/run/train/-1",
        "run_label": "dag.train",
        "generation": 1,
        "attempt": 1,
        "allocation": Allocation(harness.backend.offers()[0]),
        "command": harness.command(),
        "secret_env": {"API_KEY": CANARY},
    }
    request = attempts.request(**(fields | getattr(harness, "fields", {}) | changes))
    if hasattr(harness, "prepare"):
        harness.prepare(request)
    return request


def of_another_run(harness):
    """Fields of a request: a next attempt of the same run would not start before the first has ended."""
    return {"run_prefix": f"{getattr(harness, 'fields', {}).get('run_prefix', 'dep/dag/run/train/-1')}-other"}


def eventually(harness, handle, claim):
    """The first status for which *claim* is true; real machines get more time."""
    until = time.monotonic() + getattr(harness, "patience_s", 20.0)
    while not claim(status := harness.backend.observe(handle)):
        assert time.monotonic() < until, status
        time.sleep(getattr(harness, "poll_s", 0.02))
    return status


def small(harness):
    """Fields of a request that two nodes fit; skips where no two nodes fit."""
    fields = getattr(harness, "small", {} if harness.full >= 2 else None)
    if fields is None:
        pytest.skip("this machine has one CPU")
    return fields


def is_running(status):
    """Wait until every node runs."""
    return all(node.state == "running" for node in status.nodes)


def started(harness, **changes):
    """A request and the handle of its attempt, once it runs."""
    request = request_for(harness, **changes)
    handle = harness.backend.submit(request)
    eventually(harness, handle, is_running)
    return request, handle


def test_satisfies_the_seam(harness):
    """The backend has every method of the protocol (feature C1)."""
    names = [name for name in vars(Backend) if not name.startswith("_")]

    assert [name for name in names if not hasattr(harness.backend, name)] == []
    assert isinstance(harness.backend.name, str)


def test_offers_have_names_of_their_own_and_say_where_a_price_is_from(harness):
    """Every price names its source."""
    offers = harness.backend.offers()

    assert len({offer.name for offer in offers}) == len(offers) > 0
    assert all(offer.price_source for offer in offers if offer.usd_per_hour is not None)


def test_render_is_pure_json_without_secrets(harness):
    """Two renderings are equal; they may contain a secret's name, never its value."""
    request = request_for(harness)

    rendered = harness.backend.render(request)

    assert json.loads(json.dumps(rendered)) == rendered == harness.backend.render(request)
    assert CANARY not in json.dumps(rendered)


def test_a_second_submit_adopts_the_first(harness):
    """The second call returns the same handle and starts nothing."""
    request, handle = started(harness)

    again = harness.backend.submit(request)

    assert again == handle
    assert is_running(harness.backend.observe(again))


def test_attempts_of_another_number_run_or_generation_are_others(harness):
    """Names contain store, run, generation and attempt."""
    base = request_for(harness)
    others = [
        dataclasses.replace(base, attempt=2),
        dataclasses.replace(base, generation=2),
        dataclasses.replace(base, run_prefix="dep/dag/run/train/0"),
        dataclasses.replace(base, store_url="file:///other"),
    ]

    names = {harness.backend.render(request)["name"] for request in [base, *others]}

    assert len(names) == 5


def test_find_tells_what_was_started(harness):
    """None before the submit, the handle after it."""
    request = request_for(harness)
    assert harness.backend.find(request) is None

    handle = harness.backend.submit(request)

    assert harness.backend.find(request) == handle


def test_a_handle_survives_json(harness):
    """Events and trigger arguments contain it as JSON."""
    _, handle = started(harness)

    read = Handle.from_dict(json.loads(json.dumps(handle.to_dict())))

    assert is_running(harness.backend.observe(read))
    assert CANARY not in json.dumps(handle.to_dict())


@pytest.mark.parametrize(("exit_code", "reason"), [(0, "succeeded"), (3, "failed")])
def test_an_end_is_seen_with_its_exit_code(harness, exit_code, reason):
    """The end of each node, by number and by name."""
    _, handle = started(harness)

    harness.end(handle, exit_code)

    status = eventually(harness, handle, lambda status: status.is_over)
    assert [(n.state, n.exit_code, n.reason) for n in status.nodes] == [("ended", exit_code, reason)]


def test_a_machine_that_vanished_is_lost(harness):
    """The node has no end of its own; the backend reports it as lost."""
    _, handle = started(harness)

    harness.vanish(handle)

    status = eventually(harness, handle, lambda status: status.is_over)
    assert [node.state for node in status.nodes] == ["lost"]


def test_a_graceful_stop_ends_within_the_grace(harness):
    """The call returns at once, and the end follows."""
    _, handle = started(harness)

    harness.backend.stop(handle, grace_s=10)

    status = eventually(harness, handle, lambda status: status.is_over)
    assert [(node.state, node.reason) for node in status.nodes] == [("ended", "stopped")]


def test_a_stop_without_grace_kills(harness):
    """The node ended as requested; it is not lost."""
    _, handle = started(harness)

    harness.backend.stop(handle, grace_s=0)

    status = eventually(harness, handle, lambda status: status.is_over)
    assert [(node.state, node.reason) for node in status.nodes] == [("ended", "killed")]


def test_stopping_what_is_gone_is_no_error(harness):
    """A release works after the end, twice in a row, and a stop works after the release."""
    _, handle = started(harness)
    harness.end(handle, 0)
    before = eventually(harness, handle, lambda status: status.is_over)

    harness.backend.stop(handle, grace_s=5)
    harness.backend.stop(handle, grace_s=0)

    assert harness.backend.observe(handle) == before
    harness.backend.release(handle)
    harness.backend.stop(handle, grace_s=0)


def test_usage_is_open_while_it_is_held_and_closed_after(harness):
    """One interval for the node, with the provider's times."""
    _, handle = started(harness)

    [held] = harness.backend.usage(handle)
    harness.end(handle, 0)
    eventually(harness, handle, lambda status: status.is_over)
    [over] = harness.backend.usage(handle)

    assert (held.node, held.end) == (0, None)
    assert over.start == held.start
    assert over.end >= over.start


def test_usage_of_a_lost_machine_is_closed(harness):
    """A lost machine is not billed forever."""
    _, handle = started(harness)
    harness.vanish(handle)
    eventually(harness, handle, lambda status: status.is_over)

    [interval] = harness.backend.usage(handle)

    assert interval.end is not None
    assert interval.end >= interval.start


def test_release_never_touches_a_live_attempt(harness):
    """The training keeps running."""
    _, handle = started(harness)

    harness.backend.release(handle)

    assert is_running(harness.backend.observe(handle))


def test_a_released_attempt_is_not_started_again(harness):
    """A late repeat must not restart an old attempt."""
    request, handle = started(harness)
    harness.end(handle, 0)
    eventually(harness, handle, lambda status: status.is_over)

    harness.backend.release(handle)
    harness.backend.release(handle)

    assert harness.backend.find(request) is None
    assert harness.backend.observe(handle).is_over
    with pytest.raises(BackendError, match="released"):
        harness.backend.submit(request)


def test_what_others_hold_cannot_be_had(harness):
    """All CPUs are in use, so there is no capacity. After the end there is."""
    offers = {offer.vcpus: offer for offer in harness.backend.offers()}
    whole = Allocation(offers[harness.full])
    _, first = started(harness, allocation=whole)
    second = request_for(harness, allocation=whole, **of_another_run(harness))

    with pytest.raises(CapacityError):
        harness.backend.submit(second)
    assert harness.backend.find(second) is None
    harness.backend.stop(first, grace_s=0)

    eventually(harness, first, lambda status: status.is_over)
    assert harness.backend.submit(second).name != first.name


def test_what_an_attempt_uses_is_free_for_the_one_that_follows_it(harness):
    """All CPUs are in use: nothing is free beside it, and all of it once it drains (F10)."""
    backend = harness.backend
    if not isinstance(backend, CountsFree):
        pytest.skip("it does not tell what is free")
    offers = {offer.vcpus: offer for offer in backend.offers()}
    full, one = offers[harness.full], offers[1]
    _, handle = started(harness, allocation=Allocation(full))
    beside = backend.free_nodes([full, one])
    if not beside:
        pytest.skip("nothing is told here")

    after = backend.free_nodes([full, one], without=handle)

    assert beside == {full.name: 0, one.name: 0}
    assert after[full.name] >= 1
    assert after[one.name] >= 1


def test_a_slice_of_a_lost_machine_is_free(harness):
    """A dead process allocates nothing."""
    offers = {offer.vcpus: offer for offer in harness.backend.offers()}
    whole = Allocation(offers[harness.full])
    _, first = started(harness, allocation=whole)
    harness.vanish(first)
    eventually(harness, first, lambda status: status.is_over)

    _, second = started(harness, allocation=whole, **of_another_run(harness))

    assert is_running(harness.backend.observe(second))


def test_what_can_never_be_had_is_refused_for_good(harness):
    """The request has more nodes than the machine fits: no retry will help."""
    offer = harness.backend.offers()[0]
    request = request_for(harness, allocation=Allocation(offer, nodes=int(harness.full) + 1))

    with pytest.raises((NoOfferError, SpecError), match=r"cpu|CPU"):
        harness.backend.submit(request)
    assert harness.backend.find(request) is None


def test_every_node_is_watched(harness):
    """Two nodes: two states, two intervals, two ends."""
    allocation = Allocation(harness.backend.offers()[0], nodes=2)
    _, handle = started(harness, allocation=allocation, **small(harness))

    harness.end(handle, 0)

    status = eventually(harness, handle, lambda status: status.is_over)
    assert [(n.node, n.state, n.exit_code) for n in status.nodes] == [(0, "ended", 0), (1, "ended", 0)]
    assert [interval.node for interval in harness.backend.usage(handle)] == [0, 1]


def test_nodes_of_two_offers_are_one_attempt(harness):
    """A mixed allocation: ranks continue from one offer to the other, and one stop ends both."""
    offer = harness.backend.offers()[0]
    allocation = Allocation(offer, nodes=2, rest=offer, rest_nodes=1)
    request, handle = started(harness, allocation=allocation, **small(harness))

    assert harness.backend.find(request) == harness.backend.submit(request) == handle
    assert [node.node for node in harness.backend.observe(handle).nodes] == [0, 1]
    assert [interval.node for interval in harness.backend.usage(handle)] == [0, 1]
    harness.backend.stop(handle, grace_s=10)

    status = eventually(harness, handle, lambda status: status.is_over)
    assert [(n.node, n.state, n.reason) for n in status.nodes] == [
        (0, "ended", "stopped"),
        (1, "ended", "stopped"),
    ]
    harness.backend.release(handle)
    assert harness.backend.find(request) is None
    with pytest.raises(BackendError, match="released"):
        harness.backend.submit(request)


def test_an_unknown_handle_is_an_error_not_a_death(harness):
    """A backend cannot report an attempt as dead that it never started."""
    stranger = Handle(harness.backend.name, "stranger", {})

    with pytest.raises(EnvScalerError):
        harness.backend.observe(stranger)
