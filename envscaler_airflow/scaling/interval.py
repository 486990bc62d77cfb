"""How often to checkpoint: Young's and Daly's interval from measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from envscaler_airflow.planning.record import check_finite


def price_aware_interval_s(
    save_s: float, losses_per_hour: float, price: float | None, recent: Sequence[float]
) -> float | None:
    """The interval for the loss rate that the current price predicts: shorter while the price is high."""
    return checkpoint_interval_s(save_s, losses_per_hour * price_risk(price, recent))


def checkpoint_interval_s(save_s: float, losses_per_hour: float) -> float | None:
    """Seconds of training between two checkpoints that lose the least time; None without losses.

    ``sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d`` with *d* the seconds of a save and *M* those between
    losses; *M* when a save takes half of that or longer. The time of a restart does not change it
    (Daly, section 3).

    Source: J. T. Daly, FGCS 22 (2006), equation 37; J. W. Young, CACM 17 (1974), for the first term.
    """
    check_finite(save_s=save_s, losses_per_hour=losses_per_hour)
    if losses_per_hour <= 0:
        return None
    between_s = 3600 / losses_per_hour
    if save_s <= 0:
        return 0.0
    if save_s >= between_s / 2:
        return between_s
    ratio = save_s / (2 * between_s)
    return math.sqrt(2 * save_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


PRICE_WEIGHT = 11.0
"""How strongly a price above its own recent level raises the loss rate: ``exp(weight * rise)``, limited to
one half and four times. Fitted by ``benchmarks/policies/prices.py`` on price changes of 2023, rounded."""


def price_risk(price: float | None, recent: Sequence[float]) -> float:
    """Factor on a loss rate, from the price relative to the median of recent prices; 1 when unknown."""
    known = sorted(value for value in recent if value > 0 and math.isfinite(value))
    if not known or price is None or not price > 0 or not math.isfinite(price):
        return 1.0
    rise = math.log(price / known[len(known) // 2])
    return min(4.0, max(0.5, math.exp(PRICE_WEIGHT * rise)))
