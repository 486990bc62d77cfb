"""Each claim of docs/explanation/security.md has a test, and what no single test can show is checked here."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from envscaler_airflow.envspec import documents
from envscaler_airflow.owner.request import MOST_EVENTS
from envscaler_airflow.store.archive import MAX_FILES
from envscaler_airflow.store.lease import MOST_CLAIMS
from envscaler_airflow.store.manifests import MOST_ENTRIES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/security.md"
POD_SIDECAR = "envscaler_airflow/backends/kubernetes/pod_sidecar.py"
PACKAGES = ("envscaler_airflow", "agent/envscaler_agent")


def claims():
    """Return the rows of the last table of the page: a claim, and the tests that it names."""
    table = PAGE.read_text().partition("## Claims and their tests")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [(claim, re.findall(r"`([^`]+)`", shown)) for claim, shown in rows if claim != "claim"]


@cache
def functions(path):
    """Return the functions of a test file."""
    return [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]


def test_there_are_claims():
    """The table is found."""
    assert len(claims()) > 20


@pytest.mark.parametrize(("claim", "tests"), claims())
def test_each_claim_has_a_test(claim, tests):
    """It exists, under that name, and says in a sentence what it shows (D16)."""
    assert tests, claim
    for test in tests:
        path, _, name = test.partition("::")
        found = [node for node in functions(path) if node.name == name]
        assert len(found) == 1, test
        assert ast.get_docstring(found[0]), test


@pytest.mark.parametrize(
    "bound",
    [
        f"{documents.MAX_BYTES >> 10} KiB, {documents.MAX_DEPTH} levels",
        f"{documents.MAX_ALIASES} aliases",
        f"at most {MOST_ENTRIES:,}",
        f"{MAX_FILES:,} files",
        f"| {MOST_CLAIMS:,} |",
        f"| {MOST_EVENTS:,} |",
    ],
)
def test_the_bounds_of_the_page_are_those_of_the_code(bound):
    """The page quotes them (D16)."""
    assert bound in PAGE.read_text().partition("## Bounds")[2]


FORBIDDEN = {
    *("eval", "exec", "compile", "pickle.load", "pickle.loads", "marshal.loads", "joblib.load", "yaml.load"),
    *("yaml.full_load", "yaml.unsafe_load", "numpy.load", "runpy.run_path", "os.system", "tarfile.open"),
    "zipfile.ZipFile.extractall",
}
ALLOWED = {
    ("envscaler_airflow/store/archive.py", "tarfile.open"): "checks each entry, see test_archive.py",
}


SUSPECT = re.compile(
    r"(?<![\w.])(eval|exec|compile)\(|pickle\.|marshal|joblib|yaml\.|numpy\.load|torch\.load|runpy|os\.system"
    r"|tarfile|extractall|shell="
)


@cache
def calls():
    """Return file and code of every call in the files that name one of these."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            nodes = ast.walk(ast.parse(text)) if SUSPECT.search(text) else ()
            file = path.relative_to(ROOT).as_posix()
            found += [(file, node) for node in nodes if isinstance(node, ast.Call)]
    return found


def test_nothing_that_is_read_is_executed():
    """No call unpickles, evaluates or extracts; torch loads weights alone, and only in the training (D16)."""
    found = {(file, ast.unparse(node.func)) for file, node in calls()}
    torch = [ast.unparse(node) for _, node in calls() if ast.unparse(node.func) == "torch.load"]

    assert {pair for pair in found if pair[1] in FORBIDDEN} == set(ALLOWED)
    assert torch
    assert all("weights_only=True" in call for call in torch)


BY_PATH = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "rename", "rmdir", "mkdir"),
    *(
        "symlink_to",
        "hardlink_to",
        "chmod",
        "touch",
        "copy",
        "copyfile",
        "copytree",
        "rmtree",
        "move",
        "rglob",
    ),
}
"""Calls that open a name again, which a training may have replaced by then."""
BELOW_A_FOLDER = re.compile(r"(item|mark|root|(.*\.)?folder)\.(open|rename)\(")
"""Calls of ``Root`` and ``TreeFile``, which open below a descriptor."""
BEFORE_THE_START = "before the training runs, which happens once"
EXPECTED = {
    "context.py:load_store_keys": "a mounted Secret",
    "owner_watch.py:_boot_id": "of the kernel",
    "pod_sidecar.py:prepare": "its parent is a mount; the mode is changed by _let_all_write",
    "pod_sidecar.py:_let_all_write": "with O_NOFOLLOW",
    "restore.py:_lay_back": BEFORE_THE_START,
    "setup.py:_copy": BEFORE_THE_START,
    "setup.py:_copy_output_in": BEFORE_THE_START,
    "setup.py:_fetch_all": BEFORE_THE_START,
    "setup.py:_landing": BEFORE_THE_START,
    "setup.py:_lay_out": BEFORE_THE_START,
    "setup.py:_link": BEFORE_THE_START,
    "setup.py:_workdir": BEFORE_THE_START,
    "setup.py:copy_in": BEFORE_THE_START,
    "setup.py:_read": "a folder of the sidecar's own",
    "setup.py:_write": "a folder of the sidecar's own",
    "spool_state.py:__init__": "opened at once as a root, without a link on the way",
    "spool_state.py:folder": "the same",
    "spool_state.py:read": "layout.json, which the backend wrote",
    "spool_state.py:_places": "a folder of the sidecar's own",
    "spool_state.py:keep_start": "a folder of the sidecar's own",
    "spool_state.py:start": "a folder of the sidecar's own",
    "spool_state.py:update": "a folder of the sidecar's own",
}
"""Functions beside the training that use a path, and why no link of the training can lead them elsewhere."""


def test_beside_the_training_files_are_opened_below_a_descriptor():
    """Every other use of a path in the sidecar is listed with its reason (B1)."""
    files = [*(ROOT / "envscaler_airflow/sidecar").glob("*.py"), ROOT / POD_SIDECAR]
    found = set()
    for path in files:
        for function in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                is_by_path = is_call and node.func.attr in BY_PATH
                if is_by_path and not BELOW_A_FOLDER.match(ast.unparse(node)):
                    found.add(f"{path.name}:{function.name}")

    assert found == set(EXPECTED)


def test_no_process_is_started_through_a_shell():
    """``shell=True`` would make text of a spec a command line (D16)."""
    words = [word.arg for _, node in calls() for word in node.keywords]

    assert "shell" not in words


def test_every_check_that_bandit_skips_has_a_reason():
    """In pyproject.toml and on the line (D16)."""
    text = (ROOT / "pyproject.toml").read_text()
    skips = tomllib.loads(text)["tool"]["bandit"]["skips"]
    lines = [
        line
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if "nosec" in line
    ]

    assert all(re.search(rf'^  "{skip}", # \w', text, re.MULTILINE) for skip in skips)
    assert lines
    assert all(re.search(r"# nosec B\d{3}  # \w", line) for line in lines), lines
