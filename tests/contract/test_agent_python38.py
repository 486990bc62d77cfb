"""What runs inside training images must run on a bare Python 3.8: no site-packages, no environment."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.pythons import find_python

import envscaler_agent
from envscaler_airflow.backends.kubernetes.install import install

PACKAGE = Path(envscaler_agent.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "frameworks" not in path.parts]
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).replace(".__init__", "")
    for path in FILES
    if path.name != "__main__.py"
]
LATER_MODULES = {"tomllib", "zoneinfo", "graphlib"}
BOOT = "import sys; sys.path.insert(0, {root!r}); "


PYTHON38 = find_python("3.8")
needs_python38 = pytest.mark.skipif(PYTHON38 is None, reason="no Python 3.8 on PATH or in pyenv")


def run(code, *arguments, **environ):
    """Run *code* on a bare 3.8: isolated, without site-packages."""
    boot = BOOT.format(root=str(PACKAGE.parent))
    return subprocess.run(
        [PYTHON38, "-I", "-S", "-W", "error", "-c", boot + code, *arguments],
        capture_output=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"], **environ},
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_grammar_is_that_of_38(path):
    """No match statements, no parenthesised context managers, no later syntax."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))

    imported = {name.split(".")[0] for node in ast.walk(tree) for name in _imports(node)}
    assert imported <= {*sys.stdlib_module_names, "envscaler_agent", "pynvml"} - LATER_MODULES
    assert _has_future_annotations(tree) or not _annotations(tree)


def _imports(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def _annotations(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign | ast.FunctionDef)]


def _has_future_annotations(tree):
    return any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)


def test_the_room_imports_nothing_above_it():
    """A folder with these files alone is what images get."""
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {name for node in ast.walk(tree) for name in _imports(node) if name.startswith("envscaler")}
        assert {name.split(".")[0] for name in names} <= {"envscaler_agent"}, path


@needs_python38
def test_every_module_imports():
    """With warnings as errors."""
    code = "import importlib, json; [importlib.import_module(name) for name in json.loads(sys.argv[1])]"

    done = run(code, json.dumps(MODULES))

    assert (done.returncode, done.stderr) == (0, b"")


@needs_python38
def test_the_init_containers_folder_is_all_that_it_needs(tmp_path):
    """What a pod's training has on its path, without site-packages."""
    folder = install(tmp_path)

    done = subprocess.run(
        [PYTHON38, "-S", "-W", "error", "-c", "import envscaler_agent; print(envscaler_agent.__file__)"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout == f"{folder / 'envscaler_agent' / '__init__.py'}\n", done.stderr


@needs_python38
def test_messages_are_read_and_written():
    """The protocol's types work there."""
    code = (
        "from envscaler_agent.protocol import Control; "
        "c = Control(sequence=3, action='drain', candidates=('g1-step-00000001-a1',)); "
        "print(Control.from_json(c.to_json(), where='x') == c)"
    )

    assert run(code).stdout == b"True\n"


@needs_python38
def test_a_whole_stage_runs(tmp_path):
    """Wrapper, sampler, Session, a checkpoint and a leave, all on 3.8."""
    spool = tmp_path / "spool"
    spool.mkdir()
    session = {"generation": 1, "attempt": 2, "every": {"steps": 50}, "log_patterns": {"loss": r"loss (\S+)"}}
    (spool / "start.json").write_text(json.dumps({"schema": "2.0", "session": session}), encoding="utf-8")
    control = {"schema": "2.0", "sequence": 1, "action": "drain", "align": "epoch"}
    train = BOOT.format(root=str(PACKAGE.parent)) + (
        "import time, pathlib\n"
        "from envscaler_agent import Session\n"
        "with Session() as session:\n"
        "    assert session.restore() is None\n"
        "    while session.steps < 100000:\n"
        "        time.sleep(0.01)\n"
        "        session.step(samples=4, loss=0.5)\n"
        "        session.checkpoint(lambda path: (path / 'w').touch(), epoch_end=session.steps % 25 == 0)\n"
        "        if session.steps == 60:\n"
        f"            pathlib.Path({str(spool / 'control.json')!r}).write_text({json.dumps(control)!r})\n"
    )
    wrap = "from envscaler_agent.__main__ import main; sys.exit(main(sys.argv[1:]))"

    done = run(wrap, "run", "--spool", str(spool), "--", PYTHON38, "-I", "-S", "-c", train)

    assert (done.returncode, done.stderr) == (85, b"")
    saves = sorted(path.name for path in (spool / "checkpoints").iterdir())
    assert saves[0] == "g1-step-00000050-a2"
    assert int(saves[-1].split("-")[2]) % 25 == 0
    status = json.loads((spool / "wrapper.json").read_text())
    assert status["ended"]["reason"] == "drained"
    lines = (spool / "metrics" / "000001.jsonl").read_text().splitlines()
    assert any("memory_rss_bytes" in json.loads(line) for line in lines)
