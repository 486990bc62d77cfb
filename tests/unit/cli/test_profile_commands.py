"""``envscaler profile``: what earlier runs of a stage taught."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.planning import Speed
from envscaler_airflow.planning.profile import Forecast, Losses, RunProfile, Usage
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.profiles import add_profile, stage_folder
from envscaler_airflow.store.run_store import open_store

DAY_S = 86_400.0


@pytest.fixture
def store(tmp_path):
    """Two stages; one has three runs, the newest half as fast."""
    made = open_store(f"file://{tmp_path}/store")
    for number, speed in ((1, 2.0), (2, 2.0), (3, 1.0)):
        run = RunProfile(
            f"d/retrain/r{number}/train/-1",
            1,
            number * DAY_S,
            "succeeded",
            code="a",
            units=1000.0,
            speeds={"aws/g5.xlarge": Speed(speed, 0.1)},
            usage={"memory_bytes": Usage(1e9, 2e9, 3e9 * number)},
            start_s={"create": 40.0, "first_step": 20.0},
            checkpoint_s=5.0,
            losses={"aws/us-east-1/g5.xlarge/spot": Losses(2.0, 1.0)},
            forecast=Forecast(0.9, 1.0, 1.1, 1.0),
        )
        add_profile(made, stage_folder(RunKey("d", "retrain", f"r{number}", "train")), run)
    other = RunProfile("d/retrain/r1/prepare/-1", 1, 1.0, "succeeded")
    add_profile(made, stage_folder(RunKey("d", "retrain", "r1", "prepare")), other)
    return made


def shell(store, *args, **more):
    """Run ``envscaler profile``."""
    return CliRunner().invoke(main, ["profile", *args, "--store", store.url], **more)


def test_what_the_runs_measured_is_shown_with_its_uncertainty(store):
    """Medians, how far the next run may be from them, and how many runs measured them (feature B5)."""
    found = shell(store, "show", "retrain/train")

    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("d/retrain/train: measured in 3 runs, 1970-01-02 to 1970-01-04\n")
    lines = {line.split("  ")[0]: line for line in found.stdout.splitlines()}
    assert "1000 steps" in lines["work"]
    assert "2 steps/s" in lines["speed on aws/g5.xlarge"]
    assert "60 s" in lines["start: whole"]
    assert "3 in 6.0 h" in lines["losses on aws/us-east-1/g5.xlarge/spot"]
    assert "1.00 x the forecast, 100% within its range" in lines["time taken"]


def test_tools_get_the_merge_and_the_runs(store):
    """One object."""
    body = json.loads(shell(store, "show", "train", "--json").stdout)

    assert (body["stage"], body["runs"], len(body["measured"])) == ("d/retrain/train", 3, 3)


def test_a_torn_profile_is_named(store):
    """The others count."""
    folder = stage_folder(RunKey("d", "retrain", "r1", "train"))
    store.write(f"{folder}/000000000000001-torn.json", b"{")

    assert "ignored: profiles.v1/" in shell(store, "show", "train").stdout


def test_the_newest_run_is_compared_with_the_ones_before(store):
    """Half as fast, twice the memory."""
    found = shell(store, "diff", "train").stdout.splitlines()

    assert found[0] == "d/retrain/train: d/retrain/r3/train/-1 against 2 before"
    assert any(line.startswith("speed on aws/g5.xlarge") and line.endswith("0.50 x") for line in found)
    assert any(line.startswith("peak memory_bytes") and line.endswith("1.50 x") for line in found)
    assert "one run is measured" in shell(store, "diff", "prepare").output


def test_a_reset_forgets_one_stage(store):
    """After a question."""
    assert "Aborted" in shell(store, "reset", "train", input="n\n").output
    assert shell(store, "reset", "train", "--yes").stdout == "d/retrain/train: forgot 3 runs\n"
    assert shell(store, "show").stdout == "d/retrain/prepare\n"


def test_an_unknown_stage_is_refused_with_the_known_ones(store):
    """So is an ambiguous one."""
    assert "there are d/retrain/prepare, d/retrain/train" in shell(store, "show", "score").output


def test_advice_names_sizes_and_reasons_also_for_a_run_that_was_removed(store):
    """The largest believable peak is 9e9 bytes in three runs: a fifth more, in whole steps (feature B5)."""
    found = CliRunner().invoke(main, ["advise", "train", "--store", store.url])

    assert found.exit_code == 0, found.output
    assert "request memory: 10304Mi" in found.stdout
    assert "memory peaked at 8.38 GiB in 3 runs" in found.stdout
    assert "where it would run is unknown" in found.stdout
    assert "none of its profiles" not in found.stdout
