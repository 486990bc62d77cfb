"""What ``run --target docker`` gives to a container."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import environment, main
from envscaler_airflow.cli.environment import check_stage, container_of, outputs_folder
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import NoOfferError, SpecError
from envscaler_airflow.images.build import Built
from envscaler_airflow.images.builders import Docker, Image
from envscaler_airflow.images.dry_run import Here
from envscaler_airflow.launch import launch_of
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run_store import open_store

HERE = Here(cpus=2, memory_bytes=1 << 33, disk_bytes=1 << 33)


def stage(**body) -> EnvSpec:
    """A stage with *body*."""
    return EnvSpec.from_dict({"version": "v1", "name": "s", "base": {"image": "b"}, **body})


def volume(source: str, path: str = "/data", **more) -> dict:
    """One volume."""
    return {"name": path.strip("/").replace("/", "-"), "source": source, "mount_path": path, **more}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Start the container of a stage, with copies below the test's own folder."""
    monkeypatch.setattr(environment, "SCRATCH", tmp_path)
    store = open_store(f"file://{tmp_path}/store")

    def enter(spec: EnvSpec, **secrets: str):
        return container_of(
            launch_of(spec, 1),
            spec.resources,
            tmp_path / "kept",
            store,
            resolve_secret=lambda ref: secrets[ref[4:]],
        )

    return enter


def test_a_folder_of_the_host_is_the_folder_itself(made, tmp_path):
    """Writes go through, unless it is read-only."""
    with made(
        stage(
            volumes=[
                volume(f"hostPath:{tmp_path}", "/a"),
                volume(f"hostPath:{tmp_path}", "/b", access_mode="ReadOnly"),
            ]
        )
    ) as (container, _):
        assert container.mounts == ((str(tmp_path), "/a", False), (str(tmp_path), "/b", True))


def test_what_a_sidecar_copies_in_is_copied_and_goes_afterwards(made, tmp_path):
    """A folder, and one file under the mount's own name; every user may read them, none may write."""
    source = tmp_path / "corpus"
    (source / "deep").mkdir(parents=True, mode=0o700)
    (source / "deep" / "x.txt").write_text("x")
    (source / "deep" / "x.txt").chmod(0o600)
    spec = stage(
        volumes=[volume(f"file://{source}"), volume(f"file://{source}/deep/x.txt", "/one/vocabulary.txt")]
    )

    with made(spec) as (container, _):
        (folder, at, is_read_only), (file, file_at, _) = container.mounts
        assert (at, file_at, is_read_only) == ("/data", "/one/vocabulary.txt", True)
        assert Path(folder, "deep", "x.txt").read_text() == Path(file).read_text() == "x"
        assert Path(folder, "deep", "x.txt").stat().st_mode & 0o777 == 0o644
        assert Path(folder, "deep").stat().st_mode & 0o005 == 0o005

    assert not Path(folder).exists()
    assert (source / "deep" / "x.txt").exists()


def test_variables_secrets_and_limits_are_those_of_the_spec(made):
    """The limits, not the requests: a request is only a minimum."""
    spec = stage(
        env=[{"name": "A", "value": "1"}, {"name": "KEY", "value_from": "env:TOKEN"}],
        resources={
            "requests": {"cpu": 1, "memory": "1Gi", "gpu": {"count": 2}},
            "limits": {"cpu": "1500m", "memory": "2Gi"},
            "shm_size": "64Mi",
        },
        outputs={"model": "/output/model"},
    )

    with made(spec, TOKEN="canary") as (container, _):
        assert container.env == {"A": "1", "KEY": "canary"}
        assert (container.cpus, container.memory_bytes, container.shm_bytes) == (1.5, 2 << 30, 64 << 20)
        assert container.gpus == 2
        ((kept, path, is_read_only),) = container.mounts
        assert (path, is_read_only) == ("/output", False)
        assert Path(kept).is_dir()


def test_what_no_container_here_can_have_is_told_at_once(tmp_path):
    """A claim, an export that is not mounted, an absent folder, several nodes: each with the fix."""
    spec = stage(
        num_nodes=2,
        volumes=[
            volume("pvc://claim", "/a"),
            volume("nfs://host/path", "/no-such-mount"),
            volume(f"hostPath:{tmp_path}/absent", "/c"),
            volume(f"hostPath:{tmp_path}", "/d"),
        ],
    )

    with pytest.raises(SpecError) as caught:
        check_stage(spec, HERE)

    assert [fault.partition(";")[0] for fault in caught.value.faults] == [
        "volumes: a: pvc://claim is a claim of Kubernetes",
        "volumes: no-such-mount: nfs://host/path is not mounted at /no-such-mount",
        f"volumes: c: {tmp_path}/absent does not exist here",
        "num_nodes: 2: one container is one node",
    ]


def test_an_export_that_is_mounted_at_its_path_is_taken_from_there(made):
    """The machine's own mount; the run mounts nothing itself."""
    spec = stage(volumes=[volume("nfs://host/path", "/mnt/data")])

    check_stage(spec, replace(HERE, is_mounted=lambda path: path == "/mnt/data"))
    with made(spec) as (container, _):
        assert container.mounts == (("/mnt/data", "/mnt/data", False),)


def test_a_stage_that_wants_a_gpu_runs_on_none_only_when_it_says_so(monkeypatch, tmp_path):
    """The error comes before the build."""
    monkeypatch.setattr(
        environment, "look_here", lambda: Here(cpus=2, memory_bytes=1 << 33, disk_bytes=1 << 33)
    )
    monkeypatch.setattr(environment, "find_builder", lambda _name: None)
    store = open_store(f"file://{tmp_path}/store")
    need = {"requests": {"gpu": {"count": 1, "type": "A100"}}}

    def run(resources):
        key = RunKey("d", "dag", "run", "task")
        spec = stage(resources=resources, volumes=[volume("pvc://claim")])
        environment.run_docker(spec, store, key, None, command=(), as_json=False)

    with pytest.raises(NoOfferError, match=r"1 x A100 requested, available here: none; .*cpu_fallback: true"):
        run(need)
    with pytest.raises(SpecError, match="claim of Kubernetes"):  # which is checked next
        run({**need, "cpu_fallback": True})


def test_packages_of_conda_are_built_as_they_are_written(monkeypatch):
    """Pip's index does not know their names, and no lock contains them."""
    built = []

    def build(_spec, requirements, *_given, **_named):
        built.append(requirements)
        return Built("s:1", Image("i", None, {}, (), ()), "c", "b", None, is_new=True)

    monkeypatch.setattr(environment, "build_image", build)
    runtime = {"type": "python", "package_manager": "conda", "packages": ["numpy=1.26"]}

    name, lock = environment._bring_image(stage(runtimes=[runtime]), None, Docker())

    assert (name, lock.requirements) == ("s:1", None)
    assert [item.locked for item in built] == [None]


def test_bases_that_this_machine_does_not_allow_start_no_container(monkeypatch):
    """A restriction of builds to certain bases also covers the images that ``run`` builds."""
    monkeypatch.setenv("ENVSCALER_ALLOWED_BASES", "python:*, debian:*")

    with pytest.raises(SpecError, match=r"base.image: b is not allowed here; write one that matches python:"):
        environment._bring_image(stage(), None, Docker())


def test_the_shell_tells_it_in_one_message(tmp_path, monkeypatch):
    """Exit code 2, and no image is built."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "find_builder", lambda _name: None)
    (tmp_path / "e.yaml").write_text(
        "version: v1\nname: s\nbase: {image: b}\nentrypoint: ['true']\n"
        "volumes: [{name: d, source: 'pvc://claim', mount_path: /d}]\n"
    )

    got = CliRunner().invoke(
        main, ["run", "-f", "e.yaml", "--target", "docker", "--store", f"file://{tmp_path}/s"]
    )

    assert got.exit_code == 2
    assert got.stderr.startswith("Error: volumes: d: pvc://claim is a claim of Kubernetes; write another")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--budget", "5"], "--budget"),
        (["--restore-from", "s3://b/ckpt", "--value-of-hour", "5"], "--value-of-hour, --restore-from"),
        (["--strategy", "balanced"], "--strategy"),
        (["--install-system"], "--install-system"),
    ],
)
def test_what_a_container_would_not_heed_is_refused(options, named, tmp_path):
    """Otherwise a budget without effect, or a restart beside a checkpoint, is discovered late."""
    got = CliRunner().invoke(
        main, ["run", "-f", "e.yaml", "--target", "docker", "--store", f"file://{tmp_path}/s", *options]
    )

    assert got.exit_code == 2
    assert got.stderr.startswith(f"Error: {named}: a container is only started and waited for")


@pytest.mark.parametrize("name", ["nightly-1", "../../etc", "/etc", "a/b", "..", "x" * 300])
def test_outputs_of_a_run_are_one_folder_below_the_working_directory(name, tmp_path, monkeypatch):
    """As the store names it: no name leads out of the folder."""
    monkeypatch.chdir(tmp_path)

    folder = outputs_folder(RunKey("d", "shell", name, "task"))

    assert folder.parent == tmp_path / "envscaler-outputs"
    assert name != "nightly-1" or folder.name == name
