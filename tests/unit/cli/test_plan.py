"""``envscaler plan`` and ``envscaler offers``, on tables of the test's own."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from envscaler_airflow.catalog.sources import COLUMNS
from envscaler_airflow.cli import main
from envscaler_airflow.cli.plan import _advice, _commitment, _unpriced, _why_not
from envscaler_airflow.planning import Allocation, Candidate, Goal, Knowledge, Offer, Plan, Speed
from envscaler_airflow.planning.planner import candidate_of, rank_of
from envscaler_airflow.planning.profile import RunProfile
from envscaler_airflow.store import open_store
from envscaler_airflow.store.availability import remember
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.profiles import add_profile, stage_folder

LINES = [
    "aws,us-east-1,us-east-1a,g4dn.xlarge,4,16,T4,1,16,0.526,0.2,x86_64,5-10%,list,list",
    "aws,us-east-1,us-east-1b,g4dn.xlarge,4,16,T4,1,16,0.526,0.21,x86_64,5-10%,list,list",
    "aws,us-east-1,us-east-1a,g4dn.12xlarge,48,192,T4,4,16,3.912,,x86_64,,list,",
    "aws,us-east-1,us-east-1a,g5.xlarge,4,16,A10G,1,24,1.006,,x86_64,,list,",
    "azure,eastus,,NC4as_T4_v3,4,28,T4,1,16,0.55,,x86_64,,list,",
    "azure,eastus,,D4,4,16,,,,0.192,,x86_64,,list,",
    "tencent,,,GN7.2XLARGE32,8,32,T4,1,16,,,x86_64,,specs-only,",
]
SPEC = """
version: v1
name: train
resources: {accelerators: "%s", use_spot: false}
entrypoint: [python, train.py]
checkpoint: {path: /ckpt}
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Run a command on the tables above; the spec requests the given GPU."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "offers.csv").write_text("\n".join([",".join(COLUMNS), *LINES]) + "\n")

    def run(command, *more, gpu="T4:1"):
        (tmp_path / "s.yaml").write_text(SPEC % gpu)
        spec = ["-f", str(tmp_path / "s.yaml")] if command == "plan" else []
        return CliRunner().invoke(main, [command, *spec, "--offers", str(tmp_path), *more])

    return run


def words(line):
    """A line without its padding."""
    return " ".join(line.split())


def test_plan_prints_the_table_that_users_know(shell):
    """The chosen one is marked, zones at one price are one line, the others show their extra cost."""
    got = shell("plan")

    lines = got.output.splitlines()
    assert got.exit_code == 0, got.output
    assert words(lines[0]) == "INFRA INSTANCE vCPUs MEM GPUs SPOT $/h EST. TIME EST. COST WHY NOT CHOSEN"
    assert words(lines[1]) == "aws/us-east-1/us-east-1a (+1) g4dn.xlarge 4 16 T4:1 - 0.5260 - - *"
    assert words(lines[2]) == "azure/eastus NC4as_T4_v3 4 28 T4:1 - 0.5500 - - +$0.0240/h"
    assert any(line.startswith("tencent ") and "price unknown" in line for line in lines)
    assert "has A10G, T4 asked" in got.output
    assert "note: prices: exercise, not prices" in got.output
    assert "azure on-demand" not in got.output
    assert "note: tencent on-demand in any region would do and has no known price" in got.output


def test_plan_as_json_has_chosen_candidates_and_rejected(shell):
    """With every documented field, for tools (feature B3)."""
    got = json.loads(shell("plan", "--json").output)

    chosen = got["chosen"]
    assert chosen == got["candidates"][0]
    assert {
        key: chosen[key]
        for key in ("cloud", "region", "zone", "instance_type", "capacity_type", "nodes", "usd_per_hour")
    } == {
        "cloud": "aws",
        "region": "us-east-1",
        "zone": "us-east-1a",
        "instance_type": "g4dn.xlarge",
        "capacity_type": "on-demand",
        "nodes": 1,
        "usd_per_hour": 0.526,
    }
    assert chosen["accelerators"] == {"T4": 1}
    for key in ("expected_time_h", "expected_cost_usd", "expected_cost_usd_low", "speed_source"):
        assert chosen[key] is None
    assert [item["reason"] for item in got["rejected"] if item["instance_type"] == "g5.xlarge"] == [
        "has A10G, T4 asked"
    ]


def test_plan_keeps_to_clouds_and_scope(shell, tmp_path):
    """Azure alone, by name and by scope file."""
    (tmp_path / "scope.json").write_text('{"azure": ["eastus"]}')

    for more in (["--clouds", "azure"], ["--scope", str(tmp_path / "scope.json")]):
        assert json.loads(shell("plan", "--json", *more).output)["chosen"]["cloud"] == "azure"

    got = shell("plan", "--clouds", "asw")
    assert got.exit_code == 2
    assert "--clouds asw: there are aws, azure, tencent" in got.output


def test_a_request_that_nothing_meets_fails_with_the_nearest_miss(shell):
    """Exit code 2, the error, and the table of the nearest misses."""
    got = shell("plan", gpu="T4:8")

    assert got.exit_code == 2
    assert "no offer fits" in got.output
    assert "g4dn.12xlarge/on-demand: has 4 GPUs, 8 asked" in got.output


def test_exact_counts_refuse_larger_machines(shell):
    """Three T4 fit on a machine of four, unless the spec requires exactly three."""
    assert json.loads(shell("plan", "--json", gpu="T4:3").output)["chosen"]["accelerators"] == {"T4": 4}

    got = shell("plan", "--exact", gpu="T4:3")

    assert got.exit_code == 2
    assert "g4dn.12xlarge/on-demand: has 4 GPUs, exactly 3 asked" in got.output


def test_a_price_limit_names_what_it_costs_at_least(shell):
    """Half a dollar an hour is not enough."""
    got = shell("plan", "--max-usd-per-hour", "0.5")

    assert got.exit_code == 2
    assert "takes 0.526 USD an hour at best, max_usd_per_hour is 0.5" in got.output


def test_offers_are_listed_by_price(shell):
    """Spot and on demand, zones at one price as one line (feature B1)."""
    got = shell("offers", "--gpu", "T4")

    names = [line.split()[0] + " " + line.split()[-4] for line in got.output.splitlines()[1:-1]]
    assert got.exit_code == 0, got.output
    assert len(names) == 6
    assert got.output.splitlines()[1].split()[:2] == ["aws/us-east-1/us-east-1a", "g4dn.xlarge"]
    assert (
        json.loads(shell("offers", "--gpu", "T4", "--json").output)["offers"][0]["usd_per_node_hour"] == 0.2
    )


def test_offers_like_another_are_found_elsewhere(shell):
    """A g4dn.xlarge is an NC4as_T4_v3."""
    got = shell("offers", "--like", "aws:g4dn.xlarge", "--clouds", "azure")

    assert "NC4as_T4_v3" in got.output
    assert "D4 " not in got.output


def test_a_gpu_that_nobody_sells_gets_a_hint(shell):
    """The message has the nearest name."""
    got = shell("offers", "--gpu", "A10H")

    assert (got.exit_code, got.output) == (2, "Error: --gpu: GPU 'A10H' is not known; write A10\n")


def test_a_job_is_planned_with_times_costs_and_mixed_fleets(shell):
    """Duration, certainty, and the source of the speed (feature B3)."""
    got = json.loads(shell("plan", "--json", "--job", "resnet50-imagenet", "--work", "1e6").output)

    chosen = got["chosen"]
    assert chosen["expected_time_h_low"] < chosen["expected_time_h"] < chosen["expected_time_h_high"]
    assert chosen["expected_cost_usd"] == pytest.approx(
        chosen["expected_time_h"] * chosen["usd_per_hour"], rel=1e-3
    )
    assert chosen["speed_source"] == "fitted"
    assert got["fleets"] == []  # the spec requires only one node


@pytest.fixture
def learned(tmp_path):
    """A store in which two runs of a stage measured its work and speeds."""
    (tmp_path / "store").mkdir()
    store = open_store(str(tmp_path / "store"))
    for number in (1, 2):
        run = RunProfile(
            f"d/retrain/r{number}/train/-1",
            1,
            time.time() - 1000.0 * number,
            "succeeded",
            units=36_000.0,
            speeds={"aws/g4dn.xlarge": Speed(1.0, 0.05), "aws/g4dn.12xlarge": Speed(20.0, 1.0)},
            start_s={"create": 30.0, "first_step": 10.0},
            checkpoint_s=2.0,
        )
        add_profile(store, stage_folder(RunKey("d", "retrain", f"r{number}", "train")), run)
    return str(tmp_path / "store")


def test_what_earlier_runs_measured_ranks_by_cost_and_time(shell, learned):
    """Ten hours on the small machine, half an hour on the large one, which costs less in all (B5)."""
    options = ("--stage", "retrain/train", "--store", learned, "--strategy", "cost")
    got = json.loads(shell("plan", "--json", *options).output)
    half = json.loads(shell("plan", "--json", *options, "--work", "18000").output)

    assert got["chosen"]["instance_type"] == "g4dn.12xlarge"
    assert got["chosen"]["speed_source"] == "learned"
    assert got["chosen"]["expected_time_h"] == pytest.approx(1800 / 3600 + 40 / 3600, rel=0.1)
    assert "work of retrain/train: measured in 2 runs" in got["notes"]
    assert half["chosen"]["expected_time_h"] < 0.6 * got["chosen"]["expected_time_h"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stage", "train"), "--stage train: goes with --store, and not with --job"),
        (("--stage", "score", "--store", "{store}"), "score: no stage with a profile ends so"),
    ],
)
def test_a_stage_that_nothing_is_known_of_is_an_error(shell, learned, options, words):
    """The message says what to write, and which stages there are."""
    got = shell("plan", *(option.format(store=learned) for option in options))

    assert (got.exit_code, words in got.output) == (2, True), got.output


def test_jobs_are_listed(shell):
    """With the source of each speed."""
    got = shell("plan", "--job", "list")

    assert got.exit_code == 0, got.output
    assert "llm-7b-lora" in got.output
    assert "AdaptDL" in got.output
    [first, *_] = json.loads(shell("plan", "--job", "list", "--json").output)["jobs"]
    assert (first["name"], first["is_measured"]) == ("resnet50-imagenet", True)


def test_what_runs_found_sold_out_is_passed_over(shell, tmp_path):
    """The message names the store of those runs."""
    (tmp_path / "store").mkdir()
    store = open_store(str(tmp_path / "store"))
    sold_out = Offer("aws", "us-east-1", "g4dn.xlarge", "on-demand", 4, 16, "us-east-1a", "T4", 1, 16, 0.526)
    remember(store, sold_out, "InsufficientInstanceCapacity", now=time.time())

    got = json.loads(shell("plan", "--json", "--store", str(tmp_path / "store")).output)

    assert got["chosen"]["zone"] == "us-east-1b"
    assert any("InsufficientInstanceCapacity 0 min ago" in item["reason"] for item in got["rejected"])


def test_data_that_are_no_place_are_an_error(shell):
    """The message names the fix."""
    got = shell("plan", "--data", "s3://bucket/data")

    assert got.exit_code == 2
    assert "write aws:us-east-1 or aws:us-east-1:200 (GiB)" in got.output


@pytest.mark.parametrize(
    ("command", "option", "text", "words"),
    [
        ("plan", "--deadline", "tomorrow", "--deadline:"),
        ("plan", "--budget", "-1", "is not in the range"),
        ("plan", "--budget", "nan", "budget_usd must be finite"),
        ("plan", "--work", "0", "is not in the range"),
        ("plan", "--job", "bert", "no job is named 'bert'"),
        ("offers", "--memory", "64", "--memory:"),
        ("offers", "--gpu-memory", "much", "--gpu-memory:"),
        ("offers", "--like", "aws:x9", "no such type"),
    ],
)
def test_options_that_say_nothing_sensible_are_errors(shell, command, option, text, words):
    """Exit code 2 and what to write; never a traceback, never a plan."""
    got = shell(command, option, text)

    assert got.exit_code == 2, got.output
    assert words in got.output


def test_a_mixed_fleet_is_told_where_both_markets_will_do(shell, tmp_path):
    """One node on demand for rank 0, the rest on spot of the same type."""
    got = shell("plan", gpu="T4:1")
    spec = (tmp_path / "s.yaml").read_text().replace(", use_spot: false", "") + "num_nodes: 1..3\n"
    (tmp_path / "wide.yaml").write_text(spec)

    wide = shell("plan", "-f", str(tmp_path / "wide.yaml"))

    assert "mixed fleet" not in got.output
    assert (
        "note: mixed fleet: 1 on demand and 1 on spot of g4dn.xlarge in aws/us-east-1/us-east-1a, $0.7260/h"
    ) in wide.output


@pytest.mark.parametrize(
    "line", ["aws,us-east-1,,m5,4,16,,,,nan,,x86_64,,,", "aws,us-east-1,,m5,nan,16,,,,1,,x86_64,,,"]
)
@pytest.mark.parametrize("command", ["plan", "offers"])
def test_what_was_refused_of_a_table_is_named(shell, tmp_path, command, line):
    """From both commands, also without a remaining offer."""
    (tmp_path / "offers.csv").write_text("\n".join([",".join(COLUMNS), line]) + "\n")

    assert "note: refused: offers.csv:2: " in shell(command).output


def test_a_machine_of_ones_own_is_among_the_others_and_costs_nothing(shell):
    """Unless its owner sets a price; it is never rounded, and is listed by its name (feature B8)."""
    free = json.loads(shell("plan", "--json", "--own", "box,cpus=8,memory=32Gi,gpu=T4:1").output)
    dear = json.loads(shell("plan", "--json", "--own", "box,cpus=8,memory=32Gi,gpu=T4:1,usd=9").output)

    assert (free["chosen"]["name"], free["chosen"]["usd_per_hour"]) == ("own/box/on-demand", 0.0)
    assert free["chosen"]["price_source"] == "yours"
    assert dear["chosen"]["instance_type"] == "g4dn.xlarge"
    assert ("own", 9.0) in [(item["cloud"], item["usd_per_hour"]) for item in dear["candidates"]]
    assert (
        "note: prices: exercise, not prices; your own machines"
        in shell("plan", "--own", "box,cpus=8,memory=32Gi,gpu=T4:1").output
    )


@pytest.mark.parametrize(
    "text",
    [
        "box",
        "cpus=8,memory=32Gi",
        "box,cpus=8",
        "box,cpus=8,memory=32",
        "box,cpus=0,memory=32Gi",
        "box,cpus=8,memory=32Gi,usd=nan",
        "box,cpus=8,memory=32Gi,usd=-1",
        "box,cpus=8,memory=32Gi,usd=1e308",
        "box,cpus=8,memory=32Gi,gpu=:2",
        "box,cpus=8,memory=32Gi,gpu=T4:x",
        "box,cpus=8,memory=32Gi,gpu=T4:-1",
        "box,cpus=8,memory=32Gi,colour=red",
    ],
)
def test_a_machine_that_is_none_is_refused(shell, text):
    """In words, without a plan."""
    got = shell("plan", "--own", text)

    assert got.exit_code != 0
    assert f"--own '{text}'" in got.output
    assert "Traceback" not in got.output


def test_an_empty_table_is_said_to_be_empty(shell, tmp_path):
    """There is no near miss."""
    (tmp_path / "offers.csv").write_text(",".join(COLUMNS) + "\n")

    got = shell("plan")

    assert got.exit_code == 2
    assert "there is no offer at all to choose from" in got.output
    assert "note: no offer has a GPU named T4: none has any" in got.output


def test_a_chosen_fleet_is_the_first_line_of_the_table(tmp_path, monkeypatch):
    """Two on demand exceed the hourly limit, one spot beside one on demand does not, and two are required."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "s.yaml").write_text(
        "{version: v1, name: x, resources: {accelerators: 'T4:1'}, num_nodes: 1..2, entrypoint: [a],"
        " checkpoint: {path: /c}}"
    )
    (tmp_path / "offers.csv").write_text("\n".join([",".join(COLUMNS), LINES[0]]) + "\n")
    command = ["plan", "-f", str(tmp_path / "s.yaml"), "--offers", str(tmp_path), "--arch", "any"]
    slow = [*command, "--job", "resnet50-imagenet", "--work", "1e7", "--strategy", "deadline"]

    free = json.loads(CliRunner().invoke(main, [*slow, "--json"]).output)
    (fleet,) = free["fleets"]
    spot = next(item for item in free["candidates"] if (item["capacity_type"], item["nodes"]) == ("spot", 2))
    between = (fleet["expected_time_h_high"] + spot["expected_time_h_high"]) / 2
    limits = ["--deadline", f"{int(between * 3600)}s", "--max-usd-per-hour", "0.9"]
    got = CliRunner().invoke(main, [*slow, *limits])

    lines = got.output.splitlines()
    assert (fleet["rest"]["capacity_type"], fleet["rest_nodes"]) == ("spot", 1)
    assert words(lines[1]).startswith("aws/us-east-1/us-east-1a 2 x g4dn.xlarge 4 16 T4:1 1 of them 0.7260")
    assert lines[1].endswith("*")


def test_what_costs_less_and_takes_longer_is_told_by_its_time():
    """No candidate is sure to keep the deadline: the sooner one was chosen, and the other is not "same"."""
    speed, work = Speed(1 / 3600, 0.5 / 3600, "user"), Knowledge(10, "units")
    offer = Offer("aws", "us-east-1", "g4dn.xlarge", "on-demand", 4, 16, usd_per_hour=2.0)
    goal = Goal("deadline", deadline_s=36000.0)
    cheap = replace(offer, instance_type="g4dn.2xlarge", usd_per_hour=0.5)

    chosen = candidate_of(Allocation(offer), speed, work, goal, hour_usd=0.0)
    later = candidate_of(Allocation(cheap), replace(speed, mean=0.99 / 3600), work, goal, hour_usd=0.0)

    assert rank_of(chosen, goal) < rank_of(later, goal)
    assert _why_not(later, chosen) == f"+{later.estimate.hours - chosen.estimate.hours:.2f} h"
    assert _why_not(replace(chosen, allocation=Allocation(cheap)), chosen) == "same, later by name"


@pytest.mark.parametrize(
    ("usd", "share"), [(0.25, "50%"), (0.499, "100%"), (0.5, None), (0.75, None)], ids=str
)
def test_only_a_commitment_that_costs_less_is_worth_a_word(usd, share):
    """On demand is 0.50 an hour: at 0.25 it pays from half of the time on, at 0.50 never (feature B8)."""
    offer = Offer("aws", "us-east-1", "g4dn.xlarge", "on-demand", 4, 16, usd_per_hour=0.5)
    made = SimpleNamespace(chosen=SimpleNamespace(allocation=SimpleNamespace(offer=offer)))

    got = _commitment(made, lambda _: {offer.name: {"1y": usd}})

    words = (
        f"a commitment of a year to g4dn.xlarge costs ${usd:.4f} every hour: "
        f"less than on demand if it is used for over {share} of that time"
    )
    assert got == ([] if share is None else [words])


def test_data_of_another_cloud_cost_what_that_cloud_charges(shell):
    """100 GiB out of AWS are $9.00; a job is finished elsewhere nevertheless."""
    words = [
        "--job",
        "resnet50-imagenet",
        "--work",
        "1e6",
        "--data",
        "aws:us-east-1:100",
        "--clouds",
        "azure",
    ]

    got = json.loads(shell("plan", "--json", *words).output)

    assert got["chosen"]["data_usd"] == pytest.approx(9.0)


def test_an_unknown_price_says_how_to_get_it_where_that_is_possible():
    """For clouds that publish their prices."""
    notes = _unpriced({("aws", "spot"): ["us-east-1"], ("tencent", "on-demand"): [""]})

    assert [note.partition(", so it comes last")[2] for note in notes] == [
        ": envscaler catalog refresh --cloud aws --region us-east-1",
        "",
    ]


@pytest.mark.parametrize(
    ("cloud", "name", "is_burstable"),
    [
        ("aws", "t3.large", True),
        ("aws", "trn1.2xlarge", False),
        ("azure", "Standard_B2s", True),
        ("gcp", "e2-small", True),
        ("gcp", "e2-standard-4", False),
        ("alibaba", "ecs.t6-c1m1.large", True),
        ("lambda", "t3.large", False),
    ],
)
def test_a_type_that_is_not_as_fast_all_the_time_is_said(cloud, name, is_burstable):
    """By the cloud's name of the type."""
    offer = Offer(cloud, "r", name, "on-demand", 2, 8)

    assert bool(_advice(Plan(Candidate(Allocation(offer))))) is is_burstable
