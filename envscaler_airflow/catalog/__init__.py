"""Offers and GPU facts, with a source and a date for each price.

The package is small for now: it has the on-demand list prices that the local backend needs as shadow
prices. ``price_rows`` reads a packaged table, and ``shadow_offer`` returns the nearest instance type.
"""

from envscaler_airflow.catalog.accelerators import canonical_gpu, nominal_memory_gb
from envscaler_airflow.catalog.packaged import PRICES_AS_OF, PriceRow, price_rows, scaled_price, shadow_offer

__all__ = [
    "PRICES_AS_OF",
    "PriceRow",
    "canonical_gpu",
    "nominal_memory_gb",
    "price_rows",
    "scaled_price",
    "shadow_offer",
]
