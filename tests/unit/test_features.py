"""The list of features and the tests that show them agree."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import yaml

TESTS = Path(__file__).parents[1]
FEATURES = yaml.safe_load((TESTS / "features.yaml").read_text())
SHOWN = {row["id"] for row in FEATURES if row["built"] or "partly" in row}
MARK = re.compile(r"\(feature ([A-Z][0-9]+)\)")


def marks_of(source):
    """Return each marked id with the test that has it in its docstring's first line."""
    functions = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef))
    tests = [each for each in functions if each.name.startswith("test_")]
    first_lines = {each.name: (ast.get_docstring(each) or "").partition("\n")[0] for each in tests}
    return [(mark, name) for name, line in first_lines.items() for mark in MARK.findall(line)]


def marks():
    """Return the tests of each marked id."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for mark, name in marks_of(path.read_text()):
            found[mark].append(f"{path.relative_to(TESTS)}::{name}")
    return found


def test_the_list_has_each_feature_once_and_says_what_is_built():
    """Each has an id, a title and whether the whole is built; what works of the rest is named."""
    assert [name for name, times in Counter(row["id"] for row in FEATURES).items() if times > 1] == []
    assert all(row.keys() - {"partly"} == {"id", "title", "built"} for row in FEATURES)
    assert all(isinstance(row["built"], bool) and row["title"] for row in FEATURES)
    assert [row["id"] for row in FEATURES if row["built"] and "partly" in row] == []


def test_every_feature_that_works_is_shown_by_a_test():
    """Also one of which a part works; the test's docstring has its id."""
    assert sorted(SHOWN - marks().keys()) == []


def test_no_test_shows_what_is_not_built():
    """Neither an id that the list lacks nor one of which nothing works."""
    assert {mark: tests for mark, tests in marks().items() if mark not in SHOWN} == {}


def test_a_mark_counts_only_in_the_first_line_of_a_test_s_docstring():
    """Several may follow each other; comments, other lines and other functions show nothing."""
    source = '''
def test_a():
    """Move (feature C3) (feature C5).

    As in (feature D1).
    """
    # (feature D2)

def helper():
    """Make (feature E1)."""
'''

    assert marks_of(source) == [("C3", "test_a"), ("C5", "test_a")]
