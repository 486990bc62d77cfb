"""Accelerate with ``automatic_checkpoint_naming``: ``checkpoints/checkpoint_N``, where N counts the saves."""

import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

project_dir, max_train_steps = sys.argv[1], 120
set_seed(1)
torch.set_num_threads(1)


class Progress:
    """The state saved beside the model."""

    step = 0

    def state_dict(self):
        """For ``save_state``."""
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        """For ``load_state``."""
        self.step = state_dict["step"]


configuration = ProjectConfiguration(project_dir, automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=configuration)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20)
features = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(features, features.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=64)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
progress = Progress()
accelerator.register_for_checkpointing(progress)

checkpoints = os.path.join(project_dir, "checkpoints")
names = os.listdir(checkpoints) if os.path.isdir(checkpoints) else []
if names:
    accelerator.load_state()
    configuration.iteration = max(int(name.split("_")[1]) for name in names) + 1
print("begins at", progress.step, flush=True)
pace = 0.0 if progress.step else 0.15  # slow until it is killed
while progress.step < max_train_steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.step += 1
        time.sleep(pace)
        print("step", progress.step, "loss", loss.item(), flush=True)
        if progress.step % 5 == 0:
            accelerator.save_state()
learnt = sum(float(each.detach().sum()) for each in model.parameters())
print(f"done at {progress.step} with {learnt}")
