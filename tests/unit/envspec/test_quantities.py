"""Quantities: the meaning of each text, and the errors of invalid ones."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.envspec.quantities import (
    cpu_cores,
    duration_s,
    duration_text,
    gpu_memory_gb,
    memory_bytes,
)


@pytest.mark.parametrize(("text", "cores"), [("500m", 0.5), (8, 8), ("0.5", 0.5), (0.25, 0.25), ("1.", 1)])
def test_cpu_is_cores_or_millicores(text, cores):
    """Kubernetes' rule."""
    assert cpu_cores(text) == cores


@pytest.mark.parametrize(
    ("text", "size"), [("4Gi", 4 << 30), ("512Mi", 512 << 20), ("32G", 32 * 10**9), ("1.5Gi", 3 << 29)]
)
def test_memory_is_bytes_with_a_unit(text, size):
    """Binary units have an i."""
    assert memory_bytes(text) == size


def test_a_part_of_a_byte_is_a_whole_one():
    """Kubernetes rounds up: 1.0000001 x 1,048,576 is 1,048,576.1."""
    assert memory_bytes("1.0000001Mi") == (1 << 20) + 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (4096, "4096 has no unit; write 4096Mi or 4Gi"),
        ("4096", "'4096' has no unit; write 4096Mi or 4Gi"),
        (32, "32 has no unit; write 32Gi or 32Mi"),
        (4294967296, "4294967296 has no unit; bytes are written as 4096Mi"),
        ("512m", "'512m' is 512 thousandths of a byte; write 512Mi"),
        ("32GB", "'32GB' has an unknown unit; write 32Gi (1024s) or 32G (1000s)"),
        ("32g", "'32g' has an unknown unit; write 32Gi (1024s) or 32G (1000s)"),
        ("4k", "'4k' is out of range; write between 1Mi and 1Pi, such as 4Gi"),
        ("9999Pi", "'9999Pi' is out of range; write between 1Mi and 1Pi, such as 4Gi"),
        ("-1Gi", "'-1Gi' is not an amount of memory: write 4Gi or 512Mi"),
        ("1e3", "'1e3' is not an amount of memory: write 4Gi or 512Mi"),
        ("", "'' is not an amount of memory: write 4Gi or 512Mi"),
        ("4 Gi", "'4 Gi' is not an amount of memory: write 4Gi or 512Mi"),
        (True, "True is not an amount of memory: write 4Gi or 512Mi"),
        (float("nan"), "nan is not an amount of memory: write 4Gi or 512Mi"),
        (None, "None is not an amount of memory: write 4Gi or 512Mi"),
        ("٤Gi", "'٤Gi' is not an amount of memory: write 4Gi or 512Mi"),
    ],
)
def test_a_wrong_memory_says_what_to_write(text, fault):
    """Each with its fix."""
    with pytest.raises(ValueError, match=re.escape(fault) + "$"):
        memory_bytes(text)


@pytest.mark.parametrize(
    "text", ["8Gi", "0", "-1", "0.0001", "1000000", "nan", True, float("inf"), "1e2", 10**30]
)
def test_a_wrong_cpu_is_refused(text):
    """Memory units, zero, finer than a millicore, huge."""
    with pytest.raises(ValueError, match="write"):
        cpu_cores(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("1h30m", 5400), ("90s", 90), ("500ms", 0.5), ("2d", 172800), ("0s", 0)],
)
def test_durations_are_sums_of_units(text, seconds):
    """Largest unit first."""
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (600, '600 is not a duration; write it with a unit in quotes: "600s", "10m"'),
        ("600", '\'600\' is not a duration; write "600s" or "600m", "1h30m" or "90s"'),
        ("30m1h", "'30m1h' has its units out of order; write the largest first: \"1h30m\""),
        ("1h1h", "'1h1h' has its units out of order; write the largest first: \"1h30m\""),
        ("400d", "'400d' is more than a year; write at most 366d"),
    ],
)
def test_a_wrong_duration_says_what_to_write(text, fault):
    """Each with its fix."""
    with pytest.raises(ValueError, match=re.escape(fault) + "$"):
        duration_s(text)


@pytest.mark.parametrize("text", ["141Gi", "141GB", "141", 141, "141GiB"])
def test_gpu_memory_is_the_vendors_figure_whatever_the_unit(text):
    """All mean nominal at least 141."""
    assert gpu_memory_gb(text) == 141


@pytest.mark.parametrize("text", ["141Mi", "0", "-1", "1e9", 10**9, None, "GB"])
def test_a_wrong_gpu_memory_is_refused(text):
    """Other units, none, too much."""
    with pytest.raises(ValueError, match="write"):
        gpu_memory_gb(text)


@given(st.integers(0, 366 * 86400 * 1000))
def test_a_duration_is_read_back(milliseconds):
    """To the millisecond."""
    assert duration_s(duration_text(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_nothing_but_a_value_error_is_raised(value):
    """For every text."""
    for read in (cpu_cores, memory_bytes, duration_s, gpu_memory_gb):
        try:
            assert read(value) >= 0
        except ValueError:
            continue
