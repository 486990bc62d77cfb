"""The checker of plain English finds phrases where people read them."""

from __future__ import annotations

from style.check_words import findings_of, frame_of

FRAMES = [
    frame_of({"frame": r"\btold\b", "better": "reported"}),
    frame_of({"frame": r"\bto be had\b", "better": "available"}),
]


def lines(path, source, frames=FRAMES):
    """Return the line and phrase of each finding."""
    return [(each.line, each.phrase) for each in findings_of(path, source, frames)]


def test_a_docstring_is_checked_at_its_own_line():
    """The second line of a docstring that begins on line 2 is line 3."""
    source = 'def f():\n    """Ask.\n    What was told counts.\n    """\n'

    assert lines("envscaler_airflow/a.py", source) == [(3, "told")]


def test_an_f_string_is_one_text():
    """A phrase before and one behind a value are both found, each once, and a phrase inside the value too."""
    source = """x = f"told {a} is not to be had {b('it told me')}"\n"""

    assert lines("dags/a.py", source) == [(1, "told"), (1, "to be had"), (1, "told")]


def test_a_phrase_is_found_across_lines_of_a_comment():
    """Comments on consecutive lines are one text."""
    source = "x = 1\n# No GPU is to be\n# had here.\n"

    assert lines("dags/a.py", source) == [(2, "to be had")]


def test_comments_with_code_between_them_are_two_texts():
    """A phrase does not span code."""
    source = "# No GPU is to be\nx = 1\n# had here.\n"

    assert lines("dags/a.py", source) == []


def test_a_literal_of_one_word_is_a_name():
    """A key or an identifier is not prose."""
    assert lines("dags/a.py", 'x = {"told": 1}\n') == []


def test_names_in_code_are_not_prose():
    """Neither an identifier nor a code span of a docstring is checked."""
    assert lines("dags/a.py", '"""Call ``told()`` or `told` first."""\ntold = 1\n') == []


def test_of_a_test_only_docstrings_are_checked():
    """A test may compare messages and contain any text."""
    source = '"""It was told."""\n# it was told\nx = "it was told"\n'

    assert lines("tests/unit/test_a.py", source) == [(1, "told")]


def test_a_page_is_checked_outside_of_its_code():
    """Fenced blocks and code spans are left out, and lines behind them keep their numbers."""
    page = "He told.\n\n```sh\ntold\n```\n\n- `told`\n  ```\n  told\n  ```\n- Not to be\n  had.\n"

    assert lines("docs/a.md", page) == [(1, "told"), (11, "to be had")]


def test_a_frame_may_be_exempt_below_a_path():
    """An exempt path keeps the phrase, any other path does not."""
    frame = frame_of({"frame": r"\bslices?\b", "better": "share", "except": ["docs/mig"]})

    assert lines("docs/mig.md", "A slice.", [frame]) == []
    assert lines("docs/gpu.md", "A slice.", [frame]) == [(1, "slice")]


def test_a_finding_names_place_phrase_and_better_wording():
    """The line can be clicked in an editor."""
    (finding,) = findings_of("docs/a.md", "\nIt told.", FRAMES)

    assert str(finding) == "docs/a.md:2: told -> reported"
