"""Data and disks: their place in the spec, what that excludes, and the cost elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.cli.offer_options import candidate_body
from envscaler_airflow.clouds import schemes, tariffs
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import (
    Allocation,
    Knowledge,
    Offer,
    Overheads,
    Requirements,
    Speed,
    feasible,
    plan,
)
from envscaler_airflow.planning.billing import Tariff
from envscaler_airflow.planning.data import GIB_PER_S, DataPlace, data_places
from envscaler_airflow.planning.market import Search, search
from envscaler_airflow.planning.near_misses import unpriced_offers
from envscaler_airflow.planning.table import table_of

HERE = Offer("aws", "us-east-1", "g5.xlarge", "on-demand", 4, 16, "us-east-1a", "A10G", 1, 24, 1.0)
NEXT = replace(HERE, zone="us-east-1b", usd_per_hour=1.1)
AWAY = replace(HERE, region="us-west-2", zone="us-west-2a", usd_per_hour=0.9)
GPU = Requirements(gpus=1)
SPEC = """
version: v1
name: train
base: {image: "python:3.11"}
resources: {requests: {cpu: 2, gpu: {count: 1, type: A10G}}, disk_size: 730Gi}
volumes: VOLUMES
checkpoint: {path: /ckpt}
entrypoint: [python, train.py]
"""


@pytest.fixture
def spec_of(tmp_path):
    """Write and read a spec with these volumes."""

    def make(volumes):
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC.replace("VOLUMES", volumes))
        return load_spec(path)

    return make


def test_volumes_say_where_they_lie(spec_of):
    """An object store can be read from elsewhere, a claim is used in place; others have no known place."""
    spec = spec_of(
        "[{name: data, source: s3://b/x, mount_path: /d, region: us-east-1, size: 200Gi},"
        " {name: claim, source: pvc://c, mount_path: /c, zone: us-east-1b},"
        " {name: model, source: gs://m/x, mount_path: /m, region: us-central1},"
        " {name: other, source: s3://o/x, mount_path: /o}]"
    )

    assert data_places(spec, schemes()) == (
        DataPlace("data", "aws", "us-east-1", gib=200.0),
        DataPlace("claim", "", "", zone="us-east-1b", is_bound=True),
        DataPlace("model", "gcp", "us-central1"),
    )


@pytest.mark.parametrize(
    ("volume", "words"),
    [
        ("source: s3://b/x, zone: us-east-1a", "zone"),
        ("source: s3://b/x, size: 200", "no unit"),
        ("source: s3://b/x, region: 'us east'", "plain word"),
    ],
)
def test_a_place_that_is_none_is_refused(spec_of, volume, words):
    """A zone for copied data, a size without a unit, an invalid region."""
    with pytest.raises(SpecError, match=words):
        spec_of(f"[{{name: data, {volume}, mount_path: /d}}]")


def test_a_claim_with_a_zone_alone_is_in_the_zone_of_any_cloud():
    """The name identifies a zone; a cluster's nodes have the cloud's names."""
    claim = DataPlace("claim", "", "", gib=50.0, zone="us-east-1b", is_bound=True)

    assert claim.allows("aws", "us-east-1", "us-east-1b")
    assert claim.allows("kubernetes", "us-east-1", "us-east-1b")
    assert claim.allows("kubernetes", "", "")  # a cluster whose nodes name no zone
    assert not claim.allows("aws", "us-east-1", "us-east-1a")
    assert (claim.usd_to("aws", "us-east-1", tariffs()), claim.seconds_to("aws", "us-east-1")) == (0.0, 0.0)


def test_a_cluster_in_the_region_reads_at_home():
    """Elsewhere the price is unknown, because the cloud of the cluster is."""
    data = DataPlace("data", "aws", "us-east-1", gib=100.0)

    assert data.usd_to("kubernetes", "us-east-1", tariffs()) == 0.0
    assert data.seconds_to("kubernetes", "us-east-1") == 0.0
    assert data.usd_to("kubernetes", "eu-west-1", tariffs()) is None
    assert data.seconds_to("kubernetes", "eu-west-1") == 100 / GIB_PER_S


def test_both_planners_pass_over_where_a_claim_cannot_be_used():
    """One planner rejects it with the reason, the other names what the claim excluded."""
    claim = DataPlace("claim", "aws", "us-east-1", zone="us-east-1b", is_bound=True)
    work = Knowledge(data=(claim,))

    small, large = (
        plan(GPU, [HERE, NEXT, AWAY], knowledge=work),
        search(GPU, table_of([HERE, NEXT, AWAY]), knowledge=work),
    )

    assert small.chosen.allocation.offer == large.chosen.allocation.offer == NEXT
    assert {item.reason for item in small.rejected} == {"claim can be used in aws/us-east-1/us-east-1b alone"}
    assert any(f"exclude {AWAY.name} at $0.9000/h: claim" in note for note in large.notes)
    assert feasible([GPU], [HERE, NEXT, AWAY], data=[claim]) == (Allocation(NEXT),)


def test_what_a_claim_excludes_is_not_said_to_lack_a_price():
    """A price would not change the result."""
    table = table_of([replace(item, usd_per_hour=None) for item in (HERE, AWAY)])
    claim = DataPlace("claim", "aws", "us-east-1", is_bound=True)

    free = unpriced_offers([GPU], table, lambda *_: True)
    bound = unpriced_offers([GPU], table, lambda *_: True, [claim])

    assert free == {("aws", "on-demand"): ["us-east-1", "us-west-2"]}
    assert bound == {("aws", "on-demand"): ["us-east-1"]}


def test_both_planners_count_the_copy_and_the_disk():
    """90 GiB from the east to the west: $1.80 and 360 s; 73 GiB of disk at $0.08 for a tenth of a month."""
    work = Knowledge(
        10, "units", {item.name: Speed(1 / 3600, 0, "user") for item in (HERE, AWAY)}, Overheads(),
        data=(DataPlace("data", "aws", "us-east-1", gib=90.0),), tariffs=tariffs(),
    )  # fmt: skip
    need = replace(GPU, disk_gib=73.0)
    how = Search(speed_of=lambda _kind, _nodes: Speed(1 / 3600, 0, "user"))

    small = plan(need, [HERE, AWAY], knowledge=work)
    large = search(need, table_of([HERE, AWAY]), knowledge=work, how=how)

    assert small.candidates == large.candidates
    here, away = small.candidates
    assert (here.estimate.data_usd, here.estimate.hours) == (0.0, 10.0)
    assert here.estimate.disk_usd == pytest.approx(73 * 0.08 / 730 * 10)
    assert here.estimate.usd == pytest.approx(10 + here.estimate.disk_usd)
    assert (away.estimate.data_usd, away.estimate.hours) == (pytest.approx(1.8), pytest.approx(10.1))
    assert away.estimate.usd == pytest.approx(0.9 * 10.1 + 1.8 + away.estimate.disk_usd)


def test_each_node_has_a_disk_of_its_own():
    """Two nodes pay twice."""
    work = Knowledge(
        10, "units", {f"2 x {HERE.name}": Speed(1 / 3600, 0, "user")}, Overheads(), tariffs=tariffs()
    )
    need = replace(GPU, disk_gib=73.0, min_nodes=2, max_nodes=2)

    got = plan(need, [HERE], knowledge=work).chosen.estimate

    assert got.disk_usd == pytest.approx(2 * 73 * 0.08 / 730 * 10)


def test_a_disk_without_a_known_price_is_said():
    """It counts as free, a note names it, and tools do not read it as zero."""
    far = replace(HERE, cloud="nebius", region="eu-north1", zone=None)
    how = Search(speed_of=lambda _kind, _nodes: Speed(1 / 3600, 0, "user"))

    got = search(
        replace(GPU, disk_gib=10.0),
        table_of([far]),
        knowledge=Knowledge(1, "units", tariffs=tariffs()),
        how=how,
    )

    assert "what disks cost on nebius is unknown and counted as nothing" in got.notes
    assert got.chosen.estimate.disk_usd is None
    assert candidate_body(got.chosen)["disk_usd"] is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataPlace("data", "tencent", "ap-tokyo", gib=10.0), "what data costs to leave tencent is unknown"),
        (DataPlace("data", "", "hall-3", gib=10.0), "what data costs to leave hall-3 is unknown"),
        (DataPlace("data", "aws", "us-west-2"), "the size of data is unknown, and copying it counted as"),
    ],
)
def test_a_copy_without_a_known_price_is_said(data, words):
    """It counts as free, a note names it, and tools do not read it as zero; other known copies are billed."""
    known = DataPlace("known", "aws", "eu-west-1", gib=100.0)
    how = Search(speed_of=lambda _kind, _nodes: Speed(1 / 3600, 0, "user"))

    got = search(
        GPU,
        table_of([HERE]),
        knowledge=Knowledge(10, "units", data=(data, known), tariffs=tariffs()),
        how=how,
    )

    assert any(note.startswith(words) for note in got.notes), got.notes
    assert candidate_body(got.chosen)["data_usd"] is None
    assert got.chosen.estimate.usd == pytest.approx(10 + 400 / 3600 + 2.0, rel=0.02)


def test_a_copy_is_said_when_no_speed_is_known():
    """Offers are ranked by $/h then: no price includes the copy, which may cost more than the rest."""
    data = DataPlace("data", "aws", "us-east-1", gib=5000.0)
    far = replace(HERE, cloud="gcp", region="us-central1", zone=None)

    there = search(GPU, table_of([far]), knowledge=Knowledge(data=(data,), tariffs=tariffs()))
    here = search(GPU, table_of([HERE]), knowledge=Knowledge(data=(data,), tariffs=tariffs()))

    assert "no speed is known, so copying data is in no price: up to $450.00" in there.notes
    assert not any("copying" in note for note in here.notes)


def test_what_a_cloud_charges_is_finite():
    """NaN is rejected; if only the price is unknown, the time of the copy is still known."""
    data = DataPlace("data", "tencent", "ap-tokyo", gib=10.0)

    assert data.usd_to("aws", "us-east-1", tariffs()) is None
    assert data.seconds_to("aws", "us-east-1") == 10 / GIB_PER_S
    with pytest.raises(ValueError, match="usd_per_gib_out must be finite"):
        Tariff(usd_per_gib_out=float("nan"))


def test_the_shell_plans_by_the_volumes_of_the_spec(spec_of, tmp_path):
    """The claim's region leaves one place, and the plan names the cheaper alternative."""
    spec_of("[{name: claim, source: pvc://c, mount_path: /c, region: us-east-1}]")
    table = tmp_path / "offers.csv"
    table.write_text(
        "cloud,region,zone,instance_type,vcpus,memory_gib,accelerator_name,accelerator_count,"
        "accelerator_memory_gib,price_usd_per_hour,spot_price_usd_per_hour,arch\n"
        "aws,us-east-1,us-east-1a,g5.xlarge,4,16,A10G,1,24,1.0,,x86_64\n"
        "aws,us-west-2,us-west-2a,g5.xlarge,4,16,A10G,1,24,0.9,,x86_64\n"
    )

    got = CliRunner().invoke(
        main, ["plan", "-f", str(tmp_path / "spec.yaml"), "--offers", str(table), "--json"]
    )

    assert got.exit_code == 0, got.output
    body = json.loads(got.stdout)
    assert [item["region"] for item in body["candidates"]] == ["us-east-1"]
    assert any("exclude aws/us-west-2/us-west-2a/g5.xlarge/on-demand" in note for note in body["notes"])


def test_machines_that_do_not_say_where_they_are_are_not_excluded():
    """The user's own machines, and a cluster without labels: an unknown place is not another place."""
    claim = DataPlace("claim", "", "us-east-1", zone="us-east-1b", is_bound=True)

    assert claim.allows("kubernetes", "", "")
    assert claim.allows("local", "", "")
    assert not claim.allows("kubernetes", "us-west-2", "")
    assert not claim.allows("kubernetes", "", "us-east-1a")
