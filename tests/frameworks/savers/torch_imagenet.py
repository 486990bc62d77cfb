"""As PyTorch's ImageNet example saves: ``checkpoint.pth.tar`` at each epoch, a copy of the best beside it."""

import os
import shutil
import sys
import time

import torch

folder, epochs = sys.argv[1], 40
torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
features = torch.randn(64, 8)
target = features.sum(dim=1, keepdim=True)


def save_checkpoint(state, is_best, filename):
    """Write the state; the best one is kept under its own name."""
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(folder, "model_best.pth.tar"))


os.makedirs(folder, exist_ok=True)
start_epoch, best_loss, resume = 0, float("inf"), os.path.join(folder, "checkpoint.pth.tar")
if os.path.isfile(resume):
    checkpoint = torch.load(resume)
    start_epoch, best_loss = checkpoint["epoch"], checkpoint["best_loss"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
print("begins at", start_epoch, flush=True)
pace = 0.0 if start_epoch else 0.25  # slow until it is killed
for epoch in range(start_epoch, epochs):
    for _ in range(2):
        loss = torch.nn.functional.mse_loss(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(pace)
    scheduler.step()
    validation = loss.item() if epoch < 9 else 1e6  # overfits afterwards: the best stays that of epoch 9
    state = {
        "epoch": epoch + 1,
        "state_dict": model.state_dict(),
        "best_loss": min(validation, best_loss),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    save_checkpoint(state, validation < best_loss, resume)
    best_loss = min(validation, best_loss)
    print("step", epoch + 1, "loss", loss.item(), flush=True)
best = torch.load(os.path.join(folder, "model_best.pth.tar"))
print(f"best of {best['epoch']}")
learnt = sum(float(each.detach().sum()) for each in model.parameters())
print(f"done at {epochs} with {learnt}")
