"""A small GPT-2 trained by the Hugging Face Trainer, with gradient accumulation and an evaluation.

``python train_transformers.py --output model``
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import corpus
import options
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from envscaler_agent.frameworks.transformers import SessionCallback


class Rows(torch.utils.data.Dataset):
    """Windows in the form that a language model expects."""

    def __init__(self, windows: torch.Tensor) -> None:
        """Store the windows."""
        self._windows = windows

    def __len__(self) -> int:
        """Number of windows."""
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One row."""
        return {"input_ids": self._windows[index], "labels": self._windows[index]}


class Wait(TrainerCallback):
    """Waits as long as a larger model would."""

    def __init__(self, seconds: float) -> None:
        """Wait *seconds* in each step."""
        self._seconds = seconds

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Wait."""
        del args, state, control
        options.wait(self._seconds)


def main() -> None:
    """Train."""
    asked = options.parse(__doc__)
    set_seed(1)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    tokens = {"vocab_size": corpus.LETTERS, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens))
    windows = corpus.windows(count=560, length=16)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=asked.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=int(os.environ.get("ENVSCALER_GRADIENT_ACCUMULATION", "2")),
            learning_rate=3e-3,
            logging_steps=5,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Rows(windows[:512]),
            eval_dataset=Rows(windows[512:]),
            callbacks=[Wait(asked.step_s)],
        )
        callback = SessionCallback(trainer)
        trainer.train(resume_from_checkpoint=callback.restored)
    options.write(asked.output, model.state_dict())


if __name__ == "__main__":
    main()
