"""Layers of system packages whose distributions lack a mirror in CI: run with stand-in programs."""

from __future__ import annotations

import re
import subprocess

import pytest

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.images.dockerfile import ImageOptions, render_dockerfile
from envscaler_airflow.images.requirement_files import Requirements


def run_of(base: dict[str, str], packages: list[str], *, has_ca: bool = False) -> tuple[list[str], str]:
    """Mounts and command of the RUN that installs *packages*, as Docker's parser reads them."""
    spec = EnvSpec.from_dict({"version": "v1", "name": "s", "base": base, "system_packages": packages})
    text = render_dockerfile(spec, Requirements(), ImageOptions(has_ca=has_ca))[0].text
    joined = re.sub(r"\\\n", "", text)
    line = next(line for line in joined.splitlines() if line.startswith("RUN "))
    words = re.match(r"RUN +((?:--mount=\S+ +)*)(.*)\Z", line)
    assert words is not None
    return words[1].split(), words[2]


@pytest.mark.parametrize(
    ("base", "program", "called", "cache"),
    [
        (
            {"image": "alpine:3.20"},
            "apk",
            "apk [add] [--update-cache] [git] [g++] [curl=8.5.0-r0]",
            "/etc/apk/cache",
        ),
        (
            {"distro": "fedora"},
            "dnf",
            "dnf [install] [--assumeyes] [--setopt=install_weak_deps=False] [git] [g++] [curl-8.5.0-r0]",
            "/var/cache/dnf",
        ),
    ],
)
@pytest.mark.parametrize("has_ca", [False, True])
def test_a_layer_of_packages_calls_its_package_manager_once(base, program, called, cache, has_ca, tmp_path):
    """A shell runs the line unchanged; each package is one word, and downloads go to a mount."""
    stand_in = tmp_path / program
    stand_in.write_text(f'#!/bin/sh\nprintf "{program}"; printf " [%s]" "$@"; echo; echo "$SSL_CERT_FILE"\n')
    stand_in.chmod(0o755)
    mounts, command = run_of(base, ["git", "g++", "curl=8.5.0-r0"], has_ca=has_ca)

    done = subprocess.run(
        ["/bin/sh", "-euc", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )

    if has_ca and program == "dnf":
        called = called.replace("[install]", "[install] [--setopt=sslcacert=/run/secrets/ca-file]")
    assert done.stdout.splitlines() == [called, "/run/secrets/ca-file" if has_ca else ""]
    assert f"--mount=type=cache,target={cache},sharing=locked" in mounts
    assert ("--mount=type=secret,id=ca-file,target=/run/secrets/ca-file" in mounts) == has_ca


def test_a_package_name_cannot_be_a_command():
    """Text with a meaning for a shell is refused before."""
    with pytest.raises(Exception, match="is not a package name"):
        run_of({"image": "alpine:3.20"}, ["git; touch hacked"])
