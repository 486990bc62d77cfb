"""The sidecar image: built by buildah on a base of Debian's packages, and run."""

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from envscaler_airflow.backends.kubernetes.cluster_settings import SIDECAR_IMAGE
from envscaler_airflow.cli import main
from envscaler_airflow.images.build import REQUIREMENTS

TOOLS = ("buildah", "mmdebstrap")
MOST_BYTES = 400 << 20
"""Chosen: Debian's essential packages with apt and Python are 200 MiB of it."""

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("CI") and any(shutil.which(tool) is None for tool in TOOLS),
        reason=f"needs {', '.join(TOOLS)}; CI installs them",
    ),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the base has Python 3.11"),
    pytest.mark.timeout(400),
]


def buildah(*words, **options):
    """Run it; what it prints."""
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory, base_tar):
    """The image, in a storage of this module alone, isolated by chroot."""
    folder = tmp_path_factory.mktemp("sidecar-image")
    config = folder / "storage.conf"
    config.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(config))
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "base.tar").hardlink_to(base_tar)
        (folder / "Base").write_text("FROM scratch\nADD base.tar /\n")
        buildah("build", "--quiet", "-f", "Base", "-t", "localhost/base:1", ".", cwd=folder)
        make_wheels(folder / "wheels")
        [pip] = (folder / "wheels").glob("pip-*.whl")
        values = {
            "BASE": "localhost/base:1",
            "PIP": f"/wheels/{pip.name}/pip",
            "PIP_FIND_LINKS": "/wheels",
            "PIP_NO_INDEX": "1",
        }
        words = [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
        mounts = folder / "containers.conf"
        mounts.write_text(f'[containers]\nvolumes = ["{folder}/wheels:/wheels:ro"]\n')
        with patch.context() as within:
            within.setenv("CONTAINERS_CONF", str(mounts))
            done = CliRunner().invoke(main, ["images", "build-sidecar", "--builder", "buildah", *words])
        assert done.exit_code == 0, done.output
        assert done.stdout == f"{SIDECAR_IMAGE}\n"
        yield SIDECAR_IMAGE
        buildah("rm", "--all")
        buildah("rmi", "--all", "--force")


def make_wheels(folder):
    """What the image installs, for its Python, which is this one's."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
    for wanted in (["pip"], ["--require-hashes", "--requirement", str(REQUIREMENTS)]):
        subprocess.run([*words, *wanted], check=True, timeout=240)


def run(image, *command):
    """What a command prints in a container of it."""
    container = buildah("from", image)
    try:
        return buildah("run", "--user", "65532:65532", container, "--", *command)
    finally:
        buildah("rm", container)


def test_sidecar_and_supervisor_start_in_it(image):
    """As a user that the image does not know."""
    modules = ("envscaler_airflow.sidecar", "envscaler_airflow.backends.kubernetes.pod_sidecar")

    for module in modules:
        assert "--spool" in run(image, "python3", "-m", module, "--help")


def test_it_installs_the_agent_and_speaks_to_s3(image):
    """What the init container does, and the store's client."""
    script = (
        "import boto3, envscaler_airflow.store.s3; from pathlib import Path;"
        "from envscaler_airflow.backends.kubernetes.install import install;"
        "print(sorted(p.name for p in install(Path('/tmp/x')).iterdir()))"
    )

    got = run(image, "python3", "-c", script)

    assert got == "['envscaler_agent', 'pod_main.py', 'pynvml.py']"


def test_it_is_small_and_nobodys(image):
    """No compiler, no Airflow; not root."""
    text = buildah("inspect", "--type", "image", "--format", "{{.OCIv1.Config.User}}", image)
    size = run(image, "sh", "-c", "du -sbx / 2>/dev/null || true").split()[0]

    assert text == "65532:65532"
    assert int(size) < MOST_BYTES
