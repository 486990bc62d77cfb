"""Semantic versions: their order, and what a range allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.spec_registry import Version, exact, newest

KNOWN = [
    Version.parse(text) for text in ("0.9.1", "1.0.0", "1.2.0", "1.2.3", "1.10.0", "2.0.0-rc.1", "2.0.0")
]


def test_the_order_is_that_of_the_specification():
    """The example of section 11: a pre-release is lower, numbers below text, more parts above fewer."""
    texts = ["1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-beta.2",
             "1.0.0-beta.11", "1.0.0-rc.1", "1.0.0"]  # fmt: skip

    assert [str(version) for version in sorted(map(Version.parse, reversed(texts)))] == texts


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, "2.0.0"), ("*", "2.0.0"), ("1", "1.10.0"), ("1.2", "1.2.3"),
        ("1.2.0", "1.2.0"), ("=1.2.0", "1.2.0"), ("^1.2", "1.10.0"), ("~1.2.0", "1.2.3"), ("~1", "1.10.0"),
        (">=1.2,<2", "1.10.0"),
        (">1.2", "2.0.0"), (">1.2.0, <1.3", "1.2.3"), ("<=1.2", "1.2.3"), ("<1.2.3", "1.2.0"),
        ("^0.9.0", "0.9.1"), ("^0.8", None), ("3", None), ("2.0.0-rc.1", "2.0.0-rc.1"),
        (">=2.0.0-rc.1", "2.0.0"), (">1.10,<2", None),
    ],
)  # fmt: skip
def test_a_range_takes_the_newest_that_it_allows(wanted, expected):
    """A release is never skipped for a pre-release that the range does not name."""
    got = newest(KNOWN, wanted)

    assert got == (None if expected is None else Version.parse(expected))


@pytest.mark.parametrize(
    "text", ["1", "1.2", "v1.2.3", "1.2.3+build", "01.2.3", "1.2.3-", "1.2.-3", "", "1.2.3\n"]
)
def test_what_is_no_version_is_refused(text):
    """Build metadata has no order, so that it would make two versions of one."""
    with pytest.raises(SpecError, match="is not a semantic version"):
        Version.parse(text)


@pytest.mark.parametrize("wanted", ["x", ">=", "1.2.3.4", "^^1", "1 || 2", ">=1,,<2"])
def test_what_is_no_range_is_refused(wanted):
    """A range that is only partly understood would take the wrong version."""
    with pytest.raises(SpecError, match="is not understood"):
        newest(KNOWN, wanted)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_text_and_version_are_one_to_one(major, minor, patch):
    """The text is read back; an exact reference is one version."""
    version = Version(major, minor, patch)

    assert exact(str(version)) == version
    assert newest([version], f"^{major}.{minor}.{patch}") == version
