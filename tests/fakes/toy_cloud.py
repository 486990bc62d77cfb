"""A cloud of another package: one module, named by one entry point."""

from __future__ import annotations

from envscaler_airflow.clouds import Cloud, Fetched, PriceSource, Quote
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.billing import Billing, Tariff
from envscaler_airflow.planning.offers import InstanceType

NAME = "toy.large"
BIG = InstanceType("toy", NAME, 4.0, 16.0, "A10G", 1.0, 24.0, "x86_64")


class ToyPrices:
    """One machine in each region."""

    cloud = "toy"

    def __init__(self, access):
        """Store the credentials."""
        self.access = access

    def fetch(self, region):
        """On demand $0.05 an hour, spot $0.01 in one zone."""
        zone = f"{region}-a"
        quotes = Quote(NAME, region, "", "on-demand", 0.05), Quote(NAME, region, zone, "spot", 0.01)
        return Fetched("toy", region, quotes, "Toy price list", kinds=(BIG,), zones={NAME: (zone,)})


def _open(access):
    if access.secret is None:
        raise SpecError("toy: set ENVSCALER_TOY_API_KEY")
    return ToyPrices(access)


CLOUD = Cloud(
    name="toy",
    tariff=Tariff(Billing(60.0)),
    prices=PriceSource(open=_open, regions=("toyland-1",), conn_type="toy", conn_id="toy_default"),
)
USURPER = Cloud(name="aws")
