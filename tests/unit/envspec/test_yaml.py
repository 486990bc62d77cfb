"""Reading YAML: places, traps, bounds."""

import os
from pathlib import Path

import pytest
import yaml

from envscaler_airflow.envspec.documents import LOADER, MAX_ALIASES, MAX_BYTES, Faults, read_file, read_text
from envscaler_airflow.errors import SpecError


@pytest.fixture(params=[yaml.SafeLoader, yaml.CSafeLoader], ids=["python", "libyaml"], autouse=True)
def _parser(request, monkeypatch):
    """Each test runs with both parsers of PyYAML; some builds lack libyaml's."""
    monkeypatch.setattr("envscaler_airflow.envspec.documents.LOADER", request.param)


def read(text):
    """The document in *text* as plain values."""
    faults = Faults()
    node = read_text(text, faults)
    faults.raise_if_any()
    return node.plain()


def faults_of(text):
    """The errors of *text*."""
    with pytest.raises(SpecError) as caught:
        read(text)
    return caught.value.faults


def test_the_fast_parser_is_used():
    """The parser of libyaml takes a sixth of the time, which matters when a DAG file is parsed."""
    assert LOADER is yaml.CSafeLoader


def test_plain_scalars_follow_yaml_1_2():
    """Numbers, booleans and nulls are typed; dates, versions and quoted values are text."""
    text = 'a: 4\nb: 0.5\nc: true\nd: ~\ne: 2024-01-31\nf: "yes"\ng: 1.2.3\nh: 0x1f\ni: 1e3\nj: 1_000\n'

    assert read(text) == {
        "a": 4, "b": 0.5, "c": True, "d": None, "e": "2024-01-31", "f": "yes", "g": "1.2.3", "h": 31,
        "i": 1000.0, "j": "1_000",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["0b11", "1_000", "010.5", "1:60", "tRUE", "-0x1f", "=", "2024-01-31T10:30:00Z"]
)
def test_text_of_yaml_1_2_stays_text(text):
    """Its core schema has no binary numbers, no separators of digits and no dates."""
    assert read(f"a: {text}") == {"a": text}


def test_a_number_of_fifteen_digits_is_read():
    """With its sign; it survives JSON, which keeps it as a double."""
    assert read("a: -999999999999999") == {"a": -999_999_999_999_999}


def test_a_quoted_switch_is_a_key():
    """Every reader takes it for text."""
    assert read('"on": 1') == {"on": 1}


def test_a_number_tagged_as_text_is_text():
    """``!!str`` is one of the three tags that are read."""
    assert read("a: !!str 5") == {"a": "5"}


def test_a_plain_scalar_keeps_its_text():
    """A version ``3.10`` carries more than the number 3.1; quoted text has no other form."""
    node = read_text("a: 3.10\nb: '3.10'", Faults())

    assert (node.value["a"].value, node.value["a"].raw) == (3.1, "3.10")
    assert (node.value["b"].value, node.value["b"].raw) == ("3.10", None)


def test_what_an_alias_holds_keeps_its_line():
    """The alias is in line 3; its content is in line 2."""
    node = read_text("a: &a\n  x: 1\nb: *a", Faults())

    held = node.value["b"]
    assert (held.line, held.path) == (3, "b")
    assert (held.value["x"].line, held.value["x"].path) == (2, "b.x")


def test_a_trap_is_reported_once():
    """The node is marked, so that later checks skip it."""
    node = read_text("a: yes", Faults())

    assert node.value["a"].is_broken


def test_a_byte_order_mark_is_skipped(tmp_path):
    """Some editors write one."""
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1")

    assert read_file(path, Faults(), shown_as="s.yaml").plain() == {"a": 1}


def test_every_value_knows_its_line_and_path():
    """Line of the key, line of the item."""
    node = read_text("a:\n  - x: 1\n  -\n    x: 2\n", Faults(), file="s.yaml")

    second = node.value["a"].value[1].value["x"]
    assert (second.file, second.line, second.path) == ("s.yaml", 4, "a[1].x")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("t: 10:30", 'spec:1: t: 10:30 without quotes is a number of base 60 for YAML 1.1; write "10:30"'),
        ("t: yes", 'spec:1: t: yes is true for YAML 1.1 and text for YAML 1.2; write true, or "yes"'),
        ("on: 1", 'spec:1: on: key on is true for YAML 1.1 and text for YAML 1.2; write "on":'),
        ("t: 010", 'spec:1: t: 010 is octal for YAML 1.1; write "010", or the number without the leading 0'),
        ("t: .inf", "spec:1: t: .inf is not a finite number; write one, or leave the field out"),
        ("t: .nan", "spec:1: t: .nan is not a finite number; write one, or leave the field out"),
        ("t: 1e999", "spec:1: t: 1e999 is too large a number; write a smaller one, or quote it"),
        ("5: x", 'spec:1: 5: key 5 is not a string in YAML; write "5":'),
        ("true: x", 'spec:1: true: key true is not a string in YAML; write "true":'),
        ("? [a]\n: x", "spec:1: a key that is not text; write a name"),
        ("a: 1\nb: 2\na: 3", "spec:3: a: written twice, first in line 1; write it once"),
        ("a:\n\tb: 1", "spec:2: a tab where YAML wants spaces; indent by spaces"),
        ("a: 1\n\tb: 2", "spec:2: a tab where YAML wants spaces; indent by spaces"),
        (
            "t: 1" + "0" * 16,
            "spec:1: t: 10000000000000000... is too large a number; write at most 15 digits, or quote it",
        ),
        ("a: &x 5\nb: {<<: *x}", "spec:2: b.<<: <<: takes maps only; write <<: *anchor of a map"),
        ("a: &x [*x]", "spec:1: a[0]: anchor 'x' contains itself; write the value out"),
        ("a: *x", "spec:1: a: anchor 'x' is defined nowhere above; write the value out"),
        ("a: !!python/object:os.system x", None),
        ("a: 1\n---\nb: 2", "spec:2: a second document; write one document, without ---"),
        ("- a", "spec:1: got a list; write a map that begins with version: v1"),
        ("", "spec:1: got nothing; write a map that begins with version: v1"),
        ("a: [1, 2", None),
        ("a: " + "9" * 30, None),
        ("a: \x01", None),
        ("a: " + "[" * 40 + "]" * 40, None),
        ('a: "\\U00110000"', None),
        ("%YAML 99.1\n---\na: 1", None),
    ],
)
def test_traps_are_named_with_what_to_write(text, fault):
    """One fault each; None: any fault is fine."""
    faults = faults_of(text)

    if fault is not None:
        assert faults == [fault]
    assert len(faults) == 1


def test_anchors_that_explode_are_stopped():
    """Nine levels of nine aliases would be 400 million values."""
    levels = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for name, below in zip("bcdefghi", "abcdefgh", strict=True):
        levels.append(f"{name}: &{name} [{', '.join(['*' + below] * 9)}]")

    assert "more than 20000 values" in faults_of("\n".join(levels))[0]


def test_an_anchor_is_used_at_most_200_times():
    """Also where its values would not be too many."""
    text = "a: &a 1\nb: [" + ", ".join(["*a"] * MAX_ALIASES)

    assert read(text + "]")["b"] == [1] * MAX_ALIASES
    assert "more than 200 aliases" in faults_of(text + ", *a]")[0]


def test_merge_keys_fill_in_what_the_map_lacks():
    """`<<` gives the anchor's entries; the map's own entries take precedence."""
    assert read("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")["b"] == {"x": 1, "y": 3}


def test_the_first_of_several_merged_maps_wins():
    """Source: https://yaml.org/type/merge.html ."""
    assert read("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}")["c"] == {"x": 1, "y": 2}


def test_json_with_tabs_is_read():
    """JSON may be indented by tabs."""
    assert read('{\n\t"a": {\n\t\t"b": [1, true, null]\n\t}\n}') == {"a": {"b": [1, True, None]}}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"a: \xff\n", "byte 0xff is not UTF-8"),
        (b"a: b\n" * MAX_BYTES, "larger than 128 KiB"),
        (None, "is not a regular file"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, fault):
    """Invalid bytes, far too many bytes, and a pipe without a writer."""
    path = tmp_path / "s.yaml"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    faults = Faults()

    assert read_file(path, faults, shown_as="s.yaml") is None
    assert fault in str(next(iter(faults.found)))


def descriptors() -> int:
    """Number of files that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("path", [".", "", "/proc/self/mem"])
def test_a_folder_and_a_file_that_fails_are_faults(path):
    """Opening them works, and reading does not: one fault, and the descriptor is closed again."""
    faults, before = Faults(), descriptors()

    assert read_file(Path(path), faults, shown_as="s.yaml") is None
    assert len(faults.found) == 1
    assert descriptors() == before


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: {{ parameters.x }}", 1),
        ("b: 1\na:\n  - {{ .parameters.x }}", 3),
        ("a: {{ parameters.x }}-suffix\nb: 1", 1),
        ("a: [python, {{ parameters.x }}]", 1),
        ("a: [python, --rate={{ parameters.x }}]", 1),
        ("a: {count: {{ parameters.x }}}", 1),
        ("a: {{ parameters['x'] }}", 1),
        ('a: {{ parameters.x | default("b") }}', 1),
        ("a: {{ inputs.data }}/b", 1),
        ("a: 'b' {{ parameters.x }}", 1),
    ],
)
def test_a_template_without_quotes_says_so(text, line):
    """To YAML it is a map within a map (F12)."""
    faults = Faults()

    read_text(text, faults)

    (found,) = [str(fault) for fault in faults.found]
    assert found.startswith(f"spec:{line}: ")
    assert found.endswith('a template without quotes; write it in quotes: "{{ parameters.x }}"')


@pytest.mark.parametrize("text", ["a: '{{ x }}' b", 'a: "b {{ x }}" c', "a: [1, # {{ x }}\n", "? [a]\n: x"])
def test_a_fault_beside_a_quoted_template_is_what_it_is(text):
    """The quotes are there."""
    faults = Faults()

    read_text(text, faults)

    assert faults.found
    assert "without quotes" not in str(next(iter(faults.found)))


def test_a_line_of_open_quotes_is_searched_once():
    """In a spec of the largest size; each escaped quote once began a search of its own: a minute (B1)."""
    (found,) = faults_of('a: "' + '"\\' * 60_000)

    assert "not valid YAML" in found
