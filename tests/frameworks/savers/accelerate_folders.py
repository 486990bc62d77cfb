"""As diffusers' and Accelerate's examples save: ``checkpoint-N``, the oldest removed before a new one."""

import os
import shutil
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

output_dir, max_train_steps, checkpoints_total_limit = sys.argv[1], 120, 3
set_seed(1)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20)
features = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(features, features.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=64)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def checkpoints():
    """Names by number."""
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    found = [name for name in names if name.startswith("checkpoint")]
    return sorted(found, key=lambda name: int(name.split("-")[1]))


global_step = 0
if checkpoints():
    accelerator.load_state(os.path.join(output_dir, checkpoints()[-1]))
    global_step = int(checkpoints()[-1].split("-")[1])
print("begins at", global_step, flush=True)
pace = 0.0 if global_step else 0.15  # slow until it is killed
while global_step < max_train_steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        global_step += 1
        time.sleep(pace)
        print("step", global_step, "loss", loss.item(), flush=True)
        if global_step % 5 == 0:
            for old in checkpoints()[: max(0, len(checkpoints()) - checkpoints_total_limit + 1)]:
                shutil.rmtree(os.path.join(output_dir, old))
            accelerator.save_state(os.path.join(output_dir, f"checkpoint-{global_step}"))
learnt = sum(float(each.detach().sum()) for each in model.parameters())
print(f"done at {global_step} with {learnt}")
