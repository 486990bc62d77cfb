"""Scan an image for known vulnerabilities by trivy or grype, and fail from a severity on."""

from __future__ import annotations

import tempfile
from pathlib import Path

from envscaler_airflow.build.builders import Builder
from envscaler_airflow.build.programs import Output, find_program, run_program
from envscaler_airflow.errors import BackendError, SpecError

SEVERITIES = ("low", "medium", "high", "critical")
"""From the least on, as both programs name them."""
TIMEOUT_S = 1800.0
"""Longest scan, seconds. Chosen: the database of vulnerabilities is loaded first."""


def find_scanner() -> str:
    """Path of trivy or grype.

    Raises:
        SpecError: Neither is installed; an unscanned image never passes.
    """
    program = find_program("trivy", "grype")
    if program is None:
        raise SpecError("--scan: neither trivy nor grype is installed; install one, or leave --scan out")
    return program


def scan_image(builder: Builder, image: str, *, severity: str = "high") -> str:
    """The scanner's report when nothing of *severity* or above was found.

    Raises:
        SpecError: Something was found, or no scanner is installed.
        BackendError: The scanner failed.
    """
    program = find_scanner()
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "image.tar")
        builder.save(image, archive)
        done = run_program(_words(program, archive, severity), timeout_s=TIMEOUT_S)
    report = (done.out or done.err).strip()
    if done.code == 0:
        return report
    if _has_findings(Path(program).name, done):
        raise SpecError(f"{image} has vulnerabilities of severity {severity} or above:\n{report}")
    raise BackendError(f"{program} failed (exit code {done.code}): {done.err.strip() or report}")


_TRIVY_FOUND = 10
"""Exit code that we ask trivy for."""
_GRYPE_FOUND = "discovered vulnerabilities at or above the severity threshold"
"""What grype says; its exit code differs by version. Source: anchore/grype, grype/grypeerr/errors.go."""


def _has_findings(program: str, done: Output) -> bool:
    if program == "trivy":
        return done.code == _TRIVY_FOUND
    return _GRYPE_FOUND in done.err + done.out


def _words(program: str, archive: Path, severity: str) -> list[str]:
    if Path(program).name == "grype":
        return [program, f"docker-archive:{archive}", "--fail-on", severity, "--quiet"]
    names = ",".join(name.upper() for name in SEVERITIES[SEVERITIES.index(severity) :])
    return [
        program,
        "image",
        "--input",
        str(archive),
        "--severity",
        names,
        "--quiet",
        "--exit-code",
        str(_TRIVY_FOUND),
    ]
