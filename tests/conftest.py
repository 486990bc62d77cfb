"""For all tests: an Airflow home of the session's own, so that nobody's settings are read or written."""

from __future__ import annotations

import os
import tempfile

HOME = tempfile.TemporaryDirectory(prefix="envscaler-tests-")

os.environ["AIRFLOW_HOME"] = HOME.name
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"


def pytest_unconfigure() -> None:
    """Remove the home: at the interpreter's end it would be a warning."""
    HOME.cleanup()
