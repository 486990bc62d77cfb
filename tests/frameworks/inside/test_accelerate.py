"""Accelerate with a session: what is saved, when, and which errors occur."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

from envscaler_agent.ending import EXIT_DRAINED
from envscaler_agent.frameworks.accelerate import AcceleratedSession

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))


def train(rig, *, epochs=3, accumulation=1, seedable=False, on_epoch=None, project=None, lr=0.1):
    """Six batches of four rows an epoch, shuffled, with dropout; the model and the session."""
    set_seed(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        project_config=project,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
    )
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with AcceleratedSession(accelerator, loader, rig.session()) as session:
        while session.epoch < epochs:
            for batch in session.batches():
                with accelerator.accumulate(model):
                    loss = model(torch.nn.functional.dropout(batch, 0.5)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                session.step(loss=loss)
            if on_epoch is not None:
                on_epoch(session.epoch)
    return model, session


def resume(rig, name):
    """Let the next session resume from the checkpoint *name*."""
    body = json.loads(rig.spool.start.read_bytes())
    body["restore"] = {"path": str(rig.spool.checkpoints / name), "name": name}
    body["session"]["attempt"] += 1
    rig.spool.start.write_text(json.dumps(body))


@pytest.mark.parametrize(("every", "accumulation"), [(4, 1), (6, 1), (13, 1), (2, 2), (3, 2)])
def test_a_resume_ends_with_the_same_weights(rig_every, every, accumulation):
    """Within an epoch and at its end, with the work after an epoch: equal to the bit, no sample twice."""
    rig = rig_every(every)
    seen, again_seen = [], []

    def note(where):
        return lambda epoch: where.append((epoch, torch.rand(1).item()))

    whole, _ = train(rig, accumulation=accumulation, on_epoch=note(seen))
    name = rig.names()[0]
    resume(rig, name)
    again, session = train(rig, accumulation=accumulation, on_epoch=note(again_seen))

    assert name == f"g1-step-{every:08d}-a2"
    assert torch.equal(again.weight, whole.weight)
    assert session.session.steps == 18 // accumulation
    assert again_seen == [item for item in seen if item[0] * 6 // accumulation > every]


@pytest.mark.parametrize("every", [8, 12])
def test_an_order_that_is_drawn_from_the_epoch_goes_on_in_the_right_epoch(rig_every, every):
    """``use_seedable_sampler``: a new process would start with the order of epoch 0."""
    rig = rig_every(every)
    whole, _ = train(rig, seedable=True)
    resume(rig, rig.names()[0])
    again, _ = train(rig, seedable=True)

    assert torch.equal(again.weight, whole.weight)


def test_what_accelerate_names_itself_is_saved_with_the_session_all_the_same(rig_every, tmp_path):
    """``automatic_checkpoint_naming`` would write weights elsewhere: the checkpoint would restore nothing."""
    rig = rig_every(4)
    project = ProjectConfiguration(project_dir=str(tmp_path / "p"), automatic_checkpoint_naming=True)
    model, _ = train(rig, project=project)
    resume(rig, rig.names()[0])
    again, _ = train(rig, project=project)

    assert project.automatic_checkpoint_naming
    assert torch.equal(again.weight, model.weight)


def test_a_learning_rate_of_numpy_is_restored(rig_every):
    """``accelerator.load_state`` alone refuses its own checkpoint of such a rate."""
    rig = rig_every(4)
    model, _ = train(rig, lr=np.float64(0.1))
    resume(rig, rig.names()[0])
    again, _ = train(rig, lr=np.float64(0.1))

    assert torch.equal(again.weight, model.weight)


def test_accumulated_gradients_count_as_one_step(rig):
    """Two batches a step: three steps an epoch, of eight samples."""
    train(rig, accumulation=2)

    progress = rig.said().progress
    assert (progress.step, progress.samples, progress.batch) == (9, 72, 8)
    assert progress.micro_batches == 2


def test_asked_to_leave_it_saves_and_ends(rig):
    """``SystemExit`` with the protocol's code."""
    rig.ask("drain")

    with pytest.raises(SystemExit) as left:
        train(rig)

    assert left.value.code == EXIT_DRAINED
    assert rig.names() == ["g1-step-00000001-a2"]


def test_asked_to_leave_at_the_last_step_it_ends_as_it_would(rig):
    """A request has no effect when no work is left."""

    def ask(_epoch):
        rig.ask("drain")
        rig.now += 10

    _, session = train(rig, epochs=1, on_epoch=ask)

    assert session.epoch == 1
    assert rig.names() == []


def test_a_disk_that_is_full_costs_a_checkpoint_and_no_training(rig_every, monkeypatch, full_disk):
    """The training continues, and the next checkpoint is saved."""
    rig = rig_every(5)
    save, calls = Accelerator.save_state, []

    def full(self, *arguments, **named):
        calls.append(arguments)
        if len(calls) == 1:
            raise full_disk
        return save(self, *arguments, **named)

    monkeypatch.setattr(Accelerator, "save_state", full)
    train(rig)

    assert rig.names() == ["g1-step-00000010-a2", "g1-step-00000015-a2"]


def test_a_loader_that_was_not_prepared_is_refused(rig):
    """The position in it would be unknown on several ranks."""
    with pytest.raises(ValueError, match="what accelerator"):
        AcceleratedSession(Accelerator(cpu=True), torch.utils.data.DataLoader(ROWS), rig.session())


class Stream(torch.utils.data.IterableDataset):
    """Rows one after another."""

    def __iter__(self):
        """All of them."""
        return iter(ROWS)


def test_a_stream_is_refused_by_name(rig):
    """Although it is prepared, its position is unknown."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Stream(), batch_size=4))

    with pytest.raises(ValueError, match="an IterableDataset has no place"):
        AcceleratedSession(accelerator, loader, rig.session())
