"""Print the secrets of this training in all the ways in which a careless training does."""

# ruff: noqa: T201 - what it prints is what the tests look for

from __future__ import annotations

import os
import sys
from pathlib import Path

NAMES = ("FROM_CONNECTION", "FROM_ENV", "FROM_SECRET")

for name in NAMES:
    value = os.environ[name]
    print(f"{name} has {len(value)} characters", flush=True)
    print(f"its value is {value}", flush=True)
    print(f"on stderr {value}", file=sys.stderr, flush=True)

out = Path(next(item for item in sys.argv if item.startswith("--out=")).removeprefix("--out="))
out.mkdir(parents=True)
(out / "done").write_text("done")
