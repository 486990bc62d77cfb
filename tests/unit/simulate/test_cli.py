"""``envscaler simulate``: machine-readable reports, and errors that name the option."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes.policies import bring, forgotten

from envscaler_airflow.cli import main
from envscaler_airflow.planning import Allocation
from envscaler_airflow.scaling import Check, Decision, Observation, Policy
from envscaler_airflow.store.decisions import DecisionLog
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import check_store, open_store
from envscaler_airflow.testing.scripted_backend import cpu_offer

SPOT = Path(__file__).parents[2] / "data" / "spot"
ELASTIC = Path(__file__).parents[2] / "data" / "elastic"
TRACES = ["--traces", str(SPOT / "gcpH100_2025_600s_count16.csv"), "--windows", str(SPOT / "windows.csv")]
FIELDS = {"dataset", "zone", "start_tick", "deadline_h", "overhead_h", "cost_usd", "finished_h", "late"}


def run(*arguments):
    """One command."""
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_spot_prints_jobs_and_a_summary():
    """Every start of the set, with the documented fields (feature D9)."""
    got = run("spot", *TRACES, "--policy", "uniform-progress", "--json")

    report = json.loads(got.stdout)
    assert got.exit_code == 0
    assert len(report["jobs"]) == 72
    assert set(report["jobs"][0]) >= FIELDS
    assert report["summary"]["late"] == 0
    assert report["summary"]["mean_cost_usd"] == pytest.approx(88.56, rel=0.005)


def test_several_zones_make_one_job_for_each_start():
    """Eight starts over three zones."""
    got = run("spot", *TRACES, "--zones", "us-central1-a,us-central1-b,us-east4-a", "--json")

    report = json.loads(got.stdout)
    assert len(report["jobs"]) == 8
    assert report["jobs"][0]["zone"] == "us-central1-a+us-central1-b+us-east4-a"


def test_elastic_prints_jobs_with_regret():
    """One model at one value of an hour."""
    work = "cifar10=4,yolov3=2"  # of a model that was measured and is not asked for now, too
    asked = ["--models", "cifar10", "--types", "T4", "--work", work, "--value-of-hour", "1"]
    got = run("elastic", "--profiles", str(ELASTIC), *asked, "--seeds", "2", "--json")

    report = json.loads(got.stdout)
    job = report["jobs"][1]
    assert (job["model"], job["seed"], job["value_of_hour"]) == ("cifar10", 1, 1.0)
    assert job["regret"] == pytest.approx(job["objective"] / job["optimum"] - 1, abs=1e-4)
    assert report["summary"]["jobs"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spot", *TRACES, "--policy", "luck"], "--policy: got 'luck'; known are deadline"),
        (["spot", *TRACES, "--zones", "mars"], "has no zone mars"),
        (["elastic", "--profiles", str(ELASTIC), "--models", "gpt9"], "has no model gpt9"),
        (
            ["elastic", "--profiles", str(ELASTIC), "--models", "cifar10", "--work", "cifar10"],
            "write MODEL=K",
        ),
        (
            ["elastic", "--profiles", str(ELASTIC), "--models", "cifar10", "--work", "cifar=4"],
            "--work: cifar is not simulated; --models has cifar10",
        ),
        (
            ["elastic", "--profiles", str(ELASTIC), "--models", "cifar10", "--types", "T5"],
            "has no model that was measured on T5",
        ),
    ],
)
def test_faults_name_the_option_and_what_there_is(arguments, message):
    """Exit code 2 and one line."""
    got = run(*arguments)

    assert got.exit_code == 2
    assert message in got.output


def test_a_run_is_replayed_though_its_policy_is_not_installed_here(tmp_path):
    """Another policy replays it; one line names the run's own policy."""
    store, here = open_store(f"file://{tmp_path}"), Allocation(cpu_offer(1))
    check_store(store)
    log = DecisionLog(Run(store, "dep/dag/run/train/-1"), writer="sensor", monotonic=lambda: 0.0)
    log.add(Check(Observation(here), Policy("theirs"), Decision("keep", here, "so they said", "theirs")))
    log.close()
    asked = ["run", "dep/dag/run/train", "--store", store.url, "--json"]

    got, other = run(*asked), run(*asked, "--policy", "threshold")

    assert got.exit_code == 2
    assert "was decided by theirs, which is not installed here" in got.output
    assert other.exit_code == 0, other.output
    assert json.loads(other.stdout)["summary"]["checks"] == 1


PNG = b"\x89PNG\r\n\x1a\n"


def test_a_broken_policy_of_another_package_fails_its_own_simulation_alone(monkeypatch):
    """Built-in policies run, also by their own names; one line names the broken one."""
    with forgotten():
        bring(monkeypatch, broken=lambda: 1 / 0, greedy=lambda: 1 / 0)
        ours = run("spot", *TRACES, "--policy", "greedy")
        got = run("spot", *TRACES, "--policy", "broken")

    assert ours.exit_code == 0

    assert got.exit_code == 2
    assert "policy 'broken' (broken:policy) cannot be loaded: ZeroDivisionError" in got.output


@pytest.mark.parametrize("name", ["job.png", "job", "job.what"])
def test_a_spot_job_is_drawn(tmp_path, name):
    """Availability of every zone, and what was run: a nonempty PNG under any file name."""
    path = tmp_path / name

    got = run("spot", *TRACES, "--zones", "us-central1-a,us-central1-b", "--plot", str(path))

    assert got.exit_code == 0, got.output
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000


def test_an_elastic_job_is_drawn(tmp_path):
    """The configurations that it ran on."""
    path = tmp_path / "job.png"
    asked = ["--models", "cifar10", "--types", "T4", "--value-of-hour", "4", "--seeds", "1"]

    got = run("elastic", "--profiles", str(ELASTIC), *asked, "--plot", str(path))

    assert got.exit_code == 0, got.output
    assert path.read_bytes().startswith(PNG)
