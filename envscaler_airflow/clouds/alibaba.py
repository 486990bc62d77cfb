"""Alibaba Cloud: prices only from the packaged snapshot."""

from __future__ import annotations

import re

from envscaler_airflow.clouds import Cloud
from envscaler_airflow.planning.billing import Billing, Tariff

CLOUD = Cloud(
    name="alibaba",
    tariff=Tariff(Billing(1.0, source="ECS pay-as-you-go: by the second"), usd_per_gib_out=0.081),
    refusals={"OperationDenied.NoStock": ("capacity", "offer")},
    schemes=("oss",),
    burstable=re.compile(r"ecs\.t\d"),
    provider_id="alicloud",
)
"""Source: the named page, and the list price of data out of the cloud (recalled 2026-11, not re-read).
Refusals: ECS, error codes.
"""
