"""Nebius: prices only from the packaged snapshot."""

from __future__ import annotations

from envscaler_airflow.clouds import Cloud
from envscaler_airflow.planning.billing import Billing, Tariff

CLOUD = Cloud(
    name="nebius",
    tariff=Tariff(Billing(1.0, source="Nebius compute pricing: by the second"), usd_per_gib_out=0.0),
)
"""Source: the named page, which states no charge for data out (recalled 2026-11, not re-read)."""
