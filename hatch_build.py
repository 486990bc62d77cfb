"""Build hook of the provider's wheel: what it carries beside its packages.

The wheel of ``envscaler_agent`` for training images, and the DAG that ``envscaler demo`` runs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilder

DEMO = (
    ".airflowignore",
    "retrain_text_classifier.py",
    "envs/prepare.yaml",
    "envs/train.yaml",
    "envs/score.yaml",
    "text_classifier",
)
"""Below ``dags/examples``."""


class CarriedData(BuildHookInterface[Any]):
    """Adds data to a standard wheel; an editable install finds the same in its clone."""

    PLUGIN_NAME = "custom"
    _scratch: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the agent's wheel, and name what goes in."""
        if self.target_name != "wheel" or version != "standard":
            return
        self._scratch = Path(tempfile.mkdtemp(prefix="envscaler-agent-"))
        builder = WheelBuilder(str(Path(self.root, "agent")))
        for wheel in builder.build(directory=str(self._scratch), versions=["standard"]):
            build_data["force_include"][wheel] = f"envscaler_airflow/wheels/{Path(wheel).name}"
        for name in DEMO:
            build_data["force_include"][f"dags/examples/{name}"] = f"envscaler_airflow/examples/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the copy outside the wheel."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch)
