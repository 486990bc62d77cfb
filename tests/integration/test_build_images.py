"""Real images: buildah without a daemon, a base made of Debian's packages, a registry on loopback."""

from __future__ import annotations

import datetime as dt
import gc
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.images.builders import Access, Buildah, Container
from envscaler_airflow.images.programs import uv_program

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))
from wheel_index import Index, Proxy, write_wheel

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "build-images.md"
TOOLS = ("buildah", "mmdebstrap", "docker-registry")
CANARY = "zq7canaryzq7"

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("CI") and any(shutil.which(tool) is None for tool in TOOLS),
        reason=f"needs {', '.join(TOOLS)}; CI installs them",
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """Image storage of this module alone, with commands isolated by chroot."""
    root = tmp_path_factory.mktemp("storage")
    config = root / "storage.conf"
    config.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{root}/graph"\nrunroot = "{root}/run"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(config))
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setenv("UV_CACHE_DIR", str(root / "uv"))
        yield root
    remove_storage(root)


def remove_storage(root: Path) -> None:
    """Unmount what buildah left mounted below *root*, deepest first, and delete it."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{root}/")), reverse=True):
        subprocess.run(["umount", mount], check=True)
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def base(storage, registry, base_tar, tmp_path_factory):
    """Debian's essential packages and Python as an image in the registry; the installer as another."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "base.tar").hardlink_to(base_tar)
    shutil.copy(uv_program(), folder / "uv")
    (folder / "Base").write_text("FROM scratch\nADD base.tar /\n")
    (folder / "Uv").write_text("FROM scratch\nCOPY uv /uv\n")
    for name, file in (("base", "Base"), ("uv", "Uv")):
        image = f"{registry}/{name}:1"
        subprocess.run(["buildah", "build", "--quiet", "-f", file, "-t", image, "."], cwd=folder, check=True)
        subprocess.run(["buildah", "push", "--quiet", "--tls-verify=false", image], check=True)
        # Pulled as by any user: a base that was built here has another digest than its registry's.
        subprocess.run(["buildah", "rmi", image], check=True, capture_output=True)
        assert Buildah().pull(image, Access(tls_verify=False)) is None
    (folder / "base.tar").unlink()
    return f"{registry}/base:1"


@pytest.fixture
def project(base, registry, wheels, tmp_path, monkeypatch):
    """A stage with a requirement and a program, and ``build`` for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("ENVSCALER_UV_IMAGE", f"{registry}/uv:1")
    work = tmp_path / "work"
    work.mkdir()
    (work / "main.py").write_text(
        "import greeting, os\nprint(greeting.text, os.getuid(), os.environ['MODE'])\n"
    )
    (tmp_path / "requirements.txt").write_text("greeting>=1\n")

    def write(index_url: str = wheels.index.url, extra: str = "") -> None:
        (tmp_path / "envscaler.yaml").write_text(
            f"version: v1\nname: tiny\nbase: {{image: '{base}'}}\nworkdir: work\n"
            f"runtimes: [{{type: python, version: '3.11', package_manager: uv, "
            f"requirements: requirements.txt, index_url: '{index_url}'{extra}}}]\n"
            "env: {MODE: test}\nentrypoint: [python, main.py]\n"
        )

    def build(*words: str, code: int = 0):
        got = CliRunner().invoke(
            main, ["build", "--builder", "buildah", "--insecure", *words], catch_exceptions=False
        )
        assert got.exit_code == code, got.output
        return SimpleNamespace(name=got.stdout.strip(), said=got.stderr, out=got.stdout)

    write()
    yield SimpleNamespace(folder=tmp_path, write=write, build=build, registry=registry)
    gc.collect()


def layers(name: str) -> tuple[str, ...]:
    """Digests of the layers of an image here."""
    image = Buildah().inspect(name)
    assert image is not None
    return image.layers


def run_entrypoint(name: str) -> str:
    """Output of the image's own command."""
    image = Buildah().inspect(name)
    assert image is not None
    lines: list[str] = []
    assert Buildah().run(name, image.command, Container(), lines.append) == 0, lines
    return "\n".join(lines)


def test_an_image_is_built_pushed_pulled_back_and_run(project):
    """Its program runs as a user other than root, with the package that its spec requires."""
    pushed = project.build("-t", f"{project.registry}/team/tiny", "--push").name
    tagged, _, digest = pushed.partition("@")
    subprocess.run(["buildah", "rmi", tagged], check=True, capture_output=True)
    assert Buildah().inspect(tagged) is None

    assert Buildah().pull(f"{project.registry}/team/tiny@{digest}", Access(tls_verify=False)) is None

    assert run_entrypoint(f"{project.registry}/team/tiny@{digest}") == "hello 10001 test"


def test_only_what_changed_is_built_again(project, wheels):
    """An unchanged spec costs nothing, a source file one layer, a requirement its layer and all after it."""
    first = project.build()
    again = project.build()
    assert "unchanged, nothing to build" in again.said
    assert again.name == first.name
    of_first = layers(first.name)

    (project.folder / "work" / "main.py").write_text("print('changed')\n")
    of_source = layers(project.build().name)
    assert of_source[:-1] == of_first[:-1]
    assert of_source[-1] != of_first[-1]

    write_wheel(wheels.folder, "farewell", "1.0", "bye")
    (project.folder / "requirements.txt").write_text("greeting>=1\nfarewell\n")
    changed = project.build()
    of_requirement = layers(changed.name)
    same = [one == other for one, other in zip(of_source, of_requirement, strict=True)]
    # Base, user, installer, environment and the list of the user's requirements files stay.
    assert same[:5] == [True] * 5
    assert same[5:7] == [False] * 2
    assert changed.said.count("from cache") == 5


def test_a_lock_builds_the_same_versions_and_names_what_is_gone(project, wheels):
    """A newer version on the index changes nothing; an error names a deleted one (feature A7)."""
    project.build("--lock", "lock.json")
    lock = json.loads((project.folder / "lock.json").read_text())
    assert lock["packages"] == {"greeting": "1.0"}
    assert lock["base_digest"].startswith("sha256:")
    newer = write_wheel(wheels.folder, "greeting", "1.1", "newer")
    old = wheels.folder / "greeting-1.0-py3-none-any.whl"
    kept = old.read_bytes()
    try:
        assert run_entrypoint(project.build("--locked", "lock.json").name).startswith("hello ")
        assert run_entrypoint(project.build("--lock", "new.json").name).startswith("newer ")
        old.unlink()
        (project.folder / "work" / "more.py").write_text("")
        subprocess.run(["buildah", "rmi", "--all", "--force"], check=False, capture_output=True)

        said = project.build("--locked", "lock.json", code=2).said

        assert "greeting==1.0" in said
    finally:
        newer.unlink()
        old.write_bytes(kept)


def test_a_system_package_is_installed_and_held_by_a_lock(project):
    """Apt installs it in a layer below Python's; the lock has its version and builds that."""
    with (project.folder / "envscaler.yaml").open("a") as file:
        file.write("system_packages: [hello]\n")

    first = project.build("--lock", "lock.json", "--", "hello", "--greeting=from apt")

    assert "from apt\n" in first.out
    version = json.loads((project.folder / "lock.json").read_text())["system_packages"]["hello"]
    assert re.match(r"\d+\.\d+", version)
    locked = project.build("--locked", "lock.json")
    log = re.search(r"\(log: (.+)\)", locked.said)
    assert log is not None
    assert f"apt-get install --yes --no-install-recommends hello={version}" in Path(log[1]).read_text()
    assert run_entrypoint(locked.name) == "hello 10001 test"
    gone = (project.folder / "lock.json").read_text().replace(version, "0.1-nowhere")
    (project.folder / "gone.json").write_text(gone)
    assert "0.1-nowhere" in project.build("--locked", "gone.json", code=2).said


def test_layers_travel_through_a_registry(project, tmp_path_factory, monkeypatch):
    """Another machine (an empty storage) takes every layer from the cache of the first (feature A7)."""
    cache = f"{project.registry}/cache/tiny"
    project.build("--cache", cache)
    root = tmp_path_factory.mktemp("other")
    config = root / "storage.conf"
    config.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{root}/graph"\nrunroot = "{root}/run"\n')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(config))
    try:
        for image in ("base:1", "uv:1"):
            assert Buildah().pull(f"{project.registry}/{image}", Access(tls_verify=False)) is None

        said = project.build("--cache", cache).said

        assert said.count("from cache") >= 6
    finally:
        remove_storage(root)


def test_what_fails_in_the_image_is_not_pushed(project):
    """The command after -- decides; its output is shown."""
    name = f"{project.registry}/team/checked"

    got = project.build(
        "-t", name, "--push", "--", "python", "-c", "import sys; print('no'); sys.exit(3)", code=2
    )

    assert "no\n" in got.out
    assert "exit code 3" in got.said
    with pytest.raises(OSError, match="404"):
        urllib.request.urlopen(f"http://{project.registry}/v2/team/checked/tags/list", timeout=5)


def test_credentials_of_an_index_are_in_no_layer_log_or_output(project, wheels, monkeypatch, tmp_path):
    """The build installs with them, and no part of the image contains them."""
    private = Index(wheels.folder, password=f"me:{CANARY}")
    monkeypatch.setenv("WHEELS", f"me:{CANARY}")
    try:
        project.write(private.url, ", credentials: env:WHEELS")
        got = project.build("--lock", "lock.json")
    finally:
        private.close()

    Buildah().save(got.name, tmp_path / "image.tar")
    assert b"greeting.text" in (tmp_path / "image.tar").read_bytes()  # its layers can be read
    words = ["grep", "-rlF", CANARY, str(tmp_path), os.environ["XDG_CACHE_HOME"]]
    assert subprocess.run(words, capture_output=True, check=False).stdout == b""
    assert CANARY not in got.said + got.out


def test_a_build_behind_a_proxy_with_its_own_certificates(project, wheels, monkeypatch, tmp_path):
    """The index is reached through the proxy alone; without --ca-file nothing is trusted."""
    ca, server = certificates(tmp_path, "wheels.example.com")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server)
    index = Index(wheels.folder, context=context)
    proxy = Proxy(index.port)
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        project.write("https://wheels.example.com/simple")
        refused = project.build("--no-resolve", code=2).said
        trusted = project.build("--ca-file", str(ca)).name
    finally:
        proxy.close()
        index.close()

    assert "certificate" in refused.lower()
    assert any(line.startswith("CONNECT wheels.example.com:443") for line in proxy.asked)
    assert run_entrypoint(trusted) == "hello 10001 test"


def test_run_in_a_container_keeps_outputs_and_a_lock_that_runs_it_again(project, wheels, monkeypatch):
    """The entrypoint and another command in one image, with a volume, variables and outputs."""
    (project.folder / "data").mkdir()
    (project.folder / "data" / "x").write_text("from the host")
    with (project.folder / "envscaler.yaml").open("a") as file:
        file.write(
            f"volumes: [{{name: data, source: 'hostPath:{project.folder}/data', mount_path: /data, "
            "access_mode: ReadOnly}]\noutputs: {note: /output/note}\n"
        )
    (project.folder / "data").chmod(0o755)
    project.folder.chmod(0o755)

    def run(*words: str, code: int = 0) -> str:
        got = CliRunner().invoke(main, ["run", "-f", "envscaler.yaml", "--target", "docker", *words])
        assert got.exit_code == code, got.output
        return got.stdout

    monkeypatch.setenv("ENVSCALER_BUILDER", "buildah")
    assert run("--name", "first") == "hello 10001 test\n"
    assert (
        run("--name", "second", "--", "sh", "-c", "cat /data/x; echo made > /output/note")
        == "from the host\n"
    )
    assert (project.folder / "envscaler-outputs" / "second" / "output" / "note").read_text() == "made\n"
    run("--name", "third", "--", "sh", "-c", "exit 7", code=7)
    newer = write_wheel(wheels.folder, "greeting", "1.1", "newer")
    try:
        assert run("--name", "fourth") == "newer 10001 test\n"
        assert run("--name", "fifth", "--locked", "first") == "hello 10001 test\n"
    finally:
        newer.unlink()


@pytest.fixture
def recipe(project, wheels):
    """Runs a block of the how-to with a shell, in the folder of a stage whose tests need pytest."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels.folder), "pytest"]
    subprocess.run(words, check=True, timeout=120)
    (project.folder / "requirements.txt").write_text("greeting>=1\npytest\n")
    (project.folder / "work" / "test_main.py").write_text(
        "import greeting\n\ndef test_text():\n    assert greeting.text == 'hello'\n"
    )
    with (project.folder / "envscaler.yaml").open("a") as file:
        file.write("targets: {serving: {env: {MODE: serving}}}\n")
    blocks = dict(re.findall(r"<!-- recipe: (\w+) -->\n```sh\n(.*?)```", HOW_TO.read_text(), re.DOTALL))
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "REGISTRY": project.registry,
        "ENVSCALER_BUILDER": "buildah",
        "ENVSCALER_INSECURE": "1",
    }

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-euo", "pipefail", "-c", blocks[name]]
        return subprocess.run(
            command, cwd=project.folder, env=os.environ | env, capture_output=True, text=True, check=False
        )

    return run


def test_the_recipes_of_the_how_to_work(recipe, project):
    """CI validates, builds, tests and pushes; CD builds the serving variant and renders the deployment."""
    ci, cd = recipe("ci"), recipe("cd")

    assert ci.returncode == 0, ci.stdout + ci.stderr
    assert "1 passed" in ci.stdout
    assert cd.returncode == 0, cd.stdout + cd.stderr
    _, job = yaml.safe_load_all((project.folder / "job.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert re.fullmatch(rf"{project.registry}/team/serve:\w+@sha256:\w+", container["image"])
    assert {"name": "MODE", "value": "serving"} in container["env"]


def test_the_ci_recipe_pushes_nothing_whose_tests_fail(recipe, project):
    """The first failing command ends it."""
    (project.folder / "work" / "test_main.py").write_text("def test_text():\n    assert False\n")

    done = recipe("ci")

    assert done.returncode == 2
    assert "1 failed" in done.stdout
    assert "pushing" not in done.stderr


def certificates(folder: Path, host: str) -> tuple[Path, Path]:
    """A certificate authority's file, and a server's key with the certificate that it signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def made(subject: str, key, issuer: str, by, *extensions):
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=name(issuer), subject_name=name(subject), public_key=key.public_key(),
            serial_number=x509.random_serial_number(), not_valid_before=now - dt.timedelta(days=1),
            not_valid_after=now + dt.timedelta(days=2),
        )  # fmt: skip
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, critical=is_critical)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    ca = made(
        "ca",
        authority,
        "ca",
        authority,
        (x509.BasicConstraints(ca=True, path_length=None), True),
        (usage, True),
    )
    names = x509.SubjectAlternativeName([x509.DNSName(host)])
    leaf = made(
        host, key, "ca", authority, (names, False), (x509.BasicConstraints(ca=False, path_length=None), True)
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "ca.crt").write_bytes(ca)
    (folder / "server.crt").write_bytes(secret + leaf)
    return folder / "ca.crt", folder / "server.crt"
