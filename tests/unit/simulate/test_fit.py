"""The files of fitted constants equal the output of their command."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from envscaler_airflow.scaling.deadline import Hazard, risk

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "spot"


@pytest.fixture(scope="module")
def fit():
    """The command."""
    spec = importlib.util.spec_from_file_location("fit", ROOT / "benchmarks" / "policies" / "fit.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fit"]


@pytest.mark.timeout(90)
def test_the_file_of_constants_is_made_by_its_command(fit):
    """Fitted again on the traces of 2023 and 2025; the last digit may differ between machines."""
    made = fit.fit(fit.load(DATA))

    assert made
    for name, value in made.items():
        assert getattr(risk, name) == pytest.approx(value, rel=1e-3), name


@pytest.mark.timeout(90)
def test_the_constants_of_figures_on_these_sets_are_made_by_it_too(fit):
    """Each is fitted on parts that it is not measured on."""
    kept = json.loads(fit.HELD_OUT_FILE.read_text())

    made = fit.held_out(DATA)

    assert kept.keys() == made.keys() == fit.MEASURED_ON.keys()
    for part, constants in made.items():
        for name, value in constants.items():
            assert kept[part][name] == pytest.approx(value, rel=1e-3), (part, name)


def test_no_constants_are_measured_on_what_they_were_fitted_on(fit):
    """A quarter uses the opposite one, and both kinds of columns use the other half of the time."""
    for part, parts in fit.MEASURED_ON.items():
        *column, half = part.split("-")
        assert parts
        for odd, late in parts:
            assert late == (half == "early")
            assert column in ([], ["even" if odd else "odd"])


def test_a_part_has_a_model_of_its_own_and_no_part_has_the_shipped_one(fit):
    """The probabilities of the regimes are those in the file."""
    assert fit.unseen("") == Hazard()
    assert fit.unseen("odd-late") != Hazard()
    assert sum(fit.unseen("odd-late").regimes) == pytest.approx(1, abs=1e-4)
