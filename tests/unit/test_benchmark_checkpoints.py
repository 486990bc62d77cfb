"""The benchmark of checkpoints of many files runs, so that its figures can be reproduced."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks/checkpoint_files.py"


def test_checkpoints_go_up_are_pruned_and_come_back(tmp_path, capsys):
    """Twenty files, three checkpoints, no latency (B7)."""
    spec = importlib.util.spec_from_file_location("checkpoint_files", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    module.measure(tmp_path, 20, 0.0)

    shown = [line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown if line.startswith(("upload", "prune", "restore"))] == [
        *("upload 1", "upload 2", "upload 3", "prune, one goes", "restore"),
    ]
    assert len(list((tmp_path / "back").rglob("*.bin"))) == 20
