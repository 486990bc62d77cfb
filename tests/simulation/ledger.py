"""What the invariants know of one run, and how they order what they see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from envscaler_agent.protocol import parse_checkpoint_name
from envscaler_airflow.run import Event, RunState
from envscaler_airflow.run.event_bodies import ReleaseFailed
from tests.simulation.cloud import Node, SimCloud
from tests.simulation.kernel import Violation


def fail(name: str, what: str) -> None:
    """Raise that the invariant *name* does not hold."""
    raise Violation(f"{name}: {what}")


@dataclass
class Ledger:
    """What is known of one run.

    Attributes:
        prefix: Its folder.
        state: Fold of its events.
        stop, clear: Numbers of the last stop request and of the last clear.
        intended, started, ended: True times of the attempts' events, by key.
        refused_by: Execution in which the release of an attempt failed first, by key.
        retried: Keys of those of them after which another execution acted.
        last_end: Key of the attempt by whose end the owner wrote last; None once it wrote something else.
        over_at: True time at which the run ended; None while it goes on.
        manifests: True time of the first manifest of each checkpoint in the store, by name.
        overtaken: Those of them that may be void: another pod, or a later attempt, had taken over by then.
        candidates: What each attempt was promised, by key.
        fenced: True time of the first control of each attempt, by key.
        claims: Newest claim of each node of an attempt.
    """

    prefix: str
    state: RunState = field(default_factory=RunState)
    stop: int = 0
    clear: int = 0
    intended: dict[tuple[int, int], float] = field(default_factory=dict)
    started: dict[tuple[int, int], float] = field(default_factory=dict)
    ended: dict[tuple[int, int], float] = field(default_factory=dict)
    refused_by: dict[tuple[int, int], str] = field(default_factory=dict)
    retried: set[tuple[int, int]] = field(default_factory=set)
    last_end: tuple[int, int] | None = None
    over_at: float | None = None
    manifests: dict[str, float] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    overtaken: set[str] = field(default_factory=set)
    candidates: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    fenced: dict[tuple[int, int], float] = field(default_factory=dict)
    claims: dict[tuple[int, int, int], int] = field(default_factory=dict)
    newest_at_end: dict[tuple[int, int], str] = field(default_factory=dict)

    def note_release(self, event: Event) -> None:
        """Note a release that failed, and executions that act after it."""
        if event.actor is not None:
            self.retried |= {key for key, writer in self.refused_by.items() if writer != event.writer}
        if isinstance(event.body, ReleaseFailed):
            self.refused_by[event.body.generation, event.body.attempt] = event.writer


def nodes_of(cloud: SimCloud, ledger: Ledger) -> Iterator[Node]:
    """Every machine of the run, ever."""
    return (node for node in cloud.nodes if node.attempt.request.run_prefix == ledger.prefix)


def order_of(name: str) -> tuple[int, int, int] | None:
    """What checkpoints are sorted by, newest last; None for another name."""
    key = parse_checkpoint_name(name)
    return None if key is None else (key[0], key[2], key[1])


def key_of(node: Node) -> tuple[int, int]:
    """Generation and attempt of a machine."""
    return node.attempt.request.generation, node.attempt.request.attempt


def age_of(node: Node) -> tuple[int, int, int]:
    """What machines are sorted by, newest last."""
    return (*key_of(node), node.number)
