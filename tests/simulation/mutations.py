"""Faults put into the code on purpose: the simulation must find each of them.

A mutation replaces one text of one module while that module is imported; nothing is written to disk. Each
old text must occur exactly once, so that a mutation that no longer fits the code is an error.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        module: Module that has it.
        old, new: The text, and what replaces it.
    """

    module: str
    old: str
    new: str


MUTATIONS = {
    "unknown-counts-as-dead": Mutation(
        "envscaler_airflow.run.outcomes",
        'if node.state == "lost":\n        return ("lost", node.detail',
        'if node.state in ("lost", "unknown"):\n        return ("lost", node.detail',
    ),
    "create-overwrites": Mutation(
        "envscaler_airflow.store.run_store",
        "return self.store.create(self._name(name), data)",
        "return self.store.write(self._name(name), data) is None",
    ),
    "fence-after-the-list": Mutation(
        "envscaler_airflow.owner.start",
        """\
    fence_older(owned.run, control, generation=live.generation, attempt=live.number)
    found = list_candidates(owned.run, generation=live.generation, attempt=live.number)
""",
        """\
    found = list_candidates(owned.run, generation=live.generation, attempt=live.number)
    fence_older(owned.run, control, generation=live.generation, attempt=live.number)
""",
    ),
    "claim-taken-again": Mutation(
        "envscaler_airflow.sidecar.owner_watch",
        "uid = context.uid or state.uid or uuid.uuid4().hex",
        "uid = uuid.uuid4().hex",
    ),
    "retry-clears-a-stop": Mutation(
        "envscaler_airflow.run.state",
        "return state.owner is None or actor is None or state.owner.max_tries != actor.max_tries",
        "return state.owner is None or actor is None or not actor.is_try_of(state.owner)",
    ),
    "own-clock": Mutation(
        "envscaler_airflow.owner.owned_run",
        "return facts.spent_usd(state, self.backend, now=self.run.now())",
        "return facts.spent_usd(state, self.backend, now=__import__('time').time())",
    ),
    "accepted-ignored": Mutation(
        "envscaler_airflow.run.steps", "if cleared and state.accepted:", "if cleared:"
    ),
    "deletes-on-hold": Mutation(
        "envscaler_airflow.store.checkpoints",
        'if not gone or fence_of(store, generation, attempt) != "open":',
        'if not gone or fence_of(store, generation, attempt) == "over":',
    ),
    "no-wait-for-the-others": Mutation(
        "envscaler_airflow.sidecar.replaced", "        if not late:\n            break", "        break"
    ),
    "request-unanswered": Mutation(
        "envscaler_airflow.run.steps",
        "return next((item for item in pending if isinstance(item.body, kind)), None)",
        "return next((one for one in pending if kind is StopRequested and isinstance(one.body, kind)), None)",
    ),
    "release-not-repeated": Mutation(
        "envscaler_airflow.owner.owner",
        "is_due = is_last or facts.is_unreleased(attempt)",
        "is_due = is_last and not attempt.unreleased",
    ),
}
"""By name. Source: the faults that a simulation of the protocol must be able to find, one of each kind."""


class _Mutated(SourceFileLoader):
    """Loads a module with the mutation, and without bytecode from a cache."""

    def __init__(self, mutation: Mutation, path: str) -> None:
        super().__init__(mutation.module, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        found = source.count(self._mutation.old)
        if found != 1:
            raise RuntimeError(f"{self.path}: the mutated text occurs {found} times: {self._mutation.old!r}")
        return compile(source.replace(self._mutation.old, self._mutation.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutation.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            raise ImportError(f"{fullname} has no source")
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_Mutated(self._mutation, spec.origin)
        )


def install(name: str) -> None:
    """Have the named mutation in the code from its import on; call it before anything is imported."""
    mutation = MUTATIONS[name]
    if mutation.module in sys.modules:
        raise RuntimeError(f"{mutation.module} is imported already")
    sys.meta_path.insert(0, _Finder(mutation))
