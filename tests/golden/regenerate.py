"""Regenerate the golden files: ``python tests/golden/regenerate.py``. Review the diff before you commit.

``tests/data/golden/test-counts.json`` is not a golden file: it has the number of tests per room then, from
``pytest --collect-only -q tests/unit``, for comparison.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]


def main():
    """Write every golden file; returns the names of those that changed."""
    from golden import checks, cli_help, launches, outcomes, runs, traces
    from golden.files import write

    found = checks.golden_files() | cli_help.golden_files() | outcomes.golden_files()
    with tempfile.TemporaryDirectory() as folder:
        for name in launches.CASES:
            found |= launches.golden_files(name, Path(folder) / "launches" / name)
        for name in runs.RUNS:
            found |= runs.golden_files(name, Path(folder) / "runs" / name)
        changed = write(found, keeps=runs.DERIVED)
    return changed + write(traces.all_files(), keeps=runs.RECORDED)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    print(*(main() or ["nothing changed"]), sep="\n")  # noqa: T201
