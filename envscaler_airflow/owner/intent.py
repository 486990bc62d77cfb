"""Turn an intent into a start, or cancel it: an intent never stays open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from envscaler_agent.protocol import Control, control_name, parse_checkpoint_name
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.errors import (
    BackendError,
    BudgetError,
    CapacityError,
    EnvScalerError,
    NoOfferError,
    SpecError,
    StoreError,
)
from envscaler_airflow.owner import choose, facts, freeze, limits, policies
from envscaler_airflow.owner.observe import START_S
from envscaler_airflow.owner.ownership import live_of
from envscaler_airflow.owner.release import Releasing
from envscaler_airflow.planning import Offer
from envscaler_airflow.run import Action, AttemptState, Handle, RunState
from envscaler_airflow.run.event_bodies import AttemptEnded, AttemptStarted, Failed
from envscaler_airflow.scaling import StartFacts, all_policies, policy_of
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.checkpoints import complete_checkpoints, read_control
from envscaler_airflow.store.stockouts import remember

MAX_CANDIDATES = 16
"""Checkpoints that a start may fall back to. Chosen: five times what is kept by default."""
_BEFORE_THE_START = ("hold", "run")


def hold(store: Store, control: Control, *, generation: int, attempt: int) -> None:
    """Stop every older attempt from publishing or deleting anything, from its next read of the control on.

    Written only if there is no control yet: an earlier stop or promise takes precedence.

    Raises:
        StoreError: The store does not answer.
    """
    held = replace(control, action="hold", candidates=None)
    store.create(control_name(generation, attempt), held.to_json())


def list_candidates(store: Store, *, generation: int, attempt: int) -> tuple[str, ...]:
    """Checkpoints that *attempt* may resume from, best first.

    These are the checkpoints of the attempt before, then those that it was itself allowed. What an older
    attempt saved after a newer one began is in neither, so it is void. An attempt without a list adds none.

    Raises:
        StoreError: The store does not answer.
    """
    complete = complete_checkpoints(store, generation)
    found: list[str] = []
    for number in range(attempt - 1, 0, -1):
        found += [name for name in complete if (key := parse_checkpoint_name(name)) and key[2] == number]
        control = read_control(store, control_name(generation, number))
        if control is not None and control.candidates is not None:
            found += control.candidates
            break
    return tuple(dict.fromkeys(found))[:MAX_CANDIDATES]


def promise(
    store: Store, control: Control, candidates: tuple[str, ...], *, generation: int, attempt: int
) -> None:
    """Write *candidates* to the attempt's control; the attempt runs from now on unless it was stopped.

    Raises:
        StoreError: The store does not answer.
    """
    name = control_name(generation, attempt)
    found = read_control(store, name)
    base = control if found is None or found.action in _BEFORE_THE_START else found
    store.write(name, replace(base, candidates=candidates).to_json())


_UNCHOSEN: dict[type[EnvScalerError], str] = {
    SpecError: "spec",
    NoOfferError: "no-offer",
    BudgetError: "budget",
}
_NOT_STARTED: dict[type[EnvScalerError], str] = {CapacityError: "capacity", SpecError: "spec"}
"""Class of the failure; ``backend`` for all other errors, after which another offer may work."""


def failed(state: RunState, err: SpecError | NoOfferError | BudgetError) -> Failed:
    """Return the event of a run for which no attempt can be chosen."""
    return Failed(generation=state.generation, reason=str(err), failure=_UNCHOSEN[type(err)])


class Intending(Releasing):
    """An owner that carries out intents."""

    def carry_out(self, state: RunState, action: Action) -> RunState:
        """Start the intended attempt, adopt it, or record why it cannot start."""
        del action
        live = live_of(state)
        self._check_still_owner(state)
        self._run.lease.renew(holder=self._actor.ti_id)
        self._promise(state, live)
        try:
            self._prepare(state, live)
            request = self._request(state, live)
            now = self._check_still_owner(state)
            if now.number != state.number:
                return now  # answer new events before paying for a machine
            handle = self._backend.submit(request)
        except (SpecError, CapacityError, NoOfferError, BackendError) as err:
            if isinstance(err, StoreError) or (isinstance(err, BackendError) and err.transient):
                raise
            found = self._found(state, live)
            if found is None:
                return self._not_started(state, live, err)
            handle = found
        return self._started(state, live, handle)

    def discard(self, state: RunState, action: Action) -> RunState:
        """End an attempt that was stopped before its start; first stop anything that was started for it."""
        live = live_of(state)
        self._check_still_owner(state)
        found = self._found(state, live)
        if found is not None:
            return self._started(state, live, found)
        return self._append(state, _unbilled_end(live, "stopped", action.reason))

    def _started(self, state: RunState, live: AttemptState, handle: Handle) -> RunState:
        started = AttemptStarted(generation=live.generation, attempt=live.number, handle=handle)
        return self._append(state, started)

    def _found(self, state: RunState, live: AttemptState) -> Handle | None:
        """Return what an earlier execution started for the attempt without recording it."""
        name = live.spec_hash or state.spec_hash
        return self._backend.find(freeze.named_request(self._run, live, spec_hash=name))

    def _request(self, state: RunState, live: AttemptState) -> AttemptRequest:
        spec_hash = live.spec_hash or state.spec_hash
        request = freeze.attempt_request(
            self._run,
            self._stage,
            self._run.spec(spec_hash),
            live,
            spec_hash=spec_hash,
            grace_s=limits.grace_s(state),
            deadline_s=self._machine_deadline_s(state, live),
        )
        return replace(request, restore_from=state.begun.restore_from)

    def _prepare(self, state: RunState, live: AttemptState) -> None:
        """Build the table that the sensor's policy looks up: a triggerer must not compute for long."""
        spec = self._spec(state)
        policy = None if spec.scaling is None else all_policies().get(spec.scaling.policy)
        if policy is None:
            return
        start_s = facts.start_s(state)
        known = StartFacts(
            allocation=live.allocation,
            start_s=START_S if start_s is None else start_s,
            deadline_left_s=self._deadline_left_s(state),
            offers=self._backend.offers,
        )
        policies.prepare(self._run, policy, policy_of(spec), known)

    def _deadline_left_s(self, state: RunState) -> float | None:
        deadline_s = self._stage.deadline_s
        since = 0.0 if state.begun_at is None else self._run.now() - state.begun_at
        return None if deadline_s is None else deadline_s - since

    def _machine_deadline_s(self, state: RunState, live: AttemptState) -> float:
        return limits.machine_deadline_s(
            usd_left=self._usd_left(state, live),
            usd_per_hour=live.allocation.usd_per_hour,
            deadline_left_s=self._deadline_left_s(state),
            deadline_s=self._stage.deadline_s,
        )

    def _promise(self, state: RunState, live: AttemptState) -> None:
        """Fence older attempts, then list what this one may resume from; a later execution lists again."""
        control = Control(
            action="run",
            restore_from=state.begun.restore_from,
            orphan_after_s=self._spec(state).failure.orphan_after_s,
            grace_s=limits.grace_s(state),
            checkpoint_every_s=live.checkpoint_every_s,
        )
        hold(self._run, control, generation=live.generation, attempt=live.number)
        found = list_candidates(self._run, generation=live.generation, attempt=live.number)
        self._check_still_owner(state)
        promise(self._run, control, found, generation=live.generation, attempt=live.number)

    def _not_started(self, state: RunState, live: AttemptState, err: EnvScalerError) -> RunState:
        if isinstance(err, CapacityError):  # for other runs on this store; says nothing about a full machine
            self._remember(choose.refused_by(live, ()), str(err))
        failure = _NOT_STARTED.get(type(err), "backend")
        return self._append(state, _unbilled_end(live, "not-started", str(err), failure))

    def _remember(self, offers: Iterable[Offer], said: str) -> None:
        for offer in offers:
            remember(self._run.store, offer, "", said, now=self._run.now())


def _unbilled_end(live: AttemptState, outcome: str, detail: str, failure: str | None = None) -> AttemptEnded:
    """Return the end of an attempt for which no machine was started."""
    return AttemptEnded(
        generation=live.generation,
        attempt=live.number,
        outcome=outcome,
        failure=failure,
        detail=detail,
        usage=(),
        usd=0.0,
    )
