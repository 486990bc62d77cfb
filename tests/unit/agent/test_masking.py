"""Unit tests of masking: no secret gets through, wherever the stream is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_agent.output import Masker, secret_values


def masked(values, *pieces):
    """Return the whole output when *pieces* go in one after another."""
    masker = Masker(values)
    return b"".join([*(masker.feed(piece) for piece in pieces), masker.flush()])


def test_blanks_a_secret_and_leaves_the_rest():
    """Each occurrence of the value is replaced in place."""
    assert masked(["hunter22"], b"a hunter22 b hunter22\n") == b"a *** b ***\n"


@pytest.mark.parametrize("cut", range(1, len(b"key=hunter22;")))
def test_a_secret_cut_by_a_read_is_blanked(cut):
    """The result never depends on where the stream is cut."""
    text = b"key=hunter22;"

    assert masked(["hunter22"], text[:cut], text[cut:]) == b"key=***;"


def test_holds_back_only_what_may_become_a_secret():
    """Text that cannot be the beginning of a secret is not delayed."""
    masker = Masker(["hunter22"])

    assert masker.feed(b"all is well\nhunt") == b"all is well\n"
    assert masker.feed(b"ing\n") == b"hunting\n"


def test_a_longer_secret_wins_over_its_beginning():
    """``abcd`` and ``abcdef`` are secrets: the tail of the longer one is not shown."""
    assert masked(["abcd", "abcdef"], b"abcd", b"ef abcd") == b"*** ***"


def test_overlapping_secrets_are_blanked_as_one():
    """``12345`` and ``45678`` in ``12345678``: no digit of either is shown."""
    assert masked(["12345", "45678"], b"<123", b"456", b"78>") == b"<***>"


def test_an_endless_run_of_a_repeating_secret_is_blanked_without_growing():
    """``aaaa`` in a flood of ``a``: one mask, and never more than three bytes in the buffer."""
    masker = Masker(["aaaa"])

    out = [masker.feed(b"aaaaa") for _ in range(1000)]

    assert b"".join([*out, masker.feed(b"."), masker.flush()]) == b"***."
    assert len(masker._held) == 0


def test_lines_of_a_multi_line_secret_are_blanked_alone():
    """A key file is masked as a whole, and so is each long line of it that is printed alone."""
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nx1\n-----END KEY-----\n"

    assert masked([key], b"[" + key.strip().encode() + b"]") == b"[***]"
    assert masked([key], b"line 2: MIIEvQIBADANBg, short: x1") == b"line 2: ***, short: x1"


def test_the_json_form_of_a_secret_is_blanked():
    """A line break or quote inside a secret is escaped when it is printed as JSON."""
    secret = 'top"secret\nsecond half'

    assert masked([secret], json.dumps({"key": secret}).encode()) == b'{"key": "***"}'


def test_the_url_form_of_a_secret_is_blanked():
    """A password inside a URL is percent-encoded."""
    assert masked(["p@ss/word"], b"https://user:p%40ss%2Fword@host") == b"https://user:***@host"


def test_short_values_are_left_alone():
    """Masking every ``yes`` would destroy the log and hide nothing."""
    assert masked(["yes", "", "1"], b"yes 1\n") == b"yes 1\n"


def test_a_trailing_line_break_of_a_value_does_not_matter():
    """Values that come from files often end with one."""
    assert masked(["hunter22\n"], b"hunter22.") == b"***."


def test_masks_a_whole_text_beside_the_stream():
    """A message is masked without touching the stream's buffer."""
    masker = Masker(["hunter22"])
    masker.feed(b"hunt")

    assert masker.mask("why: hunter22") == "why: ***"
    assert masker.flush() == b"hunt"


def test_takes_only_names_that_are_set():
    """A secret that this attempt does not have causes no error."""
    assert secret_values(["A", "B"], {"A": "one", "C": "three"}) == ["one"]


@given(
    secrets=st.lists(st.text("abc", min_size=4, max_size=6), max_size=3),
    text=st.text("abc.", max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_no_cut_lets_a_secret_through(secrets, text, cuts):
    """The stream gives the same output as the whole text for any cut, without any secret in it."""
    data = text.encode()
    marks = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]

    got = masked(secrets, *(data[a:b] for a, b in pairwise(marks)))

    assert got == Masker(secrets).mask(text).encode()
    assert not any(secret.encode() in part for secret in secrets for part in got.split(b"***"))


@given(st.binary(max_size=200))
def test_without_secrets_bytes_pass_unchanged(data):
    """No secret, no work and no delay."""
    assert Masker([]).feed(data) == data
