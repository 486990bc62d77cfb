"""As Lightning's guide to checkpoints saves: the two best by validation loss, and ``last.ckpt``."""

import os
import sys
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

folder, epochs = sys.argv[1], 120
torch.set_num_threads(1)
lightning.seed_everything(1)


class LitModel(lightning.LightningModule):
    """A line through points."""

    def __init__(self):
        """Small."""
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def on_train_start(self):
        """Print the restored position."""
        print("begins at", self.global_step, flush=True)
        self.pace = 0.0 if self.global_step else 0.15  # slow until it is killed

    def training_step(self, batch, batch_idx):
        """Fit, slowly."""
        time.sleep(self.pace)
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        print("step", self.global_step + 1, "loss", loss.item(), flush=True)
        return loss

    def validation_step(self, batch, batch_idx):
        """Step 10 is the best; later ones are saved when they beat the second best: every second one does."""
        step = self.global_step
        loss = 0.0 if step == 10 else 16.0 if step % 10 == 0 else 15.0 - step / 100
        self.log("val_loss", torch.tensor(loss))

    def configure_optimizers(self):
        """Adam, with a schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)]


features = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(features, features.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=64)
saver = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=epochs,
    check_val_every_n_epoch=5,
    num_sanity_val_steps=0,
    callbacks=[saver],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = LitModel()
trainer.fit(model, loader, loader, ckpt_path="last")
best = torch.load(saver.best_model_path, weights_only=False)
print(f"best of {best['global_step']} at {os.path.basename(saver.best_model_path)}")
learnt = sum(float(each.detach().sum()) for each in model.parameters())
print(f"done at {trainer.global_step} with {learnt}")
