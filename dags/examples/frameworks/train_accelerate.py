"""Accelerate, with a loader that shuffles, gradient accumulation and a schedule.

``python train_accelerate.py --output model``, or below ``accelerate launch``
"""

from __future__ import annotations

import os

import corpus
import options
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from envscaler_agent.frameworks.accelerate import AcceleratedSession


def main() -> None:
    """Train."""
    asked = options.parse(__doc__)
    passes = int(os.environ.get("ENVSCALER_GRADIENT_ACCUMULATION", "2"))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes)
    set_seed(1)
    model = corpus.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.9)
    loader = torch.utils.data.DataLoader(corpus.NextLetter(), batch_size=16, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with AcceleratedSession(accelerator, loader) as session:
        while session.epoch < asked.epochs:
            for letters, following in session.batches():
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(letters), following)
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                options.wait(asked.step_s / 2)
                session.step(loss=loss)
    if accelerator.is_main_process:
        options.write(asked.output, accelerator.unwrap_model(model).state_dict())


if __name__ == "__main__":
    main()
