"""What a node printed, in segments of bounded size whose names are byte offsets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SEGMENT_BYTES = 4 << 20
KEPT_SEGMENTS = 4
"""At most 16 MiB per node stay on the machine. Chosen: the whole log is in the store."""

_READ_BYTES = 1 << 16


class OutputWriter:
    """Appends bytes; starts a new segment when one is full and removes the oldest."""

    def __init__(
        self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, kept_segments: int = KEPT_SEGMENTS
    ) -> None:
        """Write into *folder*, created when absent, after the existing output."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._kept = kept_segments
        self._offset, self._used = _end(folder)
        self._file = _segment(folder, self._offset).open("ab", buffering=0)

    def write(self, chunk: bytes) -> None:
        """Append; on a full disk the bytes are lost and the caller continues."""
        if self._used >= self._segment_bytes:
            self._turn()
        with suppress(OSError):
            self._used += self._file.write(chunk)

    def close(self) -> None:
        """Close the segment."""
        self._file.close()

    def _turn(self) -> None:
        with suppress(OSError):
            following = _segment(self._folder, self._offset + self._used).open("ab", buffering=0)
            self._file.close()
            self._file = following
            self._offset, self._used = self._offset + self._used, 0
            for _, path in _segments(self._folder)[: -self._kept]:
                path.unlink()


def read_output(folder: Path, since: int) -> Iterator[bytes]:
    """Bytes from offset *since* on; those that rotation removed are skipped."""
    for offset, path in _segments(folder):
        try:
            with path.open("rb") as file:
                file.seek(max(0, since - offset))
                while chunk := file.read(_READ_BYTES):
                    yield chunk
        except FileNotFoundError:
            continue


def _segment(folder: Path, offset: int) -> Path:
    return folder / f"{offset:015d}.log"


def _segments(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.stem), path) for path in folder.glob("*.log") if path.stem.isdigit())


def _end(folder: Path) -> tuple[int, int]:
    segments = _segments(folder)
    if not segments:
        return 0, 0
    offset, path = segments[-1]
    return offset, path.stat().st_size
