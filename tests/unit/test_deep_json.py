"""Text from elsewhere is read as JSON only where a text of a hundred thousand brackets is refused, too."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("envscaler_airflow", "agent/envscaler_agent")
OWN = {
    "agent/envscaler_agent/frameworks/accelerate.py:_place_in": "of the training's own checkpoint, inside it",
    "agent/envscaler_agent/frameworks/keras.py:_load": "the same",
    "agent/envscaler_agent/frameworks/__init__.py:load_random_state": "the same",
    "agent/envscaler_agent/frameworks/transformers.py:_lay_out_best": "the same",
    "agent/envscaler_agent/sampler.py:main": "the wrapper's argument",
    "envscaler_airflow/backends/kubernetes/client.py:_read": "its only caller catches",
    "envscaler_airflow/backends/kubernetes/missing.py:_nodes": "kubectl's output",
    "envscaler_airflow/backends/kubernetes/job_reader.py:body": "written by this process",
    "envscaler_airflow/catalog/__main__.py:read_machines": "of the developer who runs it",
    "envscaler_airflow/catalog/packaged.py:jobs": "of the package itself",
    "envscaler_airflow/cli/inspect.py:status": "written by this process",
    "envscaler_airflow/clouds/aws.py:_on_demand": "its only caller catches",
    "envscaler_airflow/images/builders.py:inspect": "the builder's output",
    "envscaler_airflow/sidecar/spool_state.py:_places": "of a folder that only the sidecar can write",
    "envscaler_airflow/sidecar/spool_state.py:start": "the same",
}
"""Functions whose text no one else writes, with the reason."""


def readers():
    """Return each call that parses JSON: file, function, line, and the errors caught around it."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "json.load" in text:
                visit(ast.parse(text), path.relative_to(ROOT).as_posix(), "", frozenset(), found)
    return found


def visit(node, file, function, caught, found):
    """Walk the tree with what each ``try`` catches."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, caught = node.name, frozenset()
    if isinstance(node, ast.Try):
        names = {name for handler in node.handlers for name in names_of(handler.type)}
        for child in node.body:
            visit(child, file, function, caught | names, found)
        for child in (*node.handlers, *node.orelse, *node.finalbody):
            visit(child, file, function, caught, found)
        return
    if isinstance(node, ast.With):
        names = {name for item in node.items for name in suppressed(item.context_expr)}
        caught |= names
    is_read = isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load")
    if is_read and not ast.unparse(node.args[0]).startswith("json.dumps("):
        found.append((file, function, node.lineno, caught))
    for child in ast.iter_child_nodes(node):
        visit(child, file, function, caught, found)


def names_of(kind):
    """Return the names of the errors in an ``except``."""
    if kind is None:
        return {"Exception"}
    parts = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return {ast.unparse(part) for part in parts}


def suppressed(expression):
    """Return the names of the errors that ``suppress(...)`` suppresses."""
    if not (isinstance(expression, ast.Call) and ast.unparse(expression.func).endswith("suppress")):
        return set()
    return {ast.unparse(part) for part in expression.args}


@pytest.mark.parametrize(("file", "function", "line", "caught"), readers())
def test_every_reader_of_json_refuses_what_is_too_deep(file, function, line, caught):
    """Python's reader recurses for each bracket, and RecursionError is not a ValueError (B1)."""
    is_own = f"{file}:{function}" in OWN

    assert is_own != ("RecursionError" in caught or "*_UNREADABLE" in caught), f"{file}:{line} {function}"
