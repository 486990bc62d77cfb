"""Unit tests of offers, usage and resizes: what the backend reads from a cluster's objects."""

import math

import pytest

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.cluster_offers import derived_offers
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.failures import Seen, timestamp
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_changes import patch_of, state_of
from envscaler_airflow.backends.kubernetes.job_usage import intervals
from envscaler_airflow.catalog.nodes import quantity
from envscaler_airflow.catalog.prices import Price, PriceCache, PriceList
from envscaler_airflow.clouds import Quote
from envscaler_airflow.errors import SpecError
from envscaler_airflow.run.cost import UsageInterval

START, BOUND, END = "2026-11-29T17:00:00Z", "2026-11-29T17:01:00Z", "2026-11-29T18:00:00Z"
PART = Part("ns", "job", "u", nodes=1, created=START)


def node(name="n", *, cpu="8100m", memory="33024Mi", gpus=0, ready="True", labels=None):
    """Return a node; 33024Mi are 32 GiB and the sidecar's 256 MiB."""
    room = {"cpu": cpu, "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/arch": "amd64", **(labels or {})}},
        "spec": {},
        "status": {"allocatable": room, "conditions": [{"type": "Ready", "status": ready}]},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3920m", 3.92),
        ("8", 8),
        ("16Gi", 2**34),
        ("1k", 1000),
        ("129M", 129e6),
        ("2Ti", 2**41),
        ("12e3", 12000),
    ],
)
def test_quantities_of_a_server_are_read(text, value):
    """Milli, decimal, binary, and with an exponent."""
    assert quantity(text) == pytest.approx(value)


def test_a_node_is_offered_in_slices_less_what_the_sidecar_takes():
    """Eight CPUs: 1, 2, 4, 8, with memory in proportion."""
    offers = derived_offers([node(labels={"node.kubernetes.io/instance-type": "m5.2xlarge"})], Settings())

    assert [(offer.instance_type, offer.vcpus, offer.memory_gib) for offer in offers] == [
        ("m5.2xlarge:cpu-1", 1.0, 4.0),
        ("m5.2xlarge:cpu-2", 2.0, 8.0),
        ("m5.2xlarge:cpu-4", 4.0, 16.0),
        ("m5.2xlarge:cpu-8", 8.0, 32.0),
    ]
    assert {offer.usd_per_hour for offer in offers} == {None}


def test_gpus_are_named_as_in_the_catalog_and_priced_by_their_share():
    """Two of eight A100 of a node for $32 an hour: $8."""
    labels = {
        "node.kubernetes.io/instance-type": "p4de.24xlarge",
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
        "eks.amazonaws.com/capacityType": "SPOT",
    }
    settings = Settings(region="eks", usd_per_hour={"p4de.24xlarge": 32.0})

    offers = derived_offers([node(cpu="96100m", gpus=8, labels=labels)], settings)

    two = next(offer for offer in offers if offer.gpus == 2)
    assert two.name == "kubernetes/eks/p4de.24xlarge:gpu-2/spot"
    assert (two.gpu_name, two.gpu_memory_gb, two.vcpus, two.usd_per_hour) == ("A100-80GB", 80, 24.0, 8.0)
    assert [offer.gpus for offer in offers] == [1, 2, 4, 8]


EKS = {"node.kubernetes.io/instance-type": "g5.xlarge", "topology.kubernetes.io/region": "us-east-1"}


def rented(name="n", *, labels=None, cloud="aws"):
    """Return a g5.xlarge of EKS in us-east-1 as its node reports it: one A10G, four CPUs less the reserve."""
    gpu = {"nvidia.com/gpu.product": "NVIDIA-A10G", "nvidia.com/gpu.memory": "23028"}
    made = node(name, cpu="3920m", memory="15147812Ki", gpus=1, labels={**EKS, **gpu, **(labels or {})})
    made["spec"]["providerID"] = f"{cloud}:///us-east-1a/{name}"
    return made


def test_a_rented_node_costs_what_its_cloud_asks_for_the_type():
    """The list price of a g5.xlarge in us-east-1; the node's region takes precedence over the setting."""
    [offer] = derived_offers([rented()], Settings(region="mine"))

    assert offer.name == "kubernetes/us-east-1/g5.xlarge:gpu-1/on-demand"
    assert (offer.usd_per_hour, offer.gpu_memory_gb) == (1.006, 24)
    assert offer.price_source == "as aws g5.xlarge: AWS list price of 2026-07-20, 1 of a node"


def test_a_node_of_a_cloud_has_the_refreshed_price(tmp_path, monkeypatch):
    """The list price of July until a refresh; then the live one, with its date (feature B2)."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path))
    key = Quote("g5.xlarge", "us-east-1", "", "on-demand", 0.0).key
    cache = PriceCache(tmp_path)
    cache.keep(PriceList("aws", "us-east-1", at=3600.0, source="AWS", prices={key: Price(0.9, 3600.0)}))
    cache.compile()

    [offer] = derived_offers([rented()], Settings())

    assert offer.usd_per_hour == 0.9
    assert "AWS, 1970-01-01 01:00 UTC" in offer.price_source


@pytest.mark.parametrize("key", ["g5.xlarge", "pool", "*"])
def test_the_owners_price_goes_before_the_clouds(key, monkeypatch):
    """By instance type, by node pool, or for all; the catalog is not even opened."""

    def catalog():
        raise AssertionError("the catalog was opened")

    monkeypatch.setattr("envscaler_airflow.backends.kubernetes.cluster_offers.live_catalog", catalog)
    nodes = [rented(labels={"eks.amazonaws.com/nodegroup": "pool"})]

    [offer] = derived_offers(nodes, Settings(usd_per_hour={key: 0.25}))

    assert offer.usd_per_hour == 0.25
    assert offer.price_source == "usd_per_hour of the configuration, 1 of a node"


@pytest.mark.parametrize(
    "nodes",
    [
        [rented(labels={"eks.amazonaws.com/capacityType": "SPOT"})],  # no public price for spot
        [rented(cloud="kind")],
        [rented(labels={"node.kubernetes.io/instance-type": "g99.xlarge"})],
        [rented(), rented("m", cloud="kind")],
    ],
)
def test_a_price_that_nobody_tells_stays_unknown(nodes):
    """Never 0, and never the price of another market, cloud or node."""
    [offer] = derived_offers(nodes, Settings())

    assert offer.usd_per_hour is None


def test_the_dearest_of_like_nodes_counts():
    """A share may be on either node."""
    dear, cheap = ({"eks.amazonaws.com/nodegroup": name} for name in ("dear", "cheap"))
    settings = Settings(usd_per_hour={"dear": 2.0, "cheap": 1.0})

    for nodes in ([dear, cheap], [cheap, dear]):
        [offer] = derived_offers([rented(labels=labels) for labels in nodes], settings)
        assert offer.usd_per_hour == 2.0


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_a_price_that_is_none_is_refused(price):
    """The error comes before any plan uses it."""
    with pytest.raises(SpecError, match=r"usd_per_hour\.g5\.xlarge"):
        Settings.read({"usd_per_hour": {"g5.xlarge": price}})


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu": "A100"},
        {"gpus": 2},
        {"vcpus": math.inf},
        {"gpu": "A100", "gpus": 1, "gpu_memory_gb": math.nan},
    ],
)
def test_a_node_class_that_no_offer_can_be_is_refused(fields):
    """Loading the configuration refuses it, not a later plan."""
    with pytest.raises(SpecError, match=r"cluster_prices\.0: Value error, (gpus|vcpus|gpu_memory_gb)"):
        Settings.read({"cluster_prices": [{"name": "n", "vcpus": 1, "memory_gib": 1, **fields}]})


def test_a_life_without_an_end_is_refused():
    """Every Job has a deadline."""
    with pytest.raises(SpecError, match="longest_s"):
        Settings.read({"longest_s": math.inf})


def test_preemptible_nodes_are_spot():
    """They lack GKE's Spot VM label; a setting of gke selects by that label alone."""
    nodes = [node(labels={"cloud.google.com/gke-preemptible": "true"})]

    assert {offer.capacity_type for offer in derived_offers(nodes, Settings())} == {"spot"}
    assert derived_offers(nodes, Settings(provider="gke")) == ()
    marked = [node(labels={"cloud.google.com/gke-spot": "true"})]
    assert {offer.capacity_type for offer in derived_offers(marked, Settings(provider="gke"))} == {"spot"}


@pytest.mark.parametrize("text", ["", "lots", "5KM", "1e", "-1", "nan", "0x10", "1 Gi"])
def test_what_is_no_quantity_is_refused(text):
    """A node that reports such a value counts as having none."""
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(text)
    assert derived_offers([node(cpu=text)], Settings()) == ()


def test_a_node_that_only_names_its_gpu_is_found_by_that():
    """Bare metal without instance types."""
    [offer] = derived_offers([node(gpus=1, labels={"nvidia.com/gpu.product": "Tesla-T4"})], Settings())

    assert (offer.instance_type, offer.gpu_name) == ("gpu.Tesla-T4:gpu-1", "T4")


def test_nodes_that_take_no_pods_are_no_offers():
    """Not ready, cordoned, or too small."""
    cordoned = node()
    cordoned["spec"]["unschedulable"] = True

    assert derived_offers([node(ready="Unknown"), cordoned, node(cpu="1")], Settings()) == ()


def test_the_smallest_of_like_nodes_counts():
    """A share fits on each of them."""
    offers = derived_offers([node(), node(cpu="4100m")], Settings())

    assert max(offer.vcpus for offer in offers) == 4.0


def pod(*, phase="Running", index=0, finished=None, conditions=()):
    """Return a pod that was bound to a node a minute after its Job began."""
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": BOUND}
    state = {"terminated": {"exitCode": 0, "finishedAt": finished}} if finished else {"running": {}}
    return {
        "metadata": {
            "name": f"job-{index}",
            "uid": f"p{index}",
            "generation": 2,
            "labels": {names.INDEX: str(index)},
        },
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "1Gi"}}}]},
        "status": {
            "phase": phase,
            "observedGeneration": 2,
            "conditions": [bound, *conditions],
            "containerStatuses": [{"name": "main", "state": state}],
        },
    }


def job(*, ended=None):
    """Return a Job that began at START."""
    conditions = [{"type": "Failed", "status": "True", "lastTransitionTime": ended}] if ended else []
    return {"metadata": {"name": "job"}, "spec": {}, "status": {"startTime": START, "conditions": conditions}}


def test_a_node_is_billed_from_its_binding_to_its_last_container():
    """The wait for a node costs nothing."""
    assert intervals(Seen(job(), (pod(),)), PART) == (UsageInterval(0, timestamp(BOUND), None),)
    over = pod(phase="Succeeded", finished=END)
    assert intervals(Seen(job(ended=END), (over,)), PART) == (
        UsageInterval(0, timestamp(BOUND), timestamp(END)),
    )


def test_a_machine_whose_clock_is_behind_is_billed_for_what_it_ran():
    """Half an hour by its own clock, which is two hours late; an accurate clock changes nothing."""
    late = pod(phase="Succeeded", finished="2026-11-29T15:31:00Z")
    late["status"]["startTime"] = "2026-11-29T15:01:00Z"
    agrees = pod(phase="Succeeded", finished=END)
    agrees["status"]["startTime"] = "2026-11-29T17:01:02Z"

    [one] = intervals(Seen(job(ended=END), (late,)), PART)
    assert (one.start, one.end) == (timestamp(BOUND), timestamp(BOUND) + 1800)
    [one] = intervals(Seen(job(ended=END), (agrees,)), PART)
    assert one.end == timestamp(END)


def test_a_node_whose_pod_is_gone_is_billed_by_its_job():
    """From start to end; a node whose Job is gone is billed no further."""
    assert intervals(Seen(job(ended=END)), PART) == (UsageInterval(0, timestamp(START), timestamp(END)),)
    assert intervals(Seen(None), PART) == (UsageInterval(0, timestamp(START), timestamp(START)),)


def test_a_pod_that_no_machine_was_found_for_costs_nothing():
    """Three hours in the scheduler's queue, while the pod exists and after it was deleted."""
    waiting = pod(phase="Pending")
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    given_up = job(ended=END)
    given_up["metadata"]["annotations"] = {names.STOP: '{"grace_s": 0, "at": null, "unmet": "0/9 nodes"}'}

    assert intervals(Seen(job(), (waiting,)), PART) == ()
    assert intervals(Seen(job(ended=END), (waiting,)), PART) == ()
    assert intervals(Seen(given_up), PART) == ()


def test_pods_that_were_made_again_are_billed_each():
    """One node with two intervals."""
    found = intervals(Seen(job(), (pod(phase="Failed", finished=END), pod())), PART)

    assert [(one.node, one.end) for one in found] == [(0, timestamp(END)), (0, None)]


def test_what_a_node_held_before_its_pod_was_made_again_is_billed():
    """The previous pod is gone without a trace; a new one that waits for a machine costs nothing more."""
    late, waiting = pod(), pod(phase="Pending")
    waiting["status"]["conditions"] = []
    for one in (late, waiting):
        one["metadata"]["creationTimestamp"] = BOUND.replace("01:00", "02:00")
    soon = pod()
    soon["metadata"]["creationTimestamp"] = BOUND

    before = UsageInterval(0, timestamp(START), timestamp(START) + 120)
    assert intervals(Seen(job(), (late,)), PART)[0] == before
    assert intervals(Seen(job(), (waiting,)), PART) == (before,)
    assert len(intervals(Seen(job(), (soon,)), PART)) == 1
    assert len(intervals(Seen(job(), (soon, late)), PART)) == 2


@pytest.mark.parametrize(
    ("notes", "of_job", "is_billed"),
    [
        ({names.INDEX_FAILURES: "0"}, {}, False),
        ({names.INDEX_FAILURES: "0", names.INDEX_IGNORED: "1"}, {}, True),
        ({names.INDEX_FAILURES: "1"}, {}, True),
        ({}, {}, True),
        ({}, {names.DELAYED_PODS: "true"}, False),
        ({names.INDEX_FAILURES: "0", names.INDEX_IGNORED: "1"}, {names.DELAYED_PODS: "true"}, True),
    ],
)
def test_the_wait_for_a_nodes_very_first_pod_costs_nothing(notes, of_job, is_billed):
    """Known from records on the pods or the start on the Job; otherwise an upper bound."""
    late, begun = pod(), job()
    late["metadata"] |= {"creationTimestamp": BOUND.replace("01:00", "02:00"), "annotations": notes}
    begun["metadata"]["annotations"] = of_job

    assert (len(intervals(Seen(begun, (late,)), PART)) == 2) is is_billed


def test_a_resize_moves_the_limits_that_are_there():
    """Memory has a limit, CPU has none."""
    assert patch_of(pod(), vcpus=2.5, memory_bytes=2 << 30)["spec"]["containers"] == [
        {
            "name": "main",
            "resources": {"requests": {"cpu": "2500m", "memory": "2048Mi"}, "limits": {"memory": "2048Mi"}},
        }
    ]


@pytest.mark.parametrize(
    ("kind", "reason", "expected"),
    [
        ("PodResizePending", "Deferred", "deferred"),
        ("PodResizePending", "Infeasible", "infeasible"),
        ("PodResizeInProgress", "", "going"),
        ("PodResizeInProgress", "Error", "infeasible"),
        ("Ready", "", "done"),
    ],
)
def test_how_far_a_resize_is(kind, reason, expected):
    """By the pods' conditions; the worst one counts."""
    one = pod(conditions=[{"type": kind, "status": "True", "reason": reason}])

    assert state_of((pod(), one)) == expected


def test_a_resize_that_the_kubelet_has_not_seen_is_going():
    """The spec is of a later generation than the status."""
    one = pod()
    one["status"]["observedGeneration"] = 1

    assert state_of((one,)) == "going"


def test_where_the_kubelet_tells_no_generation_what_the_container_has_counts():
    """Kubernetes 1.33: the requested value is there, is not yet there, or is unknown."""
    one = pod()
    del one["status"]["observedGeneration"]
    one["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}}
    [main] = one["status"]["containerStatuses"]

    found = [state_of((one,))]
    for cpu in ("1", "2000m"):
        main["resources"] = {"requests": {"cpu": cpu}, "limits": {"memory": "1024Mi"}}
        found.append(state_of((one,)))

    assert found == ["going", "going", "done"]
