"""Offers and GPU facts, with a source and a date for each price.

The package is small for now: it has the on-demand list prices that the local backend needs as shadow
prices. ``listed_offers`` reads a packaged table, and ``shadow_offer`` returns the nearest instance type.
"""

from envscaler_airflow.catalog.accelerators import canonical_gpu, nominal_memory_gb
from envscaler_airflow.catalog.packaged import PRICES_AS_OF, listed_offers, scaled_price, shadow_offer

__all__ = [
    "PRICES_AS_OF",
    "canonical_gpu",
    "listed_offers",
    "nominal_memory_gb",
    "scaled_price",
    "shadow_offer",
]
