"""What machines truly cost, against what a run reports and what its budget allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from envscaler_airflow.clouds import tariffs
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF
from envscaler_airflow.run import AttemptState
from envscaler_airflow.run.recovery import WORTH_A_START
from tests.simulation.cloud import Node, SimCloud
from tests.simulation.kernel import World
from tests.simulation.ledger import Ledger, fail, key_of, nodes_of

RESERVE_S = 1800.0
"""How long before its budget is spent an attempt may be stopped, seconds. Chosen: a check, a save and an end
take a minute or two."""


class Money:
    """The true bill of a world."""

    def __init__(self, world: World, cloud: SimCloud) -> None:
        """Of the machines of *cloud*."""
        self.world, self.cloud = world, cloud

    def check(self, ledger: Ledger) -> None:
        """Check what can be checked once nothing happens any more."""
        self._check_money(ledger)
        self._check_released(ledger)
        self._check_budget(ledger)

    def check_stop(self, ledger: Ledger) -> None:
        """An attempt is stopped for its budget only when that may be nearly spent."""
        now, state, most = self.world.now, ledger.state, 0.0
        budget, by_attempt = state.begun.budget_usd, self._by_attempt(ledger)
        for attempt in state.attempts_of(state.generation):
            is_open = attempt.is_live or attempt.unreleased
            ended = [one.ended_at or now for one in by_attempt.get(attempt.key, [])]
            until = now if is_open else max(ledger.ended.get(attempt.key, now), *ended, 0.0)
            held = (attempt.allocation, *(before.allocation for before in attempt.earlier))
            price = max(one.usd_per_hour or 0.0 for one in held)
            spare_s = RESERVE_S if attempt.is_live else 0.0
            most += price * (until - ledger.intended[attempt.key] + spare_s) / 3600.0 + _minimum_usd(attempt)
        if budget is not None and most < budget:
            fail(
                "budget", f"the run is stopped for its budget of ${budget:.4f}, at most ${most:.4f} are spent"
            )

    def _true_usd(self, nodes: list[Node], *, until: Mapping[tuple[int, int], float] | None = None) -> float:
        """What the machines cost; of silent ones only what they cost *until* their attempts ended."""
        total = 0.0
        for node in nodes:
            billing = tariffs().get(node.offer.cloud, UNKNOWN_TARIFF).billing
            held = node.held_s(self.world.now)
            ended = (until or {}).get(key_of(node))
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
        for node in nodes_of(self.cloud, ledger):
            found[key_of(node)].append(node)
        return found

    def _has_billed_time(self, node: Node) -> bool:
        """True if the cloud's bill, in whole seconds, shows any."""
        interval = self.cloud.interval(node)
        return interval is not None and (interval.end is None or interval.end > interval.start)

    def is_spent(self, ledger: Ledger) -> bool:
        """True if no further attempt is worth its start."""
        budget = ledger.state.begun.budget_usd
        spent = self._true_usd(list(nodes_of(self.cloud, ledger)))
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
            is_least = is_least or attempt.key == ledger.last_end  # the owner died, and no other came
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
            had_tries = ledger.ended.get(attempt.key, over) < over - 3600.0 and attempt.key in ledger.retried
            nodes = by_attempt.get(attempt.key, [])
            refused = (one.attempt.refused_at for one in nodes)
            had_tries = had_tries and not any(at is not None and at > over - 3600.0 for at in refused)
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
        # A machine that nobody can reach costs on after it was declared lost: its own deadline ends it. One
        # that stands still cannot even end itself.
        spent = self._true_usd([node for node in nodes if not node.frozen_s], until=ledger.ended)
        least = max((_minimum_usd(attempt) for attempt in attempts), default=0.0)
        for node in nodes:
            self.world.note(f"{node.name} cost ${self._true_usd([node]):.4f}", who="bill")
        if spent > budget + max(0.02 * budget, least):
            fail("budget", f"${spent:.4f} were spent of ${budget:.4f}")


def _minimum_usd(attempt: AttemptState) -> float:
    billing = tariffs().get(attempt.allocation.offer.cloud, UNKNOWN_TARIFF).billing
    least_s = 0.0 if billing is None else max(billing.minimum_s, billing.unit_s)
    return (attempt.allocation.usd_per_hour or 0.0) * least_s / 3600.0
