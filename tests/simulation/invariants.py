"""What must always hold, checked at each effect on the store, and at the end of a world.

Nothing here decides by the project's own rules: each invariant is worked out again from the truth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

from envscaler_agent.errors import ProtocolError
from envscaler_agent.protocol import Control, parse_checkpoint_name
from envscaler_airflow.owner.reap import YOUNG_S
from envscaler_airflow.run import Event, RunState, fold, outcome_of
from envscaler_airflow.run import event_bodies as bodies
from envscaler_airflow.store.checkpoints import NEVER_DELETED
from envscaler_airflow.store.clock import STEP_S
from envscaler_airflow.store.run import Run
from tests.simulation.cloud import Node, SimCloud
from tests.simulation.coverage import pair_of
from tests.simulation.freeze import MOST_S
from tests.simulation.kernel import PAUSE_S, Machine, Violation, World
from tests.simulation.ledger import Ledger, age_of, fail, key_of, nodes_of, order_of
from tests.simulation.money import Money
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


class Invariants:
    """Watches a world; raises :class:`Violation` in the actor whose effect breaks one.

    Attributes:
        was_cleared: Under Airflow: whether a person cleared the task between two ids of it.
    """

    was_cleared: Callable[[str, str], bool] | None = None

    def __init__(self, world: World, store: SimStore, cloud: SimCloud, *, reap_every_s: float) -> None:
        """Watch from now on; orphans are reaped every *reap_every_s* seconds."""
        self.world, self.store, self.cloud = world, store, cloud
        self.money = Money(world, cloud)
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
        writer = effect.who.kind if effect.who else "world"
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
        if isinstance(body, bodies.AttemptStopping) and body.stop_reason == "budget":
            self.money.check_stop(ledger)
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
        if is_true and state.accepted and isinstance(event.body, bodies.NewOwner):
            fail(
                "accepted",
                f"event {event.number} of {event.actor} delivers again what was accepted and cleared",
            )
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
        if not isinstance(body, bodies.MoveRequested | bodies.StopRequested):
            is_end = isinstance(body, bodies.AttemptEnded)
            ledger.last_end = (body.generation, body.attempt) if is_end else None
        ledger.note_release(event)
        if isinstance(body, bodies.StopRequested):
            ledger.stop = event.number
        elif isinstance(body, bodies.NewGeneration | bodies.NewOwner):
            if state.cleared_number == event.number:
                ledger.clear = event.number
                ledger.over_at = None
        elif isinstance(body, bodies.AttemptIntended):
            ledger.intended[body.generation, body.attempt] = now
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
            self._note_overtaken(ledger, name, claim)
            ledger.manifests.setdefault(name, self.world.now)
            ledger.present.add(name)
            return
        if any(_MANIFEST.match(one) for one in self.store.below(prefix)):
            return  # that of another claim is there
        ledger.present.discard(name)
        node = self.cloud.by_machine.get(effect.machine.name)
        self._check_deletion(ledger, name, node)

    def _note_overtaken(self, ledger: Ledger, name: str, claim: int) -> None:
        """Note a manifest that may be void: another pod or a later attempt had taken over."""
        generation, _, attempt = parse_checkpoint_name(name) or (0, 0, 0)
        is_replaced = claim < ledger.claims.get((generation, attempt, 0), 0)
        if is_replaced or any((generation, attempt) < one and one[0] == generation for one in ledger.fenced):
            if name not in ledger.present:
                ledger.overtaken.add(name)
        else:
            ledger.overtaken.discard(name)

    def _check_deletion(self, ledger: Ledger, name: str, node: Node | None) -> None:
        key, actor = parse_checkpoint_name(name), self.world.current
        if actor is not None and actor.name in self._fenced:
            fail("fence", f"{actor.name} deleted {name} after it had read the control of a later attempt")
        if key is None or node is None:
            fail("kept", f"{name} was deleted by no sidecar")
            return
        mine = (node.attempt.request.generation, node.attempt.request.attempt)
        for other, promised in ledger.candidates.items():
            there = [one for one in promised if one == name or one in ledger.present]
            if name in there[:NEVER_DELETED] and other > mine and other not in ledger.ended:
                fail("kept", f"{name}, which attempt {other} was promised, was deleted by {node.name}")
        newest = max(
            (
                found
                for one in {*ledger.present, name} - ledger.overtaken
                if (found := order_of(one)) and found[0] == key[0]
            ),
            default=None,
        )
        if newest == order_of(name) and mine[0] == key[0]:
            fail("kept", f"{name}, the newest checkpoint, was deleted by {node.name}")

    def _check_candidates(self, ledger: Ledger, key: tuple[int, int]) -> None:
        """The newest checkpoint at the time of the fence is one that the attempt may start from."""
        fenced, promised = ledger.fenced.get(key), ledger.candidates.get(key)
        if fenced is None or promised is None:
            fail("candidates", f"attempt {key} is started without candidates")
            return
        there = [
            name
            for name in ledger.present - ledger.overtaken
            if (order := order_of(name))
            and order[0] == key[0]
            and order[1] < key[1]
            and ledger.manifests[name] < fenced
        ]
        newest = max(there, key=lambda one: order_of(one) or (), default=None)
        if newest is not None and newest not in promised:
            fail("candidates", f"attempt {key} may not start from {newest}, the newest; from {promised[:3]}")

    def _newest(self, ledger: Ledger, generation: int) -> str | None:
        there = ledger.present - ledger.overtaken
        found = [one for one in there if (parse_checkpoint_name(one) or (0,))[0] == generation]
        return max(found, key=lambda one: order_of(one) or (), default=None)

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
            self.money.check(ledger)
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
        if row.name == "deadline-exceeded" and (self.money.is_spent(ledger) or _is_far_too_late(ledger)):
            return  # machines end themselves when their part of the budget is spent, or far past the deadline
        is_blamed = ledger.state.status == "failed" and row.kind == "end" and row.caused_by == "user"
        if is_blamed and not any(fault.startswith(OF_THE_STAGE) for fault in self.world.struck):
            words = f"the run failed as {row.name}, and nothing of the stage did"
            fail("blame", f"{words}: {ledger.state.reason}")

    def _check_fold(self, ledger: Ledger) -> None:
        reader = Run(self.store.client("reader", Machine("reader")), ledger.prefix)
        found = reader.events.load()
        if found.to_dict() != ledger.state.to_dict():
            fail("fold", f"two readers of {ledger.prefix} disagree after event {found.number}")

    def _check_restores(self, ledger: Ledger) -> None:
        """What an older attempt saves after a newer one began is void."""
        for node in nodes_of(self.cloud, ledger):
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
            for node in nodes_of(self.cloud, ledger)
            for start, end in getattr(node.life, "spans", ())
        ]
        for one, other in combinations(sorted(spans, key=lambda item: item[1]), 2):
            older, newer = sorted((one, other), key=lambda item: age_of(item[0]))
            mine, theirs = key_of(older[0]), key_of(newer[0])
            if mine == theirs and (older[0].node != newer[0].node or older[0] is newer[0]):
                continue
            if older[2] > newer[1] and newer[2] > older[1]:
                self._check_overlap(ledger, older, newer)

    def _check_overlap(
        self, ledger: Ledger, older: tuple[Node, float, float], newer: tuple[Node, float, float]
    ) -> None:
        node, _, until = older
        self.world.counts["overlaps"] += 1
        given_up = node.given_up_at if key_of(node) == key_of(newer[0]) else ledger.ended.get(key_of(node))
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
        frozen_s = MOST_S if self.world.rates.keys() & {"freeze", "freeze-save"} else 0.0
        return max(frozen_s, PAUSE_S[1] if "pause-sidecar" in self.world.rates else 0.0)

    def _check_machines(self, ledger: Ledger) -> None:
        if ledger.over_at is None:
            return
        most_s = YOUNG_S + self._reap_every_s + 2 * 3600.0
        for node in nodes_of(self.cloud, ledger):
            end = self.world.now if node.ended_at is None else node.ended_at
            if end > max(ledger.over_at, self.world.faults_ended_at or 0.0) + most_s:
                fail("machines-end", f"{node.name} ran {end - ledger.over_at:.0f} s longer than its run")


def _is_far_too_late(ledger: Ledger) -> bool:
    """True if the last attempt ended after twice the stage's deadline."""
    state, last = ledger.state, ledger.state.current
    if state.begun.deadline_s is None or state.begun_at is None or last is None or last.ended_at is None:
        return False
    return last.ended_at - state.begun_at > 2 * state.begun.deadline_s


def _brief(event: Event) -> str:
    """What an event says, for the timeline."""
    names = ("generation", "attempt", "outcome", "usd", "stop_reason", "request", "reason", "detail")
    found = ((name, getattr(event.body, name, None)) for name in names)
    return "".join(f" {name}={value!s:.90}" for name, value in found if value not in (None, ""))
