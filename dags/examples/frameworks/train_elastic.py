"""Data-parallel training below torchrun, on any number of workers that divides the global batch.

``torchrun --standalone --nproc_per_node=2 train_elastic.py --output model``

The number of workers may change whenever the training is resumed: micro batches keep their size, and each
worker accumulates as many of them as the global batch needs. Every worker writes its shards of a checkpoint.
Any number of workers can read it, and each gets its own shards.
"""

from __future__ import annotations

import contextlib
import os

import corpus
import options
import torch
from torch.nn.parallel import DistributedDataParallel

from envscaler_agent import Session
from envscaler_agent.frameworks.noise import GradientNoise
from envscaler_agent.frameworks.torch import (
    ResumableLoader,
    ShardedState,
    agree,
    leave_group_at_exit,
)


def main() -> None:
    """Train."""
    asked = options.parse(__doc__)
    os.environ.setdefault("ENVSCALER_GLOBAL_BATCH", "32")  # a stage gets these from its spec
    os.environ.setdefault("ENVSCALER_MICRO_BATCH", "16")
    torch.distributed.init_process_group("gloo")
    leave_group_at_exit()
    model = DistributedDataParallel(corpus.model())
    model.eval()  # without dropout: its masks would depend on the number of workers
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ResumableLoader(corpus.NextLetter(), seed=1)
    state = ShardedState(model, optimizer, loader=loader)
    steps = len(loader) // loader.accumulation
    with Session(total_steps=asked.epochs * steps, epochs=asked.epochs, agree=agree) as session:
        state.load(session.restore())
        noise = GradientNoise(model, session, global_batch=loader.global_batch)
        print(f"{loader.world_size} workers x {loader.accumulation} passes, step {session.steps}", flush=True)
        while loader.epoch < asked.epochs:
            for letters, following in loader:
                reduces = contextlib.nullcontext() if loader.is_step_end else model.no_sync()
                with reduces:
                    loss = torch.nn.functional.cross_entropy(model(letters), following)
                    (loss / loader.accumulation).backward()
                noise.after_backward()
                options.wait(asked.step_s)
                if loader.is_step_end:
                    noise.before_step()
                    optimizer.step()
                    optimizer.zero_grad()
                    session.step(samples=loader.global_batch // loader.world_size, loss=loss)
                    session.checkpoint(state.save, epoch_end=loader.epoch_end)
    if session.rank == 0:
        options.write(asked.output, model.module.state_dict())


if __name__ == "__main__":
    main()
