"""The file of fitted constants is what its command makes."""

import importlib.util
from pathlib import Path

import pytest

from envscaler_airflow.scaling.deadline import fitted

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(90)
def test_the_file_of_constants_is_made_by_its_command():
    """Fitted anew on the traces of 2023 and 2025; the last digit may differ between machines."""
    spec = importlib.util.spec_from_file_location("fit", ROOT / "benchmarks" / "policies" / "fit.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["fit"] = module
    spec.loader.exec_module(module)

    made = module.fit(module.load(ROOT / "tests" / "data" / "spot"))

    for name, value in made.items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-3), name
