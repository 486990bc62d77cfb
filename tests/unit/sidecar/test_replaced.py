"""The pod of one node was replaced: all nodes continue from the newest checkpoint, and from the same one."""

import json
import threading

import pytest

from envscaler_agent.protocol import Control, Resume, Status, status_name
from envscaler_airflow.sidecar.context import SetupCancelledError
from envscaler_airflow.sidecar.replaced import CHECK_S, Regroup, restore_with_others
from envscaler_airflow.sidecar.spool_state import AttemptNode
from envscaler_airflow.sidecar.uploads import Checkpoints
from envscaler_airflow.store.checkpoints import checkpoint_prefix
from envscaler_airflow.store.lease import Claim, take_claim
from envscaler_airflow.store.manifests import node_list

START, NEWEST = "g1-step-00000100-a1", "g1-step-00000300-a2"
CHOICE = Resume((1, 1, 2), NEWEST, 1, 300)


def claim(store, node, count=1):
    """Let *count* pods claim a node of attempt 2."""
    for number in range(count):
        take_claim(store, Claim(f"{node}/{number}"), generation=1, attempt=2, node=node)


def says(store, node, resume, *, number=1, **fields):
    """Write what the pod of *node* with claim *number* reports."""
    fields = {"start_step": 100, "phase": "running"} | fields
    body = Status(generation=1, attempt=2, node=node, claim=number, resume=resume, **fields)
    store.write(status_name(1, 2, node, number), body.to_json())


@pytest.fixture
def make_node(make_bench, store):
    """One of three nodes, which began from the checkpoint of the attempt before and trains."""

    def make(node, *, number=1):
        bench = make_bench(node=node, nodes=3)
        bench.who = AttemptNode(1, 2, node, 3, claim=number)
        bench.restarted()
        bench.in_store(START)
        bench.context.memory.update(start_step=100, restored_from=START, restored_claim=1, is_laid_out=True)
        bench.spool.write_json(bench.spool.start, {"cwd": "/w", "env": {"A": "1"}, "restore": {"step": 100}})
        bench.wrapper_says(progress={"step": 450})
        bench.saves = Checkpoints(bench.context, 3)
        bench.regroup = Regroup(bench.context, bench.saves)
        return bench

    return make


@pytest.fixture
def claimed(store):
    """All three nodes are claimed, the last one twice."""
    claim(store, 0)
    claim(store, 1)
    claim(store, 2, 2)


@pytest.mark.usefixtures("claimed")
def test_node_0_chooses_the_newest_for_the_claims_that_it_sees(make_node):
    """What was trained beyond it is counted as done again; start.json names it."""
    bench = make_node(0)
    bench.in_store(NEWEST)
    bench.in_store("g1-step-00000400-a2", cooperative=True, step=400, generation=2)  # torn: of another one

    bench.regroup.step()

    assert bench.state.resume == Resume((1, 1, 2), NEWEST, 1, 300, 450, 150)
    assert (bench.start()["cwd"], bench.start()["restore"]["step"]) == ("/w", 300)
    assert bench.start()["env"] == {"A": "1", "ENVSCALER_RESTORE": str(bench.spool.restored / NEWEST)}
    assert (bench.spool.restored / NEWEST / "model.bin").read_bytes() == NEWEST.encode()
    assert bench.state.start_step == 100  # of this pod


def test_without_a_new_claim_nothing_changes(make_node, store):
    """The claims are read every ten seconds."""
    for node in range(3):
        claim(store, node)
    bench = make_node(0)
    bench.in_store(NEWEST)

    bench.regroup.step()
    claim(store, 1, 2)
    bench.regroup.step()
    assert bench.state.resume is None

    bench.clock.now += CHECK_S
    bench.regroup.step()
    assert bench.state.resume == Resume((1, 2, 1), NEWEST, 1, 300, 450, 150)


@pytest.mark.usefixtures("claimed")
def test_without_a_newer_checkpoint_all_begin_where_they_began(make_node):
    """The choice is published all the same: the new pod waits for it."""
    bench = make_node(0)
    before = bench.spool.start.read_bytes()

    bench.regroup.step()

    assert bench.state.resume == Resume((1, 1, 2), START, 1, 100, 450, 350)
    assert bench.spool.start.read_bytes() == before


@pytest.mark.usefixtures("claimed")
def test_what_code_without_the_library_saved_stays_where_it_is(make_node):
    """Its worker reads the newest save on its own disk, and the new pod the start's."""
    bench = make_node(0)
    bench.in_store(NEWEST, cooperative=False)

    bench.regroup.step()

    assert bench.state.resume.checkpoint == START
    assert not (bench.spool.restored / NEWEST).exists()


@pytest.mark.usefixtures("claimed")
def test_steps_count_once_when_two_pods_are_replaced_one_after_another(make_node, store):
    """Nothing was trained between the two choices; then 20 steps were."""
    bench = make_node(0)
    bench.in_store(NEWEST)

    def repeated():
        bench.clock.now += CHECK_S
        bench.regroup.step()
        return bench.state.resume.repeated_steps

    assert repeated() == 150
    claim(store, 1, 2)
    assert repeated() == 150
    bench.wrapper_says(progress={"step": 320})
    claim(store, 1, 3)
    assert repeated() == 170


def test_the_others_follow(make_node, store, claimed):
    """They take what node 0 names for their claim, once."""
    bench = make_node(1)
    bench.in_store(NEWEST)
    says(store, 0, Resume((1, 2, 2), NEWEST, 1, 300))
    bench.regroup.step()
    assert bench.state.resume is None  # chosen for the pod that comes after this one

    bench.clock.now += CHECK_S
    says(store, 0, CHOICE)
    bench.regroup.step()

    assert bench.state.resume == CHOICE
    assert bench.start()["restore"]["step"] == 300


def test_saves_that_are_done_again_are_forgotten(make_node, store, claimed):
    """Of the save at step 400 node 2's part never came; a mixture of both must not be completed."""
    bench = make_node(1)
    bench.in_store(NEWEST)
    bench.session_saves("g1-step-00000400-a2", {"rank-1": b"before"}, step=400)
    bench.session_saves("g1-step-00000200-a2", {"rank-1": b"done"}, step=200)
    bench.saves.step()
    part = f"{checkpoint_prefix('g1-step-00000400-a2')}/{node_list(1, 1)}"
    assert store.size(part) is not None
    (bench.spool.checkpoints / "g1-step-00000500-a2.done").write_bytes(b"{}")

    says(store, 0, CHOICE)
    bench.regroup.step()

    assert store.size(part) is None
    assert bench.spool.saved(bench.who, with_done=True) == ["g1-step-00000200-a2"]


def test_a_checkpoint_that_cannot_be_fetched_is_taken_by_no_node(make_node, store, claimed):
    """The new pod waits, and the status says why."""
    bench = make_node(1)
    says(store, 0, CHOICE)

    bench.regroup.step()

    assert bench.state.resume is None
    assert NEWEST in bench.context.messages.text()


@pytest.mark.parametrize("text", [None, b"{torn"])
def test_without_the_rest_of_start_json_nothing_is_rewritten(make_node, store, claimed, text):
    """The training removed or damaged it: a worker must not begin without its settings."""
    bench = make_node(1)
    bench.in_store(NEWEST)
    bench.spool.start.unlink()
    if text is not None:
        bench.spool.start.write_bytes(text)
    says(store, 0, CHOICE)

    bench.regroup.step()

    assert bench.state.resume is None
    assert "start.json" in bench.context.messages.text()
    assert (bench.spool.start.read_bytes() if text else bench.spool.start.exists()) in (text, False)


def waiting(bench, on_wait):
    """Call *on_wait* with the number of each wait of the new pod."""
    waits = []

    def wait(_seconds):
        waits.append(1)
        assert len(waits) < 20
        on_wait(len(waits))

    bench.context.ending = threading.Event()
    bench.context.ending.wait = wait
    return waits


def test_the_new_pod_begins_once_every_node_has_taken_the_same(make_node, store, claimed):
    """No worker of another node can begin from an older checkpoint then."""
    bench = make_node(2, number=2)
    bench.in_store(NEWEST)
    says(store, 0, CHOICE)
    says(store, 1, None)
    waits = waiting(bench, lambda count: says(store, 1, CHOICE if count == 3 else None))

    found = restore_with_others(bench.context, Control(candidates=(START,)))

    assert (found.source, len(waits)) == (NEWEST, 3)
    assert (bench.state.start_step, bench.state.resume) == (300, CHOICE)


def test_a_second_loss_meanwhile_is_waited_for(make_node, store, claimed):
    """Node 1's pod goes too: node 0 chooses for both new pods, and both take that."""
    bench = make_node(2, number=2)
    bench.in_store(NEWEST)
    says(store, 0, CHOICE)
    says(store, 1, None)
    both = Resume((1, 2, 2), NEWEST, 1, 300, repeated_steps=7)

    def on_wait(count):
        if count == 2:
            claim(store, 1, 2)
        if count == 3:
            says(store, 0, both)
        if count == 5:
            says(store, 1, both, number=2)

    waits = waiting(bench, on_wait)
    restore_with_others(bench.context, Control())

    assert (bench.state.resume, len(waits)) == (both, 5)


def test_a_new_pod_of_node_0_chooses_and_waits(make_node, store):
    """The others are replaced too, as their launchers lost it; it chooses again for each of them."""
    claim(store, 0, 2)
    claim(store, 1)
    claim(store, 2)
    bench = make_node(0, number=2)
    bench.in_store(NEWEST)

    def on_wait(count):
        if count == 2:
            claim(store, 1, 2)
        if count == 3:
            says(store, 1, bench.state.resume, number=2)
            says(store, 2, bench.state.resume)

    waits = waiting(bench, on_wait)
    restore_with_others(bench.context, Control())

    assert (bench.state.resume, len(waits)) == (Resume((2, 2, 1), NEWEST, 1, 300), 3)


def test_a_node_that_has_ended_is_not_waited_for(make_node, store, claimed):
    """Node 1 has succeeded and takes nothing any more: the command finds out that its peer is gone."""
    bench = make_node(2, number=2)
    bench.in_store(NEWEST)
    says(store, 0, CHOICE)
    says(store, 1, None, phase="ended")
    waits = waiting(bench, lambda _count: None)

    found = restore_with_others(bench.context, Control(candidates=(START,)))

    assert (found.source, waits) == (NEWEST, [])


def test_a_stop_ends_the_wait(make_node, store, claimed):
    """The owner takes the attempt down."""
    bench = make_node(2, number=2)
    bench.in_store(NEWEST)
    says(store, 0, CHOICE)
    waiting(bench, lambda _count: bench.heard(action="stop", reason="budget"))

    with pytest.raises(SetupCancelledError):
        restore_with_others(bench.context, Control())


def test_the_choice_outlives_the_sidecar(make_node, claimed):
    """It is in sidecar.json, and a sidecar that starts again repeats nothing."""
    bench = make_node(0)
    bench.in_store(NEWEST)
    bench.regroup.step()
    chosen = bench.state.resume

    bench.restarted()

    assert bench.state.resume == chosen
    assert json.loads(bench.spool.sidecar.read_bytes())["resume"]["step"] == 300
