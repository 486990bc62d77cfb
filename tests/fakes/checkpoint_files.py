"""Files as training code writes them: complete zips, safetensors, a Hugging Face state."""

import io
import json
import os
import struct
import zipfile


def put(folder, files):
    """Write ``{path: bytes}`` in this order, each a second younger than the one before."""
    for count, (path, data) in enumerate(files.items()):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        os.utime(target, (1_700_000_000 + count,) * 2)


def whole_zip():
    """What ``torch.save`` writes: a zip."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("data.pkl", "x" * 500)
    return raw.getvalue()


def safetensors(size, *, claimed=None):
    """A file of one tensor of *size* bytes, whose header claims another size."""
    header = json.dumps(
        {"__metadata__": {}, "w": {"dtype": "U8", "data_offsets": [0, claimed or size]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def hdf5(size, *, claimed=None):
    """A file of *size* bytes as h5py writes it; its superblock of version 0 claims another size."""
    head = b"\x89HDF\r\n\x1a\n" + bytes((0, 0, 0, 0, 0, 8, 8, 0)) + bytes(24)
    return (head + struct.pack("<Q", claimed or size)).ljust(size, b"w")


STATE = b'{"global_step": 10, "best_model_checkpoint": "/out/checkpoint-5"}'
ZIP = whole_zip()
