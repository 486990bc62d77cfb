"""Framework modules for training code: copied with the agent, on Python 3.8, importing nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import envscaler_agent
from envscaler_airflow.agent_files import copy_agent
from envscaler_airflow.backends.kubernetes.install import install

PACKAGE = Path(envscaler_agent.__file__).parent
ROOM = PACKAGE / "frameworks"
FILES = sorted(ROOM.rglob("*.py"))
FRAMEWORKS = {"accelerate", "keras", "lightning", "torch", "transformers"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_module_is_python_38_and_imports_its_framework_and_the_agent_alone(path):
    """Annotations stay text; it imports only those of our modules that are copied with it."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    names = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }

    others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name.split(".")[0] for name in others} <= {*FRAMEWORKS, "envscaler_agent"}
    assert not names or "__future__" in names


@pytest.mark.parametrize("copy", [copy_agent, install], ids=["machines and images", "pods"])
def test_the_room_goes_where_the_agent_goes(copy, tmp_path):
    """Every file of it, importable beside the agent."""
    target = copy(tmp_path)
    copied = sorted(path.name for path in (target / "envscaler_agent/frameworks").glob("*.py"))
    ask = "import envscaler_agent.frameworks as r; print(r.__file__, sorted(r.random_state()))"
    said = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {ask}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert copied == [path.name for path in FILES]
    assert said.startswith(str(tmp_path))
    assert "['python']" in said  # neither numpy nor torch was loaded for it
