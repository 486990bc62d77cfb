"""Exit codes of the wrapper, by which a backend sees how an attempt ended."""

from __future__ import annotations

EXIT_LEFT = 85
"""Wrapper: drained: checkpointed and exited. Chosen outside sysexits (64-78) and shells (126-165)."""
EXIT_ORPHANED = 86
"""Wrapper: the owner's lease did not change for ``orphan_after``; checkpointed and exited. Chosen the same
way.
"""
EXIT_STOPPED = 87
"""Wrapper: stopped within its grace on request, with or without a checkpoint. Chosen the same way."""
EXIT_SETUP_FAILED = 88
"""Sidecar or wrapper: workdir, inputs or checkpoint could not be prepared. Chosen the same way."""
EXIT_NOT_FOUND = 127
"""The command does not exist; the exit code that shells use."""
EXIT_CODES = {
    "left": EXIT_LEFT,
    "orphaned": EXIT_ORPHANED,
    "stopped": EXIT_STOPPED,
    "setup-failed": EXIT_SETUP_FAILED,
    "not-found": EXIT_NOT_FOUND,
}
"""Reasons with their own exit code; for any other the wrapper exits with the command's."""


def reason_of(exit_code: int) -> str:
    """The reason of a wrapper's exit code: ``succeeded``, a reason of EXIT_CODES, or ``failed``."""
    named = (reason for reason, code in EXIT_CODES.items() if code == exit_code)
    return "succeeded" if exit_code == 0 else next(named, "failed")
