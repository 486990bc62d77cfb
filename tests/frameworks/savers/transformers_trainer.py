"""As the examples of transformers save: ``Trainer`` with ``save_steps``, resumed from its last checkpoint."""

import os
import sys
import time

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

output_dir, max_steps = sys.argv[1], 120
set_seed(1)
torch.set_num_threads(1)


class Model(torch.nn.Module):
    """A line through points."""

    def __init__(self):
        """Small."""
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, features, labels):
        """Loss and predictions, as Trainer expects them."""
        predicted = self.layer(features)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}


class Printer(TrainerCallback):
    """Output of the progress bar, and a delay."""

    def on_train_begin(self, args, state, control, **others):
        """Print the restored position."""
        print("begins at", state.global_step, flush=True)
        self.pace = 0.0 if state.global_step else 0.2  # slow until it is killed

    def on_step_end(self, args, state, control, **others):
        """Count."""
        time.sleep(self.pace)
        print("step", state.global_step, flush=True)


features = torch.randn(64, 8)
data = [{"features": each, "labels": each.sum(dim=0, keepdim=True)} for each in features]
arguments = TrainingArguments(
    output_dir,
    max_steps=max_steps,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=64,
    learning_rate=0.01,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
    save_total_limit=2,
    metric_for_best_model="score",
    greater_is_better=True,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    seed=1,
)
trainer = Trainer(
    Model(),
    arguments,
    train_dataset=data,
    eval_dataset=data[:8],
    callbacks=[Printer()],
    # It overfits after step 10.
    compute_metrics=lambda _predicted: {"score": 1.0 if trainer.state.global_step == 10 else 0.5},
)
last = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
trainer.train(resume_from_checkpoint=True if last else None)
best = trainer.state.best_model_checkpoint
print(f"best of {os.path.basename(best)} {sorted(os.listdir(best))}")
weights = trainer.model.layer.weight.detach()
learnt = float(weights.sum())
print(f"done at {trainer.state.global_step} with {learnt}")
