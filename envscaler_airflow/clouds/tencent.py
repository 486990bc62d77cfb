"""Tencent Cloud: prices only from the packaged snapshot."""

from __future__ import annotations

from envscaler_airflow.clouds import Cloud
from envscaler_airflow.planning.billing import Billing, Tariff

CLOUD = Cloud(
    name="tencent",
    tariff=Tariff(Billing(1.0, source="CVM pay-as-you-go: by the second")),
    refusals={
        "ResourceInsufficient": ("capacity", "offer"),
        "LimitExceeded.InstanceQuota": ("quota", "offer"),
    },
    schemes=("cos",),
    provider_id="qcloud",
)
"""Source: the named page (recalled 2026-11, not re-read); the price of data out of the cloud is unknown.
Refusals: CVM, error codes.
"""
