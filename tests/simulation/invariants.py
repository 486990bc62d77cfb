"""What must always hold, checked at each effect on the store, and at the end of a world.

Nothing here decides by the project's own rules: each invariant is worked out again from the truth.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from envscaler_agent.errors import ProtocolError
from envscaler_agent.protocol import Control, parse_checkpoint_name
from envscaler_airflow.clouds import tariffs
from envscaler_airflow.owner.reap import YOUNG_S
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF
from envscaler_airflow.run import AttemptState, Event, RunState, fold, outcome_of
from envscaler_airflow.run import event_bodies as bodies
from envscaler_airflow.run.recovery import WORTH_A_START
from envscaler_airflow.store.clock import STEP_S
from envscaler_airflow.store.run import Run
from tests.simulation.cloud import Node, SimCloud
from tests.simulation.coverage import pair_of
from tests.simulation.kernel import PAUSE_S, Machine, Violation, World
from tests.simulation.store import Effect, SimClient, SimStore

MOST_RENEWALS = 45
"""Renewals of the lease, a minute apart, within which an owner answers a request. Chosen: the longest pause
between two tries of an execution is 10 minutes."""
LATEST_S = 120.0
"""How long a training that has to end may go on after its sidecar knows, seconds, beside grace and pauses.
Chosen: a round of a simulated sidecar and the last upload."""
OF_THE_STAGE = ("train-", "disk-full")
"""Faults that are the stage's own."""
_EVENT = re.compile(r"(.+)/events/(\d{6})\.json\Z")
_OF_CLAIM = re.compile(r"(.+)/(?:status|metrics|logs)/(g\d+-a\d+-n\d+-c\d+)\b")
_MANIFEST = re.compile(r"(.+)/checkpoints/([^/]+)/manifest-c(\d+)\.json\Z")
_CONTROL = re.compile(r"(.+)/control/g(\d+)-a(\d+)\.json\Z")
_CLAIM = re.compile(r"(.+)/claims/g(\d+)-a(\d+)-n(\d+)-(\d{6})\.json\Z")
_LEASE = re.compile(r"(.+)/lease/run\.json\Z")
_SPEC = re.compile(r".+/spec-[0-9a-f]+\.json\Z")
_OUTPUT = re.compile(r".+/outputs/g(\d+)-a(\d+)-c(\d+)/")


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
        started, ended: True times of the attempts' events, by key.
        over_at: True time at which the run ended; None while it goes on.
        manifests: True time of the first manifest of each checkpoint in the store, by name.
        candidates: What each attempt was promised, by key.
        fenced: True time of the first control of each attempt, by key.
        claims: Newest claim of each node of an attempt.
    """

    prefix: str
    state: RunState = field(default_factory=RunState)
    stop: int = 0
    clear: int = 0
    started: dict[tuple[int, int], float] = field(default_factory=dict)
    ended: dict[tuple[int, int], float] = field(default_factory=dict)
    over_at: float | None = None
    manifests: dict[str, float] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    candidates: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    fenced: dict[tuple[int, int], float] = field(default_factory=dict)
    claims: dict[tuple[int, int, int], int] = field(default_factory=dict)
    newest_at_end: dict[tuple[int, int], str] = field(default_factory=dict)


class Invariants:
    """Watches a world; raises :class:`Violation` in the actor whose effect breaks one.

    Attributes:
        was_cleared: Under Airflow: whether a person cleared the task between two ids of it.
    """

    was_cleared: Callable[[str, str], bool] | None = None

    def __init__(self, world: World, store: SimStore, cloud: SimCloud, *, reap_every_s: float) -> None:
        """Watch from now on; orphans are reaped every *reap_every_s* seconds."""
        self.world, self.store, self.cloud = world, store, cloud
        self._reap_every_s = reap_every_s
        self.ledgers: dict[str, Ledger] = {}
        self._writers: dict[str, str] = {}
        self._reported_at: dict[str, float] = {}
        self._told_at: dict[str, float] = {}
        self._fenced: set[str] = set()
        self._unanswered: Counter[tuple[str, int]] = Counter()
        store.watchers.append(self._changed)
        store.readers.append(self._read)

    def ledger(self, prefix: str) -> Ledger:
        """What is known of the run in the folder *prefix*."""
        if prefix not in self.ledgers:
            self.ledgers[prefix] = Ledger(prefix)
        return self.ledgers[prefix]

    # At each effect

    def _changed(self, effect: Effect) -> None:
        """Check one change; the first violation counts, even if the code that meets it goes on."""
        try:
            self._check_change(effect)
        except Violation as err:
            self.world.violation = self.world.violation or str(err)
            raise

    def _check_change(self, effect: Effect) -> None:
        name = effect.name
        self._check_content(effect)
        if found := _EVENT.match(name):
            self._event(self.ledger(found[1]), effect)
        elif found := _OF_CLAIM.match(name):
            self._of_claim(f"{found[1]}/{found[2]}", effect)
        elif found := _MANIFEST.match(name):
            self._manifest(self.ledger(found[1]), found[2], int(found[3]), effect)
        elif found := _CONTROL.match(name):
            self._control(self.ledger(found[1]), (int(found[2]), int(found[3])), effect)
        elif found := _CLAIM.match(name):
            self._claimed(self.ledger(found[1]), found, effect)
        elif found := _LEASE.match(name):
            self._renewed(self.ledger(found[1]))

    def _check_content(self, effect: Effect) -> None:
        data = effect.data
        if data is None or not effect.name.endswith((".json", ".jsonl")):
            return
        if b"NaN" in data or b"Infinity" in data:
            fail("no-nan", f"{effect.name} contains a number that is none")
        if _SPEC.match(effect.name):
            digest = str(hash(data))
            if self._writers.setdefault(effect.name, digest) != digest:
                fail("frozen-spec", f"{effect.name} was overwritten with another spec")

    def _claimed(self, ledger: Ledger, found: re.Match[str], effect: Effect) -> None:
        """A claim is created once, and a machine claims its node once."""
        key, number = (int(found[2]), int(found[3]), int(found[4])), found[5]
        if effect.kind != "create":
            fail("claims", f"{effect.name} was overwritten or deleted ({effect.kind})")
        ledger.claims[key] = max(ledger.claims.get(key, 0), int(number))
        mine = f"{ledger.prefix}/{key} on {effect.machine.name}"
        if self._writers.setdefault(mine, number) != number:
            fail("claims", f"{effect.machine.name} claims {key} as {self._writers[mine]} and {number}")

    def _renewed(self, ledger: Ledger) -> None:
        """A live owner answers each request."""
        live = ledger.state.live
        for request in ledger.state.pending if live is not None and live.phase == "started" else ():
            key = (ledger.prefix, request.number)
            self._unanswered[key] += 1
            if self._unanswered[key] > MOST_RENEWALS:
                fail("answered", f"request {request.number} ({request.body.type}) is not answered")

    def _of_claim(self, claim: str, effect: Effect) -> None:
        """One claim per node: what is written under a claim is written by one machine."""
        if effect.data is None:
            return
        writer = self._writers.setdefault(claim, effect.machine.name)
        if writer != effect.machine.name:
            fail("one-claim", f"{effect.name} is written by {effect.machine.name}, {claim} is of {writer}")
        self._reported_at[effect.machine.name] = self.world.now

    # Events

    def _event(self, ledger: Ledger, effect: Effect) -> None:
        if effect.kind != "create" or effect.data is None:
            fail("events", f"{effect.name}: an event was overwritten or deleted ({effect.kind})")
        event = self._dated(effect.name, effect.data or b"")
        if event.number != ledger.state.number + 1:
            fail("events", f"event {event.number} follows {ledger.state.number}")
        self._check_event(ledger, event)
        writer = self.world.current.kind if self.world.current else "world"
        self.world.counts[pair_of(event, ledger.state, writer)] += 1
        self.world.note(f"event {event.number} {event.type}{_brief(event)}")
        ledger.state = fold([event], ledger.state)
        self._note_event(ledger, event)

    def _dated(self, name: str, text: bytes) -> Event:
        event = Event.from_json(text, where=name)
        at = self.store.objects[name].at
        return replace(event, at=at) if at + STEP_S < event.at else event

    def _check_event(self, ledger: Ledger, event: Event) -> None:
        state, body = ledger.state, event.body
        if isinstance(body, bodies.AttemptIntended):
            self._check_intent(ledger, event, body)
        acts = isinstance(body, bodies.OfAttempt | bodies.Succeeded | bodies.Failed | bodies.Stopped)
        if acts and (event.actor is None or not event.actor.is_try_of(state.owner)):
            fail("one-owner", f"event {event.number} {event.type} is of {event.actor}, not of the owner")
        if isinstance(body, bodies.Succeeded):
            self._check_success(ledger, body)
        if isinstance(body, bodies.NewGeneration):
            self._check_generation(state, event, body)
        if isinstance(body, bodies.NewGeneration | bodies.NewOwner):
            self._check_clear(state, event)
        if isinstance(body, bodies.Succeeded | bodies.Failed | bodies.Stopped):
            for move in (one for one in state.pending if isinstance(one.body, bodies.MoveRequested)):
                fail("answered", f"the run ends by event {event.number}, request {move.number} has no answer")

    def _check_clear(self, state: RunState, event: Event) -> None:
        """What is taken for a clear is one, and the reverse: an automatic retry takes nothing up again."""
        if self.was_cleared is None or state.owner is None or event.actor is None:
            return
        is_true = self.was_cleared(state.owner.ti_id, event.actor.ti_id)
        is_taken = fold([event], state).cleared_number == event.number
        if is_true and None in (state.owner.life, event.actor.life):
            return  # one whose life cannot be read counts as a retry if its try number is higher: DESIGN
        if is_taken != is_true:
            words = "a retry is taken for a clear" if is_taken else "a clear is taken for a retry"
            fail(
                "clears", f"event {event.number} {event.type} of {event.actor}, after {state.owner}: {words}"
            )

    def _check_intent(self, ledger: Ledger, event: Event, body: bodies.AttemptIntended) -> None:
        if ledger.state.live is not None:
            fail("one-attempt", f"attempt {body.attempt} is intended while {ledger.state.live.key} lives")
        if ledger.stop > ledger.clear:
            fail(
                "cancel-is-final",
                f"attempt {body.attempt} is intended by event {event.number} after the stop of event "
                f"{ledger.stop}; the last clear is event {ledger.clear}",
            )

    def _check_generation(self, state: RunState, event: Event, body: bodies.NewGeneration) -> None:
        """A result that was not accepted is delivered again, and not trained again."""
        lives = [None if one is None else one.life for one in (state.owner, event.actor)]
        is_same = None not in lives and lives[0] == lives[1]
        if state.status == "succeeded" and is_same and not state.accepted and "fresh" not in body.reason:
            fail("accepted", f"generation {body.generation} begins, though no result was accepted")

    def _check_success(self, ledger: Ledger, body: bodies.Succeeded) -> None:
        last = ledger.state.attempts[-1] if ledger.state.attempts else None
        for name, uri in body.outputs.items():
            found = _OUTPUT.search(uri + "/")
            key = (int(found[1]), int(found[2])) if found else None
            if last is None or key != last.key:
                fail("one-attempt", f"output {name} is {uri}, the last attempt is {last and last.key}")
            if not any(one.startswith(uri.partition("simulated/")[2] + "/") for one in self.store.objects):
                fail("results-stored", f"output {name}: nothing is at {uri}")

    def _note_event(self, ledger: Ledger, event: Event) -> None:
        body, now, state = event.body, self.world.now, ledger.state
        if isinstance(body, bodies.StopRequested):
            ledger.stop = event.number
        elif isinstance(body, bodies.NewGeneration | bodies.NewOwner):
            if state.cleared_number == event.number:
                ledger.clear = event.number
                ledger.over_at = None
        elif isinstance(body, bodies.AttemptStarted):
            ledger.started[body.generation, body.attempt] = now
            self._check_candidates(ledger, (body.generation, body.attempt))
        elif isinstance(body, bodies.AttemptEnded):
            ledger.ended[body.generation, body.attempt] = now
            newest = self._newest(ledger, body.generation)
            if newest is not None:
                ledger.newest_at_end[body.generation, body.attempt] = newest
        elif isinstance(body, bodies.Succeeded | bodies.Failed | bodies.Stopped):
            ledger.over_at = now

    # Checkpoints

    def _control(self, ledger: Ledger, key: tuple[int, int], effect: Effect) -> None:
        if effect.data is None:
            return
        try:
            control = Control.from_json(effect.data, where=effect.name)
        except ProtocolError as err:
            fail("control", f"{effect.name} cannot be read: {err}")
            return
        if control.candidates is not None:
            ledger.candidates[key] = control.candidates
        ledger.fenced.setdefault(key, self.world.now)

    def _manifest(self, ledger: Ledger, name: str, claim: int, effect: Effect) -> None:
        prefix = effect.name.rpartition("/")[0]
        if effect.data is not None:
            writer = self._writers.setdefault(f"{effect.name}", effect.machine.name)
            if writer != effect.machine.name:
                fail("one-claim", f"{effect.name} is written by {effect.machine.name} and by {writer}")
            ledger.manifests.setdefault(name, self.world.now)
            ledger.present.add(name)
            return
        if any(_MANIFEST.match(one) for one in self.store.below(prefix)):
            return  # that of another claim is there
        ledger.present.discard(name)
        node = self.cloud.by_machine.get(effect.machine.name)
        self._check_deletion(ledger, name, node)

    def _check_deletion(self, ledger: Ledger, name: str, node: Node | None) -> None:
        key, actor = parse_checkpoint_name(name), self.world.current
        if actor is not None and actor.name in self._fenced:
            fail("fence", f"{actor.name} deleted {name} after it had read the control of a later attempt")
        if key is None or node is None:
            fail("kept", f"{name} was deleted by no sidecar")
            return
        mine = (node.attempt.request.generation, node.attempt.request.attempt)
        for other, promised in ledger.candidates.items():
            if name in promised and other > mine and other not in ledger.ended:
                fail("kept", f"{name}, which attempt {other} was promised, was deleted by {node.name}")
        newest = max(
            (found for one in (*ledger.present, name) if (found := _order(one)) and found[0] == key[0]),
            default=None,
        )
        if newest == _order(name) and mine[0] == key[0]:
            fail("kept", f"{name}, the newest checkpoint, was deleted by {node.name}")

    def _check_candidates(self, ledger: Ledger, key: tuple[int, int]) -> None:
        """The newest checkpoint at the time of the fence is one that the attempt may start from."""
        fenced, promised = ledger.fenced.get(key), ledger.candidates.get(key)
        if fenced is None or promised is None:
            fail("candidates", f"attempt {key} is started without candidates")
            return
        there = [
            name
            for name in ledger.present
            if self._counts(ledger, name, key) and ledger.manifests[name] < fenced
        ]
        newest = max(there, key=lambda one: _order(one) or (), default=None)
        if newest is not None and newest not in promised:
            fail("candidates", f"attempt {key} may not start from {newest}, the newest; from {promised[:3]}")

    def _counts(self, ledger: Ledger, name: str, key: tuple[int, int]) -> bool:
        """True for a checkpoint of an earlier attempt of *key*, published while that was the newest."""
        generation, _, attempt = parse_checkpoint_name(name) or (0, 0, 0)
        later = (at for one, at in ledger.started.items() if (generation, attempt) < one < key)
        return generation == key[0] and attempt < key[1] and ledger.manifests[name] < min(later, default=1e99)

    def _newest(self, ledger: Ledger, generation: int) -> str | None:
        found = [one for one in ledger.present if (parse_checkpoint_name(one) or (0,))[0] == generation]
        return max(found, key=lambda one: _order(one) or (), default=None)

    # Reads

    def _read(self, client: SimClient, name: str, data: bytes | None) -> None:
        """Remember when a sidecar learns that its training has to end."""
        if data is None or "/control/" not in name:
            return
        node = self.cloud.by_machine.get(client.machine.name)
        if node is None:
            return
        mine = (node.attempt.request.generation, node.attempt.request.attempt)
        found = _CONTROL.match(name)
        if not found or (int(found[2]), int(found[3])) <= mine:
            return
        if self.world.current is not None:
            self._fenced.add(self.world.current.name)
        if Control.from_json(data, where=name).action != "hold":
            self._told_at.setdefault(client.machine.name, self.world.now)

    # At the end

    def finish(self) -> None:
        """Check what can be checked once nothing happens any more."""
        for ledger in self.ledgers.values():
            self._check_fold(ledger)
            self._check_restores(ledger)
            self._check_overlaps(ledger)
            self._check_machines(ledger)
            self._check_money(ledger)
            self._check_released(ledger)
            self._check_budget(ledger)
            self._check_blame(ledger)
        for attempt in self.cloud.attempts.values():
            if not attempt.is_over:
                fail("nothing-left", f"{attempt.name} still runs, and reap does not find it")

    def _check_blame(self, ledger: Ledger) -> None:
        """No loss of a machine, of an answer or of the store fails a run as an error of the stage.

        A machine of the first attempt that never reaches the store is one: its URL may be wrong.
        """
        row, last = outcome_of(ledger.state.failure), ledger.state.current
        if row.name == "setup-failed" and last is not None and last.key == (1, 1):
            return
        if row.name == "deadline-exceeded" and self._is_spent(ledger):
            return  # the machines end themselves when their part of the budget is spent
        is_blamed = ledger.state.status == "failed" and row.kind == "end" and row.caused_by == "user"
        if is_blamed and not any(fault.startswith(OF_THE_STAGE) for fault in self.world.struck):
            words = f"the run failed as {row.name}, and nothing of the stage did"
            fail("blame", f"{words}: {ledger.state.reason}")

    def _check_fold(self, ledger: Ledger) -> None:
        reader = Run(self.store.client("reader", Machine("reader")), ledger.prefix)
        found = reader.events.load()
        if found.to_dict() != ledger.state.to_dict():
            fail("fold", f"two readers of {ledger.prefix} disagree after event {found.number}")

    def _nodes(self, ledger: Ledger) -> Iterator[Node]:
        return (node for node in self.cloud.nodes if node.attempt.request.run_prefix == ledger.prefix)

    def _check_restores(self, ledger: Ledger) -> None:
        """What an older attempt saves after a newer one began is void."""
        for node in self._nodes(ledger):
            mine = (node.attempt.request.generation, node.attempt.request.attempt)
            for at, *_, name in getattr(node.life, "restores", ()):
                key = parse_checkpoint_name(name)
                if key is None or key[0] != mine[0]:
                    fail("void", f"{node.name} restored {name} of another generation")
                    continue
                saved = ledger.manifests.get(name)
                started = ledger.started.get(mine, at)
                if key[2] != mine[1] and (saved is None or saved > started):
                    fail("void", f"{node.name} restored {name}, which was published after it began")
            self._check_progress(ledger, node, mine)

    def _check_progress(self, ledger: Ledger, node: Node, mine: tuple[int, int]) -> None:
        """After a clean end no step that a valid manifest covers is trained again."""
        generation, number = mine
        before = next(
            (
                one
                for one in reversed(ledger.state.attempts_of(generation))
                if one.number < number and one.outcome != "not-started"
            ),
            None,
        )
        trained = getattr(node.life, "trained", ())
        if before is None or not trained or node.node != 0 or node.number != 1:
            return
        covered = ledger.newest_at_end.get(before.key)
        step = (parse_checkpoint_name(covered or "") or (0, 0))[1]
        is_clean = before.outcome in ("drained", "moved", "stopped")
        if is_clean and covered is not None and covered not in self.store.torn and trained[0][-1] < step:
            fail(
                "trained-again",
                f"attempt {number} began at step {trained[0][-1]}, {covered} was complete when attempt "
                f"{before.number} ended ({before.outcome})",
            )

    def _check_overlaps(self, ledger: Ledger) -> None:
        spans = [
            (node, start, end if end is not None else self.world.now)
            for node in self._nodes(ledger)
            for start, end in getattr(node.life, "spans", ())
        ]
        for one, other in combinations(sorted(spans, key=lambda item: item[1]), 2):
            older, newer = sorted((one, other), key=lambda item: _age(item[0]))
            mine, theirs = _key(older[0]), _key(newer[0])
            if mine == theirs and (older[0].node != newer[0].node or older[0] is newer[0]):
                continue
            if older[2] > newer[1] and newer[2] > older[1]:
                self._check_overlap(ledger, older, newer)

    def _check_overlap(
        self, ledger: Ledger, older: tuple[Node, float, float], newer: tuple[Node, float, float]
    ) -> None:
        node, _, until = older
        self.world.counts["overlaps"] += 1
        given_up = node.given_up_at if _key(node) == _key(newer[0]) else ledger.ended.get(_key(node))
        words = f"{node.name} trained beside {newer[0].name} for {until - newer[1]:.0f} s"
        if given_up is None:
            fail("overlap", f"{words}; nothing gave it up")
            return
        if not node.was_silent(given_up) and not self.cloud.was_away(given_up):
            fail("overlap", f"{words}; the cloud reached it when it was given up")
        told = self._told_at.get(node.machine.name)
        if told is not None and until > told + node.attempt.request.grace_s + LATEST_S + self._pause_s:
            fail("overlap", f"{words}, {until - told:.0f} s after its sidecar knew that a newer one runs")

    @property
    def _pause_s(self) -> float:
        """Longest time that a process of a machine may stand still."""
        return PAUSE_S[1] if "pause-sidecar" in self.world.rates else 0.0

    def _check_machines(self, ledger: Ledger) -> None:
        if ledger.over_at is None:
            return
        most_s = YOUNG_S + self._reap_every_s + 2 * 3600.0
        for node in self._nodes(ledger):
            end = self.world.now if node.ended_at is None else node.ended_at
            if end > max(ledger.over_at, self.world.faults_ended_at or 0.0) + most_s:
                fail("machines-end", f"{node.name} ran {end - ledger.over_at:.0f} s longer than its run")

    # Money

    def _true_usd(self, nodes: list[Node], *, until: Mapping[tuple[int, int], float] | None = None) -> float:
        """What the machines cost; of silent ones only what they cost *until* their attempts ended."""
        total = 0.0
        for node in nodes:
            billing = tariffs().get(node.offer.cloud, UNKNOWN_TARIFF).billing
            held = node.held_s(self.world.now)
            ended = (until or {}).get(_key(node))
            if ended is not None and node.began_at is not None and node.was_silent(ended):
                held = min(held, max(0.0, ended - node.began_at))
            if held:
                seconds = held if billing is None else billing.billed_s(held)
                total += seconds / 3600.0 * (node.offer.usd_per_hour or 0.0)
        return total

    def _granule_usd(self, node: Node) -> float:
        """What whole seconds may change: two of them, or the least charge of a machine that ran for less."""
        billing = tariffs().get(node.offer.cloud, UNKNOWN_TARIFF).billing
        is_short = billing is not None and node.held_s(self.world.now) < 2.0
        seconds = billing.minimum_s if is_short and billing is not None else 2.0
        return max(2.0, seconds) * (node.offer.usd_per_hour or 0.0) / 3600.0

    def _by_attempt(self, ledger: Ledger) -> dict[tuple[int, int], list[Node]]:
        found: dict[tuple[int, int], list[Node]] = defaultdict(list)
        for node in self._nodes(ledger):
            found[_key(node)].append(node)
        return found

    def _has_billed_time(self, node: Node) -> bool:
        """True if the cloud's bill, in whole seconds, shows any."""
        interval = self.cloud.interval(node)
        return interval is not None and (interval.end is None or interval.end > interval.start)

    def _is_spent(self, ledger: Ledger) -> bool:
        """True if no further attempt is worth its start."""
        budget = ledger.state.begun.budget_usd
        spent = self._true_usd(list(self._nodes(ledger)))
        return budget is not None and spent >= (1.0 - WORTH_A_START) * budget

    def _check_money(self, ledger: Ledger) -> None:
        by_attempt = self._by_attempt(ledger)
        for attempt in ledger.state.attempts:
            nodes = by_attempt.get(attempt.key, [])
            true, told = self._true_usd(nodes), attempt.end.usd
            if attempt.is_live or attempt.handle is None:  # one that was not known to start is reaped
                continue
            if told is None and (attempt.unreleased or not any(map(self._has_billed_time, nodes))):
                continue  # no answer in time, or a bill as of deleted machines: the report says unknown
            if told is None:
                fail("money", f"attempt {attempt.key} ({attempt.outcome}) has no bill, it cost ${true:.4f}")
                continue
            granule = sum(self._granule_usd(node) for node in nodes) + 1e-6
            is_least = attempt.end.usage_is_lower_bound or attempt.unreleased
            if told > true + granule or (told < true - granule and not is_least):
                fail(
                    "money",
                    f"attempt {attempt.key} ({attempt.outcome}) is reported with ${told:.4f}, its machines "
                    f"cost ${true:.4f}",
                )

    def _check_released(self, ledger: Ledger) -> None:
        """Each execution repeats a release that failed."""
        over, by_attempt = ledger.over_at, self._by_attempt(ledger)
        if over is None or any(start < over and end > over - 1200.0 for start, end in self.cloud.away):
            return
        for attempt in ledger.state.attempts if ledger.state.number else ():
            had_tries = ledger.ended.get(attempt.key, over) < over - 3600.0
            nodes = by_attempt.get(attempt.key, [])
            is_gone = all(one.is_over and (one.ended_at or 0.0) < over - 3600.0 for one in nodes)
            if attempt.unreleased and attempt.released_at is None and is_gone and had_tries:
                fail("released", f"attempt {attempt.key} was never released: {attempt.unreleased}")

    def _check_budget(self, ledger: Ledger) -> None:
        budget = ledger.state.begun.budget_usd
        if budget is None:
            return
        by_attempt = self._by_attempt(ledger)
        attempts = ledger.state.attempts_of(ledger.state.generation)
        known = (attempt for attempt in attempts if attempt.handle is not None)
        nodes = [node for attempt in known for node in by_attempt.get(attempt.key, [])]
        # A machine that nobody can reach costs on after it was declared lost: its own deadline ends it.
        spent = self._true_usd(nodes, until=ledger.ended)
        least = max((_minimum_usd(attempt) for attempt in attempts), default=0.0)
        for node in nodes:
            self.world.note(f"{node.name} cost ${self._true_usd([node]):.4f}", who="bill")
        if spent > budget + max(0.02 * budget, least):
            fail("budget", f"${spent:.4f} were spent of ${budget:.4f}")


def _brief(event: Event) -> str:
    """What an event says, for the timeline."""
    names = ("generation", "attempt", "outcome", "usd", "stop_reason", "request", "reason", "detail")
    found = ((name, getattr(event.body, name, None)) for name in names)
    return "".join(f" {name}={value!s:.90}" for name, value in found if value not in (None, ""))


def _minimum_usd(attempt: AttemptState) -> float:
    billing = tariffs().get(attempt.allocation.offer.cloud, UNKNOWN_TARIFF).billing
    least_s = 0.0 if billing is None else max(billing.minimum_s, billing.unit_s)
    return (attempt.allocation.usd_per_hour or 0.0) * least_s / 3600.0


def _order(name: str) -> tuple[int, int, int] | None:
    key = parse_checkpoint_name(name)
    return None if key is None else (key[0], key[2], key[1])


def _key(node: Node) -> tuple[int, int]:
    return node.attempt.request.generation, node.attempt.request.attempt


def _age(node: Node) -> tuple[int, int, int]:
    return (*_key(node), node.number)
