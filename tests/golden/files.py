"""Golden files: JSON with one field per line, so that a renamed word changes one line."""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "golden"
REVIEW = "if that is meant, run python tests/golden/regenerate.py and review the diff"


def json_text(body, *, sort_keys=True):
    """*body* as stored; events keep the order of their fields, which is that of their bytes."""
    return json.dumps(body, indent=1, sort_keys=sort_keys, allow_nan=False, ensure_ascii=False) + "\n"


def stored(name):
    """Text of the golden file *name*, a path below ``tests/data/golden``."""
    return (DATA / name).read_text(encoding="utf-8")


def replaced(text, names):
    """*text* with each key of *names* replaced by its value: random text, or text of this machine."""
    for name, stand_in in names.items():
        text = text.replace(name, stand_in)
    return text


def write(found, *, keeps=()):
    """Write *found*, text by name, and delete other files in its folders, except files named *keeps*.

    Returns the names that changed.
    """
    changed = []
    folders = {name.rpartition("/")[0] for name in found} - {""}
    lying = {f"{folder}/{path.name}" for folder in folders for path in (DATA / folder).glob("*")}
    for name in sorted(lying - found.keys()):
        if name.rpartition("/")[2] not in keeps:
            (DATA / name).unlink()
            changed.append(f"{name} (deleted)")
    for name, text in found.items():
        path = DATA / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed
