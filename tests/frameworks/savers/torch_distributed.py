"""As torch's recipe for distributed checkpoints saves: a folder per step, the two newest are kept."""

import os
import shutil
import sys
import time

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

folder, steps = sys.argv[1], 120
torch.set_num_threads(1)
torch.manual_seed(1)


class AppState(Stateful):
    """The content of a checkpoint."""

    def __init__(self, model, optimizer):
        """Model, optimizer and step."""
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        """For ``dcp.save``."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "step": self.step}

    def load_state_dict(self, state_dict):
        """For ``dcp.load``."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.step = state_dict["step"]


model = torch.nn.Linear(8, 1)
app = AppState(model, torch.optim.AdamW(model.parameters(), lr=0.01))
features = torch.randn(64, 8)
target = features.sum(dim=1, keepdim=True)


def saved():
    """Steps that have a complete checkpoint."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    whole = [name for name in names if os.path.exists(os.path.join(folder, name, ".metadata"))]
    return sorted(int(name.removeprefix("step-")) for name in whole)


if saved():
    dcp.load({"app": app}, checkpoint_id=os.path.join(folder, f"step-{saved()[-1]}"))
print("begins at", app.step, flush=True)
pace = 0.0 if app.step else 0.2  # slow until it is killed
while app.step < steps:
    loss = torch.nn.functional.mse_loss(model(features), target)
    app.optimizer.zero_grad()
    loss.backward()
    app.optimizer.step()
    app.step += 1
    time.sleep(pace)
    print("step", app.step, "loss", loss.item(), flush=True)
    if app.step % 10 == 0:
        dcp.save({"app": app}, checkpoint_id=os.path.join(folder, f"step-{app.step}"))
        for old in saved()[:-2]:
            shutil.rmtree(os.path.join(folder, f"step-{old}"))
learnt = sum(float(each.detach().sum()) for each in model.parameters())
print(f"done at {steps} with {learnt}")
