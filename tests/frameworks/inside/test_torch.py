"""A data order that survives resumes and rescales, and a state that contains the whole training."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from envscaler_agent.frameworks import random_state, set_random_state
from envscaler_agent.frameworks import torch as of_torch
from envscaler_agent.frameworks.torch import ResumableLoader, ShardedState, TrainingState
from envscaler_airflow.errors import CheckpointError

NUMBERS = torch.arange(100)


def loader(*, rank=0, world_size=1, **options):
    """A loader of a hundred numbers in global batches of 8."""
    options = {"global_batch": 8, "micro_batch": 2, "seed": 3, **options}
    return ResumableLoader(NUMBERS, rank=rank, world_size=world_size, **options)


def steps(of, count):
    """Samples of the next *count* steps."""
    batches = iter(of)
    return [[int(number) for _ in range(of.accumulation) for number in next(batches)] for _ in range(count)]


def test_an_epoch_uses_no_sample_twice_and_as_many_on_each_rank():
    """12 global batches of 8 of 100 samples: 96 different samples, for any number of ranks."""
    for world_size in (1, 2, 4):
        ranks = [loader(rank=rank, world_size=world_size) for rank in range(world_size)]
        used = [[int(number) for batch in each for number in batch] for each in ranks]

        assert {len(mine) for mine in used} == {96 // world_size}
        assert len({number for mine in used for number in mine}) == 96
        assert [each.epoch for each in ranks] == [1] * world_size


def test_a_step_uses_the_same_samples_whatever_the_number_of_ranks():
    """The third step of one rank has the samples that two ranks divide in their third step."""
    alone = steps(loader(), 3)[2]
    shared = [steps(loader(rank=rank, world_size=2), 3)[2] for rank in (0, 1)]

    assert shared[0] + shared[1] == alone


def test_epochs_have_different_orders_and_seeds_too():
    """The order depends on seed and epoch alone."""
    twice = loader()
    first, second = list(twice.order()), [list(twice), twice.order()][1]

    assert first != second
    assert sorted(first) != first
    assert loader().order() == first
    assert loader(seed=4).order() != first
    assert loader(shuffle=False).order() == list(range(96))


def test_two_ranks_go_on_in_the_middle_of_an_epoch_that_one_began():
    """Five steps by one rank, seven by two: each of the 96 samples once."""
    one = loader()
    begun = steps(one, 5)
    state = one.state_dict()
    two = [loader(rank=rank, world_size=2) for rank in (0, 1)]
    for each in two:
        each.load_state_dict(state)
    rest = [int(number) for each in two for batch in each for number in batch]

    assert len(rest) == 56
    assert len({number for step in begun for number in step} | set(rest)) == 96


def test_what_workers_fetch_ahead_does_not_count_as_used():
    """Two worker processes are batches ahead; the position is that of the yielded batches."""
    ahead = loader(num_workers=2, prefetch_factor=4)
    steps(ahead, 2)

    assert ahead.position == 16
    follower = loader()
    follower.load_state_dict(ahead.state_dict())
    assert steps(follower, 1) == [steps(loader(), 3)[2]]


def test_an_order_takes_nothing_from_torch_s_own_generator():
    """A resume starts an epoch's loop once more often: dropout would draw other masks after it."""
    before = torch.get_rng_state()
    steps(loader(), 2)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_place_counts_whole_steps_alone():
    """Within a step that accumulates, the position is the step's start."""
    of = loader()
    batches = iter(of)
    seen = []
    for _ in range(5):
        next(batches)
        seen.append((of.position, of.is_step_end))

    assert seen == [(0, False), (0, False), (0, False), (8, True), (8, False)]


def test_a_loop_that_is_broken_off_goes_on_where_it_was():
    """``break`` after a step, then a new loop: no sample is lost or used twice."""
    of = loader()
    first = []
    for batch in of:
        first += batch.tolist()
        if len(first) == 40:
            break
    rest = [int(number) for batch in of for number in batch]

    assert len(set(first) | set(rest)) == 96
    assert len(rest) == 56
    assert (of.epoch, of.position) == (1, 0)


def test_the_end_of_an_epoch_is_told_with_its_last_batch():
    """``epoch_end`` is 0 except for the last batch; the state there is the start of the next epoch."""
    of = loader()
    told = [(of.epoch_end, of.state_dict()["epoch"], of.state_dict()["position"]) for _ in of]

    assert [ends for ends, _, _ in told] == [0] * 47 + [1]
    assert told[-1] == (1, 1, 0)


def test_sizes_come_from_the_stage(monkeypatch):
    """The environment has the number that ``distributed.global_batch`` derives from the number of nodes."""
    monkeypatch.setenv("ENVSCALER_GLOBAL_BATCH", "24")
    monkeypatch.setenv("ENVSCALER_MICRO_BATCH", "6")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    of = ResumableLoader(NUMBERS)

    assert (of.global_batch, of.micro_batch, of.accumulation, of.rank, len(of)) == (24, 6, 2, 1, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": None}, "ENVSCALER_GLOBAL_BATCH is not set"),
        ({"global_batch": 101, "micro_batch": None}, "101 is more than the dataset's 100"),
        ({"micro_batch": 3}, "8 is not a multiple of 3 samples x 1 ranks"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, words):
    """The message contains both numbers."""
    with pytest.raises(ValueError, match=words):
        loader(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"seed": 4}, "seed 3, this one 4"), ({"global_batch": 16}, "not a multiple of 16")],
)
def test_a_place_in_another_order_is_refused(options, words):
    """A seed or a batch size that changed in between would repeat and drop samples."""
    of = loader()
    steps(of, 3)

    with pytest.raises(CheckpointError, match=words):
        loader(**options).load_state_dict(of.state_dict())


def test_the_random_state_holds_every_generator():
    """Python, numpy and torch draw the same numbers again."""
    numpy = pytest.importorskip("numpy")
    state = random_state()
    drawn = [(random.random(), numpy.random.random(), torch.rand(1).item())]
    set_random_state(state)
    drawn.append((random.random(), numpy.random.random(), torch.rand(1).item()))

    assert drawn[0] == drawn[1]


def trained(model):
    """A model and its optimizer after a step with dropout."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.nn.functional.dropout(model(torch.ones(4)).sum(), 0.5).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [TrainingState, ShardedState])
def test_a_state_brings_back_parameters_optimizer_place_and_randomness(kind, tmp_path):
    """Everything that determines the next step is the same in another process's objects."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    optimizer = trained(model)
    data = loader()
    steps(data, 2)
    kind(model=model, optimizer=optimizer, loader=data).save(tmp_path)
    next_draw = torch.rand(3)

    other, theirs = torch.nn.Linear(4, 4), loader()
    their_optimizer = torch.optim.AdamW(other.parameters())
    loaded = kind(model=other, optimizer=their_optimizer, loader=theirs).load(tmp_path)

    assert loaded
    assert torch.equal(torch.rand(3), next_draw)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    ours, their = optimizer.state_dict()["state"], their_optimizer.state_dict()["state"]
    assert all(torch.equal(ours[at][name], their[at][name]) for at in ours for name in ours[at])
    assert theirs.position == 16


def test_shards_that_cannot_be_written_or_read_are_no_end_of_the_training(tmp_path, monkeypatch):
    """Torch raises a BaseException then; a full disk must cost a checkpoint alone."""
    model = torch.nn.Linear(2, 2)
    state = ShardedState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def full(*_given, **_named):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint.FileSystemWriter, "write_data", full)
        with pytest.raises(CheckpointError, match=r"shards cannot be saved: rank 0: OSError\(28"):
            state.save(tmp_path / "full")
    state.save(tmp_path / "torn")
    for shard in (tmp_path / "torn").glob("*.distcp"):
        shard.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="shards cannot be read: rank 0: "):
        state.load(tmp_path / "torn")


def test_a_fresh_start_loads_nothing():
    """``Session.restore`` returns None then."""
    assert TrainingState(model=torch.nn.Linear(1, 1)).load(None) is False


def test_a_checkpoint_of_other_parts_is_refused(tmp_path):
    """A schedule that was added since has no state: an error names it, and it does not restart silently."""
    model = torch.nn.Linear(1, 1)
    TrainingState(model=model).save(tmp_path)

    with pytest.raises(
        CheckpointError, match=r"contains \['model'\], this training is \['loader', 'model'\]"
    ):
        TrainingState(model=model, loader=loader()).load(tmp_path)


class Kept:
    """A part of a training that stores one value."""

    def __init__(self, value):
        """Store it."""
        self.value = value

    def state_dict(self):
        """Return it."""
        return {"value": self.value}

    def load_state_dict(self, state):
        """Restore it."""
        self.value = state["value"]


@pytest.mark.parametrize("value", [np.float64(0.5), np.int64(3), np.float32(0.25), np.bool_(True)])
def test_numbers_of_numpy_are_read_back(value, tmp_path):
    """A learning rate from ``np.linspace``: its checkpoints would be refused at every restore."""
    TrainingState(kept=Kept(value)).save(tmp_path)
    again = Kept(None)
    TrainingState(kept=again).load(tmp_path)

    assert again.value == value
    assert type(again.value) is type(value)


def test_an_array_of_numpy_is_read_back(tmp_path):
    """As it was."""
    TrainingState(kept=Kept(np.arange(3))).save(tmp_path)
    again = Kept(None)
    TrainingState(kept=again).load(tmp_path)

    assert again.value.tolist() == [0, 1, 2]


def test_what_no_restore_would_read_is_told_at_the_save(tmp_path):
    """While the training is still running, not when its machine is gone."""
    with pytest.raises(
        CheckpointError, match=r"a state_dict contains pathlib.* which a restore would refuse"
    ):
        TrainingState(kept=Kept(tmp_path)).save(tmp_path)


_ENDING = """
import atexit, sys, torch
from envscaler_agent.frameworks.torch import leave_group_at_exit
torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + sys.argv[1])
atexit.register(lambda: print("there" if torch.distributed.is_initialized() else "left"))
leave_group_at_exit()
leave_group_at_exit()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("end", "code", "group"),
    [("", 0, "left"), ("raise SystemExit(75)", 75, "left"), ("raise ValueError", 1, "there")],
)
def test_the_group_is_left_at_the_end_but_not_waited_for_after_an_error(end, code, group, tmp_path):
    """A failed rank must not wait for ranks that hang."""
    command = [sys.executable, "-c", _ENDING + end, str(tmp_path / "store")]
    root = Path(__file__).parents[3] / "agent"
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout.strip()) == (code, group), done.stderr


def test_a_group_of_nccl_is_left_to_the_end_of_the_process(monkeypatch):
    """Its exit waits for the other ranks; after ``sys.exit("no data")`` of one they would wait for it."""
    destroyed = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: destroyed.append(1))
    monkeypatch.setattr(of_torch, "_DRAIN_S", 0.0)

    for backend in ("nccl", "gloo"):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda backend=backend: backend)
        of_torch._leave_group()
        destroyed.append(backend)

    assert destroyed == ["nccl", 1, "gloo"]
