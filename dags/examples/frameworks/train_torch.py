"""Plain torch, in an order of the data that is resumed in the middle of an epoch.

``python train_torch.py --output model``
"""

from __future__ import annotations

import corpus
import options
import torch

from envscaler_agent import Session
from envscaler_agent.frameworks.torch import ResumableLoader, TrainingState


def main() -> None:
    """Train."""
    asked = options.parse(__doc__)
    model = corpus.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.9)

    loader = ResumableLoader(corpus.NextLetter(), global_batch=32, seed=1)
    state = TrainingState(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
    with Session(total_steps=asked.epochs * len(loader), epochs=asked.epochs) as session:
        state.load(session.restore())
        while loader.epoch < asked.epochs:
            for letters, following in loader:
                loss = torch.nn.functional.cross_entropy(model(letters), following)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                options.wait(asked.step_s)
                session.step(samples=len(letters), loss=loss)
                session.checkpoint(state.save, epoch_end=loader.epoch_end)
    options.write(asked.output, model.state_dict())


if __name__ == "__main__":
    main()
