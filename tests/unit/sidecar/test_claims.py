"""The pod that claimed a node last represents it, and no other pod does."""

import threading

import pytest

from envscaler_agent.process import ADDRESS
from envscaler_agent.protocol import Control, Ended, Resume, Status, claim_name, status_name
from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.sidecar import owner_watch as standing
from envscaler_airflow.sidecar.context import SetupCancelledError
from envscaler_airflow.sidecar.loop import Sidecar, Speaker, compose
from envscaler_airflow.sidecar.owner_watch import OwnerWatch
from envscaler_airflow.sidecar.restore import restore
from envscaler_airflow.sidecar.setup import lay_out
from envscaler_airflow.sidecar.spool_state import AttemptNode, Memory
from envscaler_airflow.sidecar.uploads import Checkpoints, Outputs
from envscaler_airflow.store import manifests
from envscaler_airflow.store.checkpoints import complete_checkpoints, prune, read_checkpoint
from envscaler_airflow.store.lease import Claim, newest_claim, take_claim
from envscaler_airflow.store.logs import CLAIM_CHUNKS, read_logs
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.faulty_store import FaultyStore

NODE = {"generation": 1, "attempt": 2, "node": 0}
NAME = "g1-step-00000300-a2"
DECIDED = {"generation": 1, "attempt": 2, "phase": "running", "start_step": 0}


def claim(store, uid, **where):
    """Claim node 0 of attempt 2, or another node."""
    return take_claim(store, Claim(uid, "boot"), **(NODE | where))


def test_each_pod_has_its_own_number_and_keeps_it(store):
    """Three pods one after another; the second claims again after a restart (D1)."""
    assert [claim(store, uid) for uid in ("a", "b", "c", "b", "a")] == [1, 2, 3, 2, 1]
    assert newest_claim(store, **NODE) == 3
    assert newest_claim(store, generation=1, attempt=2, node=1) == 0
    assert Claim.from_json(store.read(claim_name(1, 2, 0, 2)), where="t") == Claim("b", "boot")


@pytest.mark.parametrize("method", ["create", "read"])
def test_a_lost_answer_claims_no_second_number(store, method):
    """The claim was written but the answer was lost: the repeated call finds it (D1)."""
    faulty = FaultyStore(store)
    faulty.add("lose-answer", method)
    with pytest.raises(StoreError):
        claim(faulty, "a")

    assert claim(faulty, "a") == 1
    assert newest_claim(store, **NODE) == 1


def test_claims_have_a_bound(store, monkeypatch):
    """One sidecar that creates them without end blocks neither the owner nor another pod (B1)."""
    monkeypatch.setattr("envscaler_airflow.store.lease.MOST_CLAIMS", 3)
    for number in range(1, 9):
        store.create(claim_name(1, 2, 0, number), Claim(f"pod {number}").to_json())

    with pytest.raises(ProtocolError, match="claimed 3 times"):
        claim(store, "late")

    assert newest_claim(store, **NODE) == 3
    assert claim(store, "pod 2") == 2


def test_two_pods_that_claim_at_once_get_two_numbers(store):
    """Another pod is quicker between the read and the claim (D1)."""
    create = store._store.create

    def late(name, data):
        store._store.create = create
        claim(store, "other")
        return create(name, data)

    store._store.create = late

    assert claim(store, "late") == 2


def test_a_claim_that_cannot_be_read_is_another_pods(store):
    """Torn, or of a later version (D1)."""
    store.write(claim_name(1, 2, 0, 1), b"{torn")

    assert claim(store, "a") == 2


def unclaimed(bench, uid):
    """Return the bench's sidecar before its claim."""
    bench.who = AttemptNode(1, 2, bench.who.node, bench.who.nodes, claim=0)
    context = bench.restarted()
    context.uid = uid
    return context


def test_a_sidecar_claims_before_it_writes_anything_else(bench, store):
    """A pod without a claim writes no status and no log; afterwards everything carries the claim (D1)."""
    claim(store, "lost pod")
    bench.owner_asks()
    context = unclaimed(bench, "new pod")
    (bench.spool.root / "logs/000001.log").write_text("hello\n")
    sidecar = Sidecar(context)
    store.puts.clear()
    sidecar.step()
    assert store.puts == []

    lay_out(context)
    sidecar.step()

    assert context.who.claim == 2
    assert store.puts == ["logs/g1-a2-n0-c2-000001.log", "status/g1-a2-n0-c2.json"]


def test_a_restarted_sidecar_needs_no_store_to_know_its_claim(bench, store):
    """sidecar.json has it, under the UID of its pod (D1)."""
    standing.claim_node(unclaimed(bench, "pod"))
    store.down = True
    context = unclaimed(bench, "pod")

    standing.claim_node(context)

    assert (context.who.claim, Memory(bench.spool).state.uid) == (1, "pod")


def test_only_the_pod_that_claimed_last_is_heard(bench, store):
    """The lost pod keeps running and reports; the owner reads only the new one, or nothing yet (D1)."""
    old = bench.context
    claim(store, "old")
    Speaker(old).step(compose(old, Status(phase="running"), is_over=False))
    assert Run(store, "").status((1, 2)).claim == 1

    claim(store, "new")
    Speaker(old).step(compose(old, Status(phase="checkpointing"), is_over=False))

    assert Run(store, "").status((1, 2)) is None


def test_a_pod_with_a_lower_claim_publishes_nothing_and_ends(bench, store, tmp_path):
    """Its checkpoint and output are void, nothing is deleted, and its training is stopped (D1)."""
    path = tmp_path / "model"
    path.write_text("weights")
    bench.layout = bench.layout.model_copy(update={"outputs": {"model": str(path)}})
    bench.restarted()
    bench.heard()
    claim(store, "old")
    claim(store, "new")
    bench.session_saves(NAME, step=300)

    assert Checkpoints(bench.context, 3).step()
    assert Outputs(bench.context).step()
    watch = OwnerWatch(bench.context)
    watch.step()

    assert complete_checkpoints(store, 1) == ()
    assert store.children("outputs") == []
    asked = bench.spool.current_control()
    assert (asked.action, asked.reason) == (
        "stop",
        "orphaned: another pod has claimed this node; what this one writes is void",
    )


def test_a_checkpoint_does_not_count_once_another_pod_came_during_its_upload(bench, store):
    """Claims are read again before the manifest, which alone makes it a checkpoint (D1)."""
    bench.restarted()
    bench.heard()
    claim(store, "old")
    bench.session_saves(NAME, step=300)
    put_file = store._store.put_file

    def slow(name, source):
        put_file(name, source)
        claim(store, "new")

    store._store.put_file = slow

    assert Checkpoints(bench.context, 3).step()

    assert complete_checkpoints(store, 1) == ()
    assert "another pod has claimed this node" in bench.context.messages.text()


def test_an_output_does_not_count_once_another_pod_came_during_its_upload(bench, store, tmp_path):
    """Claims are read again before the manifest: the uploaded files do not count (D1)."""
    path = tmp_path / "model"
    path.write_text("weights")
    bench.layout = bench.layout.model_copy(update={"outputs": {"model": str(path)}})
    context = bench.restarted()
    claim(store, "old")
    put_file = store._store.put_file

    def slow(name, source):
        put_file(name, source)
        claim(store, "new")

    store._store.put_file = slow

    assert Outputs(context).step()

    assert store.names("outputs") == ["outputs/g1-a2-c1/model/model"]
    assert "another pod has claimed this node" in bench.state.failed


def test_without_the_store_a_pod_trains_on(bench, store):
    """It cannot know of another claim, and does not wait for an answer (D1)."""
    bench.heard()
    store.down = True

    OwnerWatch(bench.context).step()

    assert bench.spool.current_control().action == "run"
    bench.session_saves(NAME, step=300)
    assert not Checkpoints(bench.context, 3).step()


def test_the_log_of_a_replaced_node_goes_on_with_its_next_pod(store):
    """Two chunks of the lost pod, then those of the new one; the cursor has the position (D1)."""
    claim(store, "old")
    store.write("logs/g1-a2-n0-c1-000001.log", b"old 1\n")
    text, cursor = read_logs(Run(store, ""), attempt=(1, 2), node=0)
    assert (text, cursor) == (b"old 1\n", (2, 0))

    claim(store, "new")
    store.write("logs/g1-a2-n0-c2-000001.log", b"new 1\n")
    text, cursor = read_logs(Run(store, ""), attempt=(1, 2), node=0, cursor=cursor)

    assert (text, cursor) == (b"new 1\n", (CLAIM_CHUNKS + 2, 0))


# -- node 0, as seen by the other nodes


def following(make_bench, on_wait, *, claims=1):
    """Return node 1 of two under its *claims*-th claim; *on_wait* is called with the number of each wait."""
    bench = make_bench(node=1, nodes=2)
    bench.who = AttemptNode(1, 2, 1, 2, claim=claims)
    context = bench.restarted()
    waits = []

    def wait(seconds):
        waits.append(seconds)
        bench.clock.now += max(seconds, 20.0)
        on_wait(len(waits))

    context.ending = threading.Event()
    context.ending.wait = wait
    return context


def report(store, number, sequence=1, **fields):
    """Write the last report of node 0's pod with claim *number*."""
    status = Status(claim=number, sequence=sequence, **(DECIDED | fields))
    store.write(status_name(1, 2, 0, number), status.to_json())


def test_a_replaced_node_does_not_take_an_old_pods_end_for_node_0s(make_bench, store):
    """Both pods were evicted: node 1's new pod waits for node 0's new pod, and follows it (D14)."""
    claim(store, "old 0")
    report(store, 1, ended=Ended(reason="stopped"), phase="ended")

    def on_wait(count):
        if count == 3:
            claim(store, "new 0")
            report(store, 2, phase="restoring", start_step=None)
        if count == 5:
            report(store, 2, sequence=2, address="10.0.0.9:29400", resume=Resume((2, 2)))

    context = following(make_bench, on_wait, claims=2)

    assert restore(context, Control()) is None
    assert context.rendezvous == "10.0.0.9:29400"


def test_a_replaced_node_follows_no_choice_that_was_left_behind(make_bench, store):
    """Node 0's pod vanished without an end: what it chose for the pods before counts for none after (D14)."""
    claim(store, "old 0")
    report(store, 1, address="10.0.0.1:29400")

    def on_wait(count):
        if count == 2:
            claim(store, "new 0")
            report(store, 2, address="10.0.0.2:29400", resume=Resume((2, 1)))
        if count == 4:
            report(store, 2, sequence=2, address="10.0.0.3:29400", resume=Resume((2, 2)))

    context = following(make_bench, on_wait, claims=2)
    restore(context, Control())

    assert context.rendezvous == "10.0.0.3:29400"


def test_a_replaced_node_waits_until_a_node_0_that_lives_has_chosen_again(make_bench, store):
    """Node 0 was not replaced: its address stays valid, its choice of the start does not (D14)."""
    claim(store, "0")
    report(store, 1, address="10.0.0.1:29400", start_step=100, restored_from=NAME)

    def on_wait(count):
        choice = Resume((1, 2)) if count > 3 else None
        report(store, 1, 1 + count, address="10.0.0.1:29400", start_step=100, resume=choice)

    context = following(make_bench, on_wait, claims=2)

    assert restore(context, Control()) is None
    assert context.rendezvous == "10.0.0.1:29400"
    assert context.memory.state.resume == Resume((1, 2))


def test_an_address_that_is_none_is_left_out(make_bench, store):
    """A status is untrusted data (D14)."""
    claim(store, "0")
    report(store, 1, address="$(touch /tmp/x)")
    context = following(make_bench, lambda _count: None)

    restore(context, Control())

    assert context.rendezvous is None


def test_a_node_0_that_is_not_replaced_in_time_ends_the_others(make_bench, store):
    """No new pod within a quarter of an hour: that is not the stage's fault (D14)."""
    claim(store, "0")
    report(store, 1, ended=Ended(reason="killed"), phase="ended")
    waits = []
    context = following(make_bench, waits.append, claims=2)

    with pytest.raises(SetupCancelledError, match="node 0 has ended: killed"):
        restore(context, Control())
    assert len(waits) == 45  # of 20 s


def test_the_command_learns_the_address_with_the_choice(bench, store):
    """start.json has both, so address and checkpoint come from the same pod (D14)."""
    bench.owner_asks()
    bench.context.address = "10.0.0.1:29400"

    lay_out(bench.context)

    assert bench.start()["env"] == {ADDRESS: "10.0.0.1:29400"}
    assert compose(bench.context, None, is_over=False).address == "10.0.0.1:29400"


# -- checkpoints


def test_a_checkpoint_has_a_part_for_each_node_and_claim(make_bench, store):
    """Two pods of one node, and two nodes, never write to the same name (D1)."""
    bench = make_bench()
    bench.who = AttemptNode(1, 2, 0, 1, claim=2)
    bench.session_saves(NAME, step=300)

    assert Checkpoints(bench.restarted(), 3).step()

    assert store.children(f"checkpoints/{NAME}") == ["manifest-c2.json", "n0-c2"]


def saved_by(bench, number, name, data):
    """Let the pod with claim *number* save and publish checkpoint *name*, despite any other claims."""
    bench.who = AttemptNode(1, 2, 0, 1, claim=number)
    context = bench.restarted()
    bench.session_saves(name, {"model.bin": data}, step=300)
    checkpoints = Checkpoints(context, 3)
    checkpoints._may_publish = lambda _name: True  # the claims were read a moment before
    assert checkpoints.step()
    bench.spool.done(name).unlink()
    return context


def test_what_an_older_pod_publishes_late_is_void(bench, store):
    """It read the claims just before the new pod came: its manifest is after the new pod's list (D1)."""
    early, late = "g1-step-00000200-a2", "g1-step-00000900-a2"
    claim(store, "old")
    saved_by(bench, 1, early, b"early")
    assert claim(store, "new") == 2
    bench.who = AttemptNode(1, 2, 0, 1, claim=2)
    found = restore(bench.restarted(), Control(candidates=()))
    assert (found.source, found.claim) == (early, 1)

    saved_by(bench, 1, late, b"late")
    assert complete_checkpoints(store, 1) == (early,)
    again = saved_by(bench, 2, late, b"new")

    assert complete_checkpoints(store, 1) == (late, early)
    assert (restore(again, Control(candidates=())).path / "model.bin").read_bytes() == b"new"


def test_a_restarted_sidecar_accepts_no_more_than_it_did(bench, store):
    """The list of a claim is made once: later checkpoints stay void (D1)."""
    claim(store, "old")
    claim(store, "new")
    bench.who = AttemptNode(1, 2, 0, 1, claim=2)
    restore(bench.restarted(), Control(candidates=()))
    saved_by(bench, 1, NAME, b"late")
    bench.who = AttemptNode(1, 2, 0, 1, claim=2)

    assert restore(bench.restarted(), Control(candidates=())) is None


def test_a_pod_that_never_listed_voids_nothing(bench, store):
    """It claimed node 0 and died at once: checkpoints of its predecessor count (D1)."""
    claim(store, "old")
    saved_by(bench, 1, NAME, b"weights")
    claim(store, "died")

    assert complete_checkpoints(store, 1) == (NAME,)


def test_other_nodes_take_the_manifest_that_node_0_chose(make_bench, store):
    """One folder has two manifests: both nodes read the same one (D1)."""
    first = make_bench()
    claim(store, "old")
    saved_by(first, 1, NAME, b"old")
    claim(store, "new")
    saved_by(first, 2, NAME, b"new")
    report(store, 2, start_step=300, resume=Resume((2, 1), NAME, 1, 300))
    other = following(make_bench, lambda _count: None)

    found = restore(other, Control(candidates=()))

    assert (found.path / "model.bin").read_bytes() == b"old"


def test_an_older_pod_of_node_0_prunes_nothing(bench, store):
    """Another pod has claimed node 0 between its list and its deletion (D1)."""
    for step in (100, 200, 300):
        bench.in_store(f"g1-step-{step:08d}-a2")
    claim(store, "old")
    claim(store, "new")
    options = {"generation": 1, "attempt": 2, "candidates": (), "keep": 1}

    assert prune(store, claim=1, **options) == ()
    assert prune(store, claim=2, **options) == ("g1-step-00000100-a2",)


# -- files of the same name


def test_each_node_gets_its_own_file_of_one_name_back(make_bench, store, caplog):
    """Both nodes save their own model.pt: the checkpoint counts, and the status names the file (D7)."""
    benches = [make_bench(node=node, nodes=3) for node in range(3)]
    for bench in benches:
        bench.owner_asks()
        content = {"model.pt": b"rank %d" % min(bench.who.node, 1), "config.json": b"{}"}
        bench.session_saves(NAME, content, step=300)
    for bench in (*benches[1:], benches[0]):
        checkpoints = Checkpoints(bench.context, 3)
        checkpoints.step()

    assert complete_checkpoints(store, 1) == (NAME,)
    words = "several nodes saved different files as model.pt; each node gets its own back"
    assert words in benches[0].context.messages.text()
    assert words in caplog.text
    got = []
    for node in range(4):
        target = benches[0].root / f"back-{node}"
        target.mkdir()
        manifests.fetch(store, f"checkpoints/{NAME}", read_checkpoint(store, NAME), target, node=node)
        got.append((target / "model.pt").read_bytes())
        assert (target / "config.json").read_bytes() == b"{}"
    assert got == [b"rank 0", b"rank 1", b"rank 1", b"rank 0"]
