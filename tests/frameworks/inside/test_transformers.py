"""The Hugging Face Trainer with a session: what is saved, when, and which errors occur."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from envscaler_agent.ending import EXIT_DRAINED
from envscaler_agent.frameworks.transformers import SessionCallback


class Line(PreTrainedModel):
    """One weight that should become 2; dropout, so that the random state matters."""

    config_class = PretrainedConfig

    def __init__(self):
        """Start at 0."""
        super().__init__(PretrainedConfig())
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x, labels):
        """Loss and prediction."""
        guess = torch.nn.functional.dropout(x, 0.5, self.training) @ self.weight
        return {"loss": ((guess - labels) ** 2).mean(), "logits": guess}


class Evaluations(TrainerCallback):
    """Counts evaluations by step."""

    def __init__(self):
        """Start without counts."""
        self.at = []

    def on_evaluate(self, args, state, control, **_):
        """Count one."""
        self.at.append(state.global_step)


def rows(count):
    """Rows of a line with slope 2."""
    generator = torch.Generator().manual_seed(5)
    xs = torch.randn(count, 4, generator=generator)
    return [{"x": x, "labels": 2 * x.sum()} for x in xs]


def trainer(folder, *, epochs=2, save_strategy="no", **options):
    """12 rows in batches of 2: six batches, or three steps of two, an epoch."""
    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=2,
        save_strategy=save_strategy,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=0.1,
        **options,
    )
    made = Trainer(model=Line(), args=arguments, train_dataset=rows(12), eval_dataset=rows(4))
    made.seen = Evaluations()
    made.add_callback(made.seen)
    return made


def resumed(rig, folder, name, **options):
    """A trainer and its callback, resumed from the checkpoint *name*."""
    path = rig.spool.checkpoints / name
    body = json.loads(rig.spool.start.read_bytes())
    body["restore"] = {"path": str(path), "name": name}
    body["session"]["attempt"] += 1
    rig.spool.start.write_text(json.dumps(body))
    made = trainer(folder, **options)
    return made, SessionCallback(made, rig.session())


def test_gradient_accumulation_counts_steps_of_the_optimizer(rig, tmp_path):
    """Two batches a step: three steps an epoch, of four samples."""
    made = trainer(tmp_path / "out", gradient_accumulation_steps=2)
    callback = SessionCallback(made, rig.session())
    made.train(resume_from_checkpoint=callback.restored)

    progress = rig.said().progress
    assert (progress.step, progress.samples, progress.batch) == (6, 24, 4)
    assert (progress.total_steps, progress.epochs, progress.micro_batches) == (6, 2, 2)


@pytest.mark.parametrize(("every", "only_model"), [(2, False), (3, False), (6, True)])
def test_a_resume_ends_with_the_same_weights(rig_every, tmp_path, every, only_model):
    """Within an epoch, at its end, with accumulation, with any save strategy: equal to the bit."""
    options = {"gradient_accumulation_steps": 2, "epochs": 4, "eval_strategy": "epoch"}
    options["save_only_model"] = only_model
    rig = rig_every(every)
    whole = trainer(tmp_path / "whole", **options)
    SessionCallback(whole, rig.session())
    whole.train()
    name = rig.names()[0]
    again, callback = resumed(rig, tmp_path / "again", name, **options)
    again.train(resume_from_checkpoint=callback.restored)

    assert name == f"g1-step-{every:08d}-a2"
    assert torch.equal(again.model.weight, whole.model.weight)
    assert whole.seen.at == [3, 6, 9, 12]
    assert again.seen.at == [step for step in whole.seen.at if step > every]  # no sample twice, none missing


def test_the_best_checkpoint_so_far_moves_along(rig_every, tmp_path):
    """The first epoch was the best: a training that resumes elsewhere in the third still ends with it."""
    rig = rig_every(14)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    options = {"epochs": 4, "eval_strategy": "epoch", **best, "save_strategy": "epoch"}
    whole = trainer(tmp_path / "whole", **options)
    SessionCallback(whole, rig.session())
    whole.train()
    shutil.rmtree(tmp_path / "whole")
    again, callback = resumed(rig, tmp_path / "again", rig.names()[0], **options)
    again.train(resume_from_checkpoint=callback.restored)

    assert whole.state.best_global_step == again.state.best_global_step == 6
    assert again.state.best_model_checkpoint == str(tmp_path / "again/checkpoint-6")
    assert torch.equal(again.model.weight, whole.model.weight)


def test_a_save_at_the_best_step_leaves_the_trainer_s_own_best_alone(rig_every, tmp_path):
    """The session's folder changes: a best model expected there would fail later saves, and the end."""
    rig = rig_every(6)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    options = {"epochs": 3, "eval_strategy": "epoch", **best, "save_strategy": "best"}
    plain = trainer(tmp_path / "plain", **options)
    plain.train()
    made = trainer(tmp_path / "out", **options)
    callback = SessionCallback(made, rig.session())
    made.train(resume_from_checkpoint=callback.restored)

    assert rig.names() == ["g1-step-00000006-a2", "g1-step-00000012-a2"]
    assert made.state.best_model_checkpoint == str(tmp_path / "out/checkpoint-6")
    assert torch.equal(made.model.weight, plain.model.weight)


def test_what_is_saved_leaves_the_trainer_s_own_folder_alone(rig_every, tmp_path):
    """Nothing is written to ``output_dir``, and its settings are restored."""
    rig = rig_every(2)
    made = trainer(tmp_path / "out", save_total_limit=1)
    SessionCallback(made, rig.session())
    made.train()

    assert rig.names() == ["g1-step-00000002-a2", "g1-step-00000004-a2"]
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert made.args.output_dir == str(tmp_path / "out")
    assert made.args.save_total_limit == 1


def test_asked_to_leave_it_saves_and_ends(rig, tmp_path):
    """``SystemExit`` with the protocol's code, through the Trainer's loop."""
    made = trainer(tmp_path / "out")
    SessionCallback(made, rig.session())
    rig.ask("drain")

    with pytest.raises(SystemExit) as left:
        made.train()

    assert left.value.code == EXIT_DRAINED
    assert rig.names() == ["g1-step-00000001-a2"]


@pytest.mark.parametrize("options", [{}, {"max_steps": 10}], ids=["epoch", "middle"])
def test_asked_to_leave_at_the_last_step_it_ends_as_it_would(rig, tmp_path, options):
    """A request has no effect when no work is left: the training ends with its output."""
    made = trainer(tmp_path / "out", **options)

    class AskAtTheEnd(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == state.max_steps - 1:
                rig.ask("drain")
                rig.now += 10

    made.add_callback(AskAtTheEnd())
    SessionCallback(made, rig.session())
    done = made.train()

    assert done.global_step == made.state.max_steps
    assert rig.names() == []


def test_a_disk_that_is_full_costs_a_checkpoint_and_no_training(rig_every, tmp_path, monkeypatch, full_disk):
    """The Trainer's own save would end it; with the session the training continues and logs the error."""
    rig = rig_every(4)
    made = trainer(tmp_path / "out")
    save, calls = made._save_checkpoint, []

    def full(*arguments, **named):
        calls.append(made.state.global_step)
        if len(calls) == 1:
            raise full_disk
        save(*arguments, **named)

    monkeypatch.setattr(made, "_save_checkpoint", full)
    SessionCallback(made, rig.session())
    done = made.train()

    assert done.global_step == 12
    assert calls == [4, 8]
    assert rig.names() == ["g1-step-00000008-a2"]


def test_two_callbacks_on_one_trainer_are_refused(rig, tmp_path):
    """Each step would count twice."""
    made = trainer(tmp_path / "out")
    SessionCallback(made, rig.session())

    with pytest.raises(ValueError, match="has a SessionCallback already"):
        SessionCallback(made, rig.session())


def test_a_second_training_is_refused(rig, tmp_path):
    """Its step 3 and that of the first training could not be distinguished."""
    made = trainer(tmp_path / "out")
    SessionCallback(made, rig.session())
    made.train()

    with pytest.raises(RuntimeError, match="carries one training"):
        made.train()


def test_a_restored_training_that_does_not_resume_is_refused(rig_every, tmp_path):
    """``train()`` without ``resume_from_checkpoint`` would silently start from the beginning."""
    rig = rig_every(5)
    made = trainer(tmp_path / "out")
    SessionCallback(made, rig.session())
    made.train()
    again, _ = resumed(rig, tmp_path / "again", rig.names()[0])

    with pytest.raises(RuntimeError, match=r"write .*resume_from_checkpoint="):
        again.train()
