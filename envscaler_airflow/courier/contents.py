"""What a file says of itself: whether it is whole, and of which step it is. Nothing in it is executed.

Files whose format says where they end (zip, so ``torch.save``, ``.npz`` and ``.keras``; safetensors; HDF5)
are torn when they do not end there. Source: zip's end-of-central-directory record is written last (APPNOTE
4.3.16); a safetensors file is 8 bytes of header length, the header, and the data up to the largest offset
(format specification); an HDF5 file ends at the end-of-file address of its superblock, which the library
writes when it flushes or closes (HDF5 file format specification 3.0, II.A).
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.store.folders import ChangedError, TreeFile

_MAX_HEADER_BYTES = 100 << 20  # source: safetensors, MAX_HEADER_SIZE
_MAX_TEXT_BYTES = 1 << 20
"""Largest text and pickle that is searched for a step. Chosen: without tensors they are small."""
_ZIP = b"PK\x03\x04"
HEAD_BYTES = 1024
"""Chosen: pickles and JSON texts say in it how long they are or what they count; a log never changes it."""
_HDF5 = b"\x89HDF\r\n\x1a\n"
_HDF5_HEAD_BYTES = 64
"""More than any superblock has before its end-of-file address."""
STEP_KEYS = ("global_step", "step", "iteration", "iter", "steps", "n_iter", "epoch")
"""Names under which trainings keep their step. Source: Lightning, transformers, detectron2, mmengine."""


def has_end(item: TreeFile) -> bool:
    """True when its format says where the file ends, and it ends there.

    Zip, HDF5, safetensors, a JSON object or array, and a pickle. A part of such a file never reads as a whole
    one.
    """
    try:
        with item.open(shares_names=True) as stream:
            head = stream.read(HEAD_BYTES)
            if head[:4] == _ZIP or item.path.endswith(".safetensors"):
                return _torn(item, head, stream) is None
            if head.startswith(_HDF5):
                return _hdf5_has_end(head, item.size) is True
            if item.size > _MAX_TEXT_BYTES:
                return False
            stream.seek(0)
            return _is_whole_text_or_pickle(stream.read(_MAX_TEXT_BYTES))
    except (OSError, CheckpointError):
        return False


def _is_whole_text_or_pickle(data: bytes) -> bool:
    try:
        if data[:1] != b"\x80":
            return data.lstrip()[:1] in (b"{", b"[") and json.loads(data) is not None
        end = 0
        for _, _, at in pickletools.genops(data):
            end = at or 0
    except (ValueError, RecursionError):
        return False
    return end == len(data) - 1


def _hdf5_has_end(head: bytes, size: int) -> bool | None:
    """Whether the file of *size* bytes ends where its superblock says; None for a version not known here."""
    version = head[8] if len(head) >= _HDF5_HEAD_BYTES else -1
    if version in (0, 1):
        width, at = head[13], 24 + 4 * version + 2 * head[13]
    elif version in (2, 3):
        width, at = head[9], 12 + 2 * head[9]
    else:
        return False if version < 0 else None
    is_being_written = version == 3 and bool(head[11] & 1)
    return int.from_bytes(head[at : at + width], "little") == size and not is_being_written


def first_look(item: TreeFile) -> tuple[bytes, str | None]:
    """Its first bytes, and why it cannot be whole; None when its format does not say so.

    The first bytes distinguish a file that is rewritten from one that is appended to.
    """
    try:
        with item.open(shares_names=True) as stream:
            head = stream.read(HEAD_BYTES)
            return head, _torn(item, head, stream)
    except (FileNotFoundError, ChangedError):
        return b"", f"{item.path}: vanished"


def _torn(item: TreeFile, head: bytes, stream: IO[bytes]) -> str | None:
    if head[:4] == _ZIP:
        return None if zipfile.is_zipfile(stream) else f"{item.path}: zip without its end"
    if head.startswith(_HDF5):
        is_torn = _hdf5_has_end(head, item.size) is False
        return f"{item.path}: HDF5 without its end" if is_torn else None
    if item.path.endswith(".safetensors"):
        stream.seek(8)
        return _torn_safetensors(item, head[:8], stream)
    return None


def _torn_safetensors(item: TreeFile, head: bytes, stream: IO[bytes]) -> str | None:
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(item.size, _MAX_HEADER_BYTES):
        return f"{item.path}: shorter than its header says"
    try:
        header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return f"{item.path}: its header is torn"
    expected = 8 + length + max(ends, default=0)
    return None if item.size == expected else f"{item.path}: {item.size} bytes, its header says {expected}"


def steps_in(item: TreeFile) -> frozenset[int]:
    """Whole numbers that the file keeps under a name for steps; empty when there is none to be read."""
    try:
        with item.open(shares_names=True) as stream:
            if stream.read(4) == _ZIP:
                return frozenset(_in_zip(stream))
            if item.size > _MAX_TEXT_BYTES:
                return frozenset()
            stream.seek(0)
            return frozenset(_in_bytes(stream.read(_MAX_TEXT_BYTES)))
    except (
        OSError,
        CheckpointError,
        ValueError,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        RecursionError,
    ):
        return frozenset()


def _in_zip(stream: IO[bytes]) -> Iterator[int]:
    with zipfile.ZipFile(stream) as archive:
        for member in archive.infolist()[:1000]:
            name = member.filename.rpartition("/")[2]
            if member.file_size > _MAX_TEXT_BYTES:
                continue
            if name.endswith((".json", ".pkl")):
                yield from _in_bytes(archive.read(member))
            elif name.removesuffix(".npy") in STEP_KEYS:
                yield from _in_npy(archive.read(member))


def _in_npy(data: bytes) -> Iterator[int]:
    """A single number as numpy keeps it. Source: numpy.lib.format, version 1.0."""
    if b"'shape': ()" in data[:128] and b"'<i8'" in data[:128]:
        yield int.from_bytes(data[-8:], "little", signed=True)


def _in_bytes(data: bytes) -> Iterator[int]:
    if data[:1] == b"\x80":
        yield from _in_pickle(data)
        return
    try:
        body = json.loads(data)
    except ValueError:
        return
    if isinstance(body, Mapping):
        yield from _in_mapping(body)


def _in_mapping(body: Mapping[str, Any]) -> Iterator[int]:
    for key in STEP_KEYS:
        if type(body.get(key)) is int:
            yield body[key]


def _in_pickle(data: bytes) -> Iterator[int]:
    """Numbers that follow such a name at once, as a dict's items do. The pickle is read, never run."""
    key: object = None
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            continue
        if key in STEP_KEYS and type(argument) is int and "INT" in opcode.name.replace("LONG1", "INT"):
            yield argument
        key = argument if isinstance(argument, str) else None
