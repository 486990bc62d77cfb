"""Placeholders in a command for values that only the node knows."""

from __future__ import annotations

import pytest

from envscaler_agent.process import expand

NODE = {"ENVSCALER_RENDEZVOUS": "10.0.0.7:29400", "ENVSCALER_NODE": "3"}


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("--rdzv_endpoint=$ENVSCALER_RENDEZVOUS", "--rdzv_endpoint=10.0.0.7:29400"),
        ("$ENVSCALER_RENDEZVOUS_HOST:$ENVSCALER_RENDEZVOUS_PORT", "10.0.0.7:29400"),
        ("--main_process_ip=$ENVSCALER_RENDEZVOUS_HOST", "--main_process_ip=10.0.0.7"),
        ("--machine_rank=$ENVSCALER_NODE", "--machine_rank=3"),
        ("$ENVSCALER_NODES", "$ENVSCALER_NODES"),
        ("$ENVSCALER_RENDEZVOUS_X", "$ENVSCALER_RENDEZVOUS_X"),
        ("$HOME", "$HOME"),
    ],
)
def test_a_word_that_names_the_meeting_or_the_node_gets_it(word, becomes):
    """Only these names, and only complete ones: every other text is the user's own."""
    assert expand([word], NODE) == [becomes]


def test_an_address_of_version_six_keeps_its_brackets_only_before_a_port():
    """A host alone has none."""
    environ = {"ENVSCALER_RENDEZVOUS": "[fd00::7]:29400"}

    assert expand(["$ENVSCALER_RENDEZVOUS", "$ENVSCALER_RENDEZVOUS_HOST"], environ) == [
        "[fd00::7]:29400",
        "fd00::7",
    ]


def test_what_is_not_known_is_left_for_a_shell():
    """A single node has no rendezvous."""
    words = ["sh", "-c", "echo $ENVSCALER_RENDEZVOUS $ENVSCALER_NODE"]

    assert expand(words, {}) == words
