"""An intent becomes a start, or is given up: it never stays open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from envscaler_airflow.backends.base import AttemptRequest, Handle
from envscaler_airflow.controller import choose, deadline_table, facts, fence, foretold, freeze, limits
from envscaler_airflow.controller.observe import START_S
from envscaler_airflow.controller.owner import live_of
from envscaler_airflow.controller.release import Releasing
from envscaler_airflow.errors import (
    BackendError,
    BudgetError,
    CapacityError,
    EnvScalerError,
    NoOfferError,
    SpecError,
    StoreError,
)
from envscaler_airflow.lifecycle import Action, AttemptState, RunState
from envscaler_airflow.planning import Offer
from envscaler_airflow.protocol import Control
from envscaler_airflow.store.base import for_run
from envscaler_airflow.store.lease import renew_lease
from envscaler_airflow.store.stockouts import remember

_UNCHOSEN: dict[type[EnvScalerError], str] = {
    SpecError: "spec",
    NoOfferError: "no-offer",
    BudgetError: "budget",
}
_NOT_STARTED: dict[type[EnvScalerError], str] = {CapacityError: "capacity", SpecError: "spec"}
"""Class of the failure; ``backend`` for all others, after which another offer may do."""


def failed_body(state: RunState, err: SpecError | NoOfferError | BudgetError) -> dict[str, Any]:
    """Body of the ``failed`` event of a run for which no attempt can be chosen."""
    return {"generation": state.generation, "reason": str(err), "failure": _UNCHOSEN[type(err)]}


class Intending(Releasing):
    """An owner that carries intents out."""

    def carry_out(self, state: RunState, action: Action) -> RunState:
        """Start the intended attempt, adopt it, or record why it cannot start."""
        del action
        live = live_of(state)
        self._check_still_owner(state)
        renew_lease(self._store, self._prefix, holder=self._actor.ti_id)
        self._promise(state, live)
        try:
            self._build_tables(state, live)
            request = self._request(state, live)
            now = self._check_still_owner(state)
            if now.number != state.number:
                return now  # what came meanwhile is answered before a machine is paid for
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
        """End an attempt that was asked to go before its start; what was started after all goes first."""
        live = live_of(state)
        self._check_still_owner(state)
        found = self._found(state, live)
        if found is not None:
            return self._started(state, live, found)
        body = {"outcome": "stopped", "detail": action.reason, "usage": [], "usd": 0.0}
        return self._append(state, "attempt-ended", _key(live) | body)

    def _started(self, state: RunState, live: AttemptState, handle: Handle) -> RunState:
        return self._append(state, "attempt-started", _key(live) | {"handle": handle.to_dict()})

    def _found(self, state: RunState, live: AttemptState) -> Handle | None:
        """What an earlier execution started of the attempt, without recording it."""
        name = live.spec_hash or state.spec_hash
        return self._backend.find(freeze.named_request(self._store, self._key, live, spec_hash=name))

    def _request(self, state: RunState, live: AttemptState) -> AttemptRequest:
        spec_hash = live.spec_hash or state.spec_hash
        request = freeze.attempt_request(
            self._store,
            self._key,
            self._stage,
            self._thaw(spec_hash),
            live,
            spec_hash=spec_hash,
            grace_s=limits.grace_s(state),
            deadline_s=self._machine_deadline_s(state, live),
        )
        return replace(request, restore_from=state.begun.get("restore_from"))

    def _build_tables(self, state: RunState, live: AttemptState) -> None:
        """What the sensor's policy looks up, built here: nothing decides for long in a triggerer."""
        scaling, deadline_s = self._spec(state).scaling, self._stage.deadline_s
        if scaling is not None and scaling.policy == "phase":
            foretold.publish(self._store, self._key)
        if scaling is None or scaling.policy != "deadline" or deadline_s is None:
            return
        left_s = deadline_s - (0.0 if state.begun_at is None else self._clock() - state.begun_at)
        start_s = facts.start_s(state)
        job = deadline_table.job_of(
            live.allocation,
            self._backend.offers(),
            deadline_s=left_s,
            start_s=START_S if start_s is None else start_s,
        )
        if job is not None:
            deadline_table.publish(self._store, self._prefix, job)

    def _machine_deadline_s(self, state: RunState, live: AttemptState) -> float:
        deadline_s = self._stage.deadline_s
        since = 0.0 if state.begun_at is None else self._clock() - state.begun_at
        return limits.machine_deadline_s(
            usd_left=self._usd_left(state, live),
            usd_per_hour=live.allocation.usd_per_hour,
            deadline_left_s=None if deadline_s is None else deadline_s - since,
            deadline_s=deadline_s,
        )

    def _promise(self, state: RunState, live: AttemptState) -> None:
        """Fence first, then list what the attempt may resume from; a later execution lists again."""
        control = Control(
            action="run",
            restore_from=state.begun.get("restore_from"),
            orphan_after_s=self._spec(state).failure.orphan_after_s,
            grace_s=limits.grace_s(state),
            checkpoint_every_s=live.checkpoint_every_s,
        )
        store = for_run(self._store, self._prefix)
        fence.hold(store, control, generation=live.generation, attempt=live.number)
        found = fence.list_candidates(store, generation=live.generation, attempt=live.number)
        self._check_still_owner(state)
        fence.promise(store, control, found, generation=live.generation, attempt=live.number)

    def _not_started(self, state: RunState, live: AttemptState, err: EnvScalerError) -> RunState:
        if isinstance(err, CapacityError):  # for other runs on this store; says nothing of a full machine
            self._remember(choose.refused_by(live, ()), str(err))
        body: dict[str, Any] = {"outcome": "not-started", "failure": _NOT_STARTED.get(type(err), "backend")}
        body |= {"detail": str(err), "usage": [], "usd": 0.0}
        return self._append(state, "attempt-ended", _key(live) | body)

    def _remember(self, offers: Iterable[Offer], said: str) -> None:
        for offer in offers:
            remember(self._store, offer, "", said, now=self._clock())


def _key(live: AttemptState) -> dict[str, Any]:
    return {"generation": live.generation, "attempt": live.number}
