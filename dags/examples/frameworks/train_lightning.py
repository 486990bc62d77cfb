"""Lightning, with a validation and a schedule by epochs, resumed in the middle of an epoch.

``python train_lightning.py --output model``, or below ``torchrun``
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import corpus
import lightning
import options
import torch

from envscaler_agent.frameworks.lightning import SessionCallback
from envscaler_agent.frameworks.torch import ResumableLoader


class Letters(lightning.LightningModule):
    """Guesses the next letter."""

    def __init__(self, step_s: float) -> None:
        """Create the network."""
        super().__init__()
        self.network = corpus.model()
        self._step_s = step_s

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """Loss of a batch."""
        options.wait(self._step_s)
        letters, following = batch
        return torch.nn.functional.cross_entropy(self.network(letters), following)

    def validation_step(self, batch: Any, _index: int) -> None:
        """Loss of a batch that is not trained on."""
        letters, following = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.network(letters), following))

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW, a little slower after each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7),
        }


def main() -> None:
    """Train."""
    asked = options.parse(__doc__)
    module = Letters(asked.step_s)
    lightning.seed_everything(1 + int(os.environ.get("RANK", "0")))  # each rank drops other units
    loader = ResumableLoader(corpus.NextLetter(), global_batch=32, seed=1)
    held_out = torch.utils.data.DataLoader(corpus.NextLetter(count=64, length=17), batch_size=32)
    with tempfile.TemporaryDirectory() as folder:
        callback = SessionCallback()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            use_distributed_sampler=False,  # the loader gives each rank its own
            max_epochs=asked.epochs,
            callbacks=[callback],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, loader, held_out, ckpt_path=callback.restored)
    if trainer.is_global_zero:
        options.write(asked.output, module.state_dict())


if __name__ == "__main__":
    main()
