"""Errors that the training's side raises; ``envscaler_agent.errors`` has these and the owner's."""

from __future__ import annotations

__all__ = ["CheckpointError", "EnvScalerError", "ProtocolError"]


class EnvScalerError(Exception):
    """Anything that envscaler-airflow raises on purpose."""


class CheckpointError(EnvScalerError):
    """A checkpoint is missing, torn or has a wrong hash: the previous one is used."""


class ProtocolError(EnvScalerError):
    """The two sides disagree on a version or wrote what the protocol forbids.

    Training continues, moves are refused, and the message names both versions.
    """
