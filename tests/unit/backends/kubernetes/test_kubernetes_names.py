"""Unit tests of names: Kubernetes accepts the name of every run."""

import re

import attempts
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.planning.offers import Allocation, Offer

OFFER = Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=2.0)
DNS = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z")
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")


def request_for(**changes):
    """Return a request; *changes* are fields."""
    fields = {
        "store_url": "s3://store",
        "run_prefix": "dep/dag/run/train/-1",
        "run_label": "dag.train",
        "generation": 1,
        "attempt": 3,
        "allocation": Allocation(OFFER),
        "command": ("python", "train.py"),
    }
    return attempts.request(**(fields | changes))


def test_a_name_says_what_runs_and_which_attempt_it_is():
    """Label first, then a hash of store and run, generation and attempt."""
    name = names.attempt_name(request_for())

    assert re.fullmatch(r"dag-train-[0-9a-f]{10}-g1-a3", name)


def test_a_long_name_with_dots_and_unicode_becomes_a_label():
    """Seventy arbitrary characters become at most 52 lower-case letters, digits and dashes."""
    name = names.attempt_name(request_for(run_label="Retrain.Modèle_überlang." * 3 + "тест.train"))

    assert DNS.match(name)
    assert len(name) <= 52
    assert name.endswith("-g1-a3")


@given(st.text(max_size=90), st.integers(1, 10**6), st.integers(1, 10**6))
def test_every_name_leaves_room_for_the_index_of_a_pod(label, generation, attempt):
    """``NAME-99999`` is a DNS label too: it is the pod's host name."""
    name = names.attempt_name(request_for(run_label=label, generation=generation, attempt=attempt))

    assert DNS.match(name)
    assert len(f"{name}-99999") <= 63


@given(st.text(max_size=90))
def test_every_text_becomes_a_label_value_and_a_dns_label(text):
    """A valid text stays unchanged; an invalid one gets a hash."""
    value, label = names.label_value(text), names.dns_label(text)

    assert LABEL.match(value)
    assert len(value) <= 63
    assert DNS.match(label)
    assert len(label) <= 63


def test_texts_that_look_alike_keep_apart():
    """``a.b`` and ``a b`` get different values."""
    assert names.dns_label("a.b") != names.dns_label("a b")
    assert names.label_value("x" * 70) != names.label_value("x" * 71)
    assert names.label_value("a.b") == "a.b"


def test_store_run_generation_and_attempt_make_the_name():
    """A change of any one of them makes another name."""
    changes = [
        {},
        {"store_url": "s3://other"},
        {"run_prefix": "dep/dag/run/train/0"},
        {"generation": 2},
        {"attempt": 4},
    ]

    assert len({names.attempt_name(request_for(**change)) for change in changes}) == 5
