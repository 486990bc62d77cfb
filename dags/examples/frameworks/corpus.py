"""A text that every Python includes: its language reference, cut into windows of bytes."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch

LETTERS = 128
"""ASCII; any other character becomes a question mark."""


def windows(*, count: int, length: int) -> torch.Tensor:
    """*count* consecutive windows of *length* letters, int64, from the beginning of the text."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    if count * length > len(text):
        raise ValueError(f"{count} windows of {length}: the text has {len(text)} letters")
    return torch.tensor(list(text[: count * length])).reshape(count, length)


class NextLetter(torch.utils.data.Dataset):
    """A window, and the letter that follows it."""

    def __init__(self, *, count: int = 1024, length: int = 17) -> None:
        """Cut the text."""
        self._windows = windows(count=count, length=length)

    def __len__(self) -> int:
        """Number of windows."""
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Letters, and the next one."""
        return self._windows[index, :-1], self._windows[index, -1]


def model(*, width: int = 32, length: int = 16) -> torch.nn.Module:
    """A small network with dropout, the same at every start."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Embedding(LETTERS, width),
        torch.nn.Flatten(),
        torch.nn.Linear(width * length, 64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, LETTERS),
    )
