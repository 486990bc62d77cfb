"""Reading YAML: places, traps, bounds."""

import os
from pathlib import Path

import pytest

from envscaler_airflow.envspec.documents import MAX_BYTES, read_file, read_text
from envscaler_airflow.envspec.faults import Faults
from envscaler_airflow.errors import SpecError


def read(text):
    """The document in *text* as plain values."""
    faults = Faults()
    node = read_text(text, faults)
    faults.raise_if_any()
    return node.plain()


def faults_of(text):
    """What is wrong with *text*."""
    with pytest.raises(SpecError) as caught:
        read(text)
    return caught.value.faults


def test_plain_scalars_follow_yaml_1_2():
    """Numbers, switches and nulls are typed; dates, versions and quoted values are text."""
    text = 'a: 4\nb: 0.5\nc: true\nd: ~\ne: 2024-01-31\nf: "yes"\ng: 1.2.3\nh: 0x1f\ni: 1e3\nj: 1_000\n'

    assert read(text) == {
        "a": 4, "b": 0.5, "c": True, "d": None, "e": "2024-01-31", "f": "yes", "g": "1.2.3", "h": 31,
        "i": 1000.0, "j": "1_000",
    }  # fmt: skip


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
        ("t: .inf", "spec:1: t: .inf is no finite number; write one, or leave the field out"),
        ("t: .nan", "spec:1: t: .nan is no finite number; write one, or leave the field out"),
        ("t: 1e999", "spec:1: t: 1e999 is too large a number; write a smaller one, or quote it"),
        ("5: x", 'spec:1: 5: key 5 is no text for YAML; write "5":'),
        ("true: x", 'spec:1: true: key true is no text for YAML; write "true":'),
        ("? [a]\n: x", "spec:1: a key that is not text; write a name"),
        ("a: 1\nb: 2\na: 3", "spec:3: a: written twice, first in line 1; write it once"),
        ("a:\n\tb: 1", "spec:2: a tab where YAML wants spaces; indent by spaces"),
        ("a: &x [*x]", "spec:1: a[0]: anchor 'x' holds itself; write the value out"),
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
    """One fault each; None: any fault will do."""
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


def test_merge_keys_fill_in_what_the_map_lacks():
    """`<<` gives the anchor's entries, the map's own win."""
    assert read("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")["b"] == {"x": 1, "y": 3}


def test_json_with_tabs_is_read():
    """JSON may be indented by tabs."""
    assert read('{\n\t"a": {\n\t\t"b": [1, true, null]\n\t}\n}') == {"a": {"b": [1, True, None]}}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"a: \xff\n", "byte 0xff is no UTF-8"),
        (b"a: b\n" * MAX_BYTES, "larger than 128 KiB"),
        (None, "is no regular file"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, fault):
    """Wrong bytes, far too many bytes, and a pipe that nobody writes to."""
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
