"""Policies of another package, as its entry points provide them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from envscaler_airflow.scaling import registry
from envscaler_airflow.scaling.decision import ScalingPolicy

_FOUND = registry.entry_points


def bring(monkeypatch, **loads):
    """Entry points beside ours: for each name a function that loads the object."""
    points = [SimpleNamespace(name=name, value=f"{name}:policy", load=load) for name, load in loads.items()]
    monkeypatch.setattr(registry, "entry_points", lambda **group: [*_FOUND(**group), *points])
    registry.all_policies.cache_clear()


def bring_propose(monkeypatch, **proposes):
    """The same for functions that propose."""
    bring(monkeypatch, **{name: _loads(ScalingPolicy(name, call)) for name, call in proposes.items()})


@contextlib.contextmanager
def forgotten():
    """No test sees another's policies."""
    registry.all_policies.cache_clear()
    yield
    registry.all_policies.cache_clear()


def _loads(policy):
    return lambda: policy
