"""Container images: which ones exist, how long a pull takes, what a node already has."""

from __future__ import annotations

import fnmatch


class Images:
    """By default every well-formed image exists, and every node has it already."""

    def __init__(self) -> None:
        """Start without faults."""
        self._missing: dict[str, str] = {}
        self._slow: dict[str, float] = {}
        self._have: set[tuple[str, str]] = set()

    def missing(self, pattern: str, cause: str = "not found") -> None:
        """Let pulls of images like *pattern* (shell wildcards) fail with *cause*."""
        self._missing[pattern] = cause

    def found(self, pattern: str) -> None:
        """Revert `missing`."""
        self._missing.pop(pattern, None)

    def slow(self, pattern: str, seconds: float) -> None:
        """Let the first pull of such an image take *seconds* on each node."""
        self._slow[pattern] = seconds

    def trouble(self, image: str) -> str:
        """Why *image* cannot be pulled; empty if it can."""
        for pattern, cause in self._missing.items():
            if fnmatch.fnmatchcase(image, pattern):
                return f'failed to resolve reference "{image}": {image}: {cause}'
        return ""

    def seconds(self, image: str, node: str) -> float:
        """How long a pull takes on *node* now; 0 if it has the image."""
        if (image, node) in self._have:
            return 0.0
        return max((wait for one, wait in self._slow.items() if fnmatch.fnmatchcase(image, one)), default=0.0)

    def keep(self, image: str, node: str) -> None:
        """Mark the image as present on *node*."""
        self._have.add((image, node))
