"""Requirements files as published: of other tools, editors and systems."""

import codecs
import json

import pytest

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.bases import facts, fetching_packages
from envscaler_airflow.images.cuda import software, software_faults
from envscaler_airflow.images.dockerfile import render_dockerfile
from envscaler_airflow.images.dry_run import Here, missing_here
from envscaler_airflow.images.requirement_files import MAIN, read_requirements

CONDA = """\
name: any
channels: [pytorch, conda-forge, defaults]
dependencies:
  - python=3.10
  - pytorch::pytorch=2.1.0=py3.10_cuda11.8_cudnn8.7.0_0
  - numpy=1.26
  - pip
  - pip:
      - tqdm==4.66.4
prefix: /home/someone/miniconda3/envs/any
"""
GIT = "git+https://git.example.org/nlp/adapters.git@v0.1.0"


def spec_of(folder, text=None, *, name="requirements.txt", image="python:3.11-slim", **runtime):
    """A stage whose requirements file *name* contains *text*."""
    if text is not None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        runtime["requirements"] = name
    return EnvSpec.from_dict({
        "version": "v1", "name": "s", "base": {"image": image}, "runtimes": [{"type": "python", **runtime}],
        "base_dirs": {"runtimes[0].requirements": str(folder)},
    })  # fmt: skip


def read(folder, text, **more):
    """Its requirements."""
    return read_requirements(spec_of(folder, text, **more))


def refused(folder, text, **more):
    """Why they are refused."""
    with pytest.raises(SpecError) as caught:
        read(folder, text, **more)
    return str(caught.value)


def test_a_file_of_conda_says_what_to_write(tmp_path):
    """Its own channels and packages (E)."""
    message = refused(tmp_path, CONDA, name="environment.yml", package_manager="conda")

    assert (
        "environment.yml is an environment of conda, and requirements takes a file of pip; write " in message
    )
    assert 'version: "3.10", channels: [pytorch, conda-forge], packages: [pytorch::pytorch=2.1.0=' in message
    assert message.endswith("numpy=1.26], and tqdm==4.66.4 in a requirements file")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("env.txt", CONDA, "is an environment of conda"),
        ("environment.yaml", "dependencies: nonsense", "is an environment of conda"),
        (
            "spec-file.txt",
            "# platform: linux-64\n@EXPLICIT\nhttps://x/y.conda\n",
            "is an explicit list of conda",
        ),
        ("pyproject.toml", "[project]\nname = 'x'\n", "uv pip compile pyproject.toml"),
        ("poetry.lock", "[[package]]\n", "poetry export"),
        ("uv.lock", "version = 1\n", "uv export"),
        ("Pipfile", "[packages]\n", "pipenv requirements"),
        ("setup.py", "from setuptools import setup\n", "uv pip compile setup.py"),
    ],
)
def test_a_file_of_another_tool_says_how_pip_s_is_made(tmp_path, name, text, words):
    """It was copied into the image, and pip failed there (E) (feature A12)."""
    assert words in refused(tmp_path, text, name=name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("numpy @ file:///home/conda/feedstock_root/numpy-1.26/work", "write numpy==VERSION"),
        ("numpy=1.26.4=py310hb13e2d6_0", "is a pin of conda's; write numpy==1.26.4"),
        ("numpy=1.26.4", "write numpy==1.26.4"),
        ("pkg-resources==0.0.0", "delete the line"),
        ("pkg_resources==0.0.0", "delete the line"),
        ("torch==2.1.0+cu118", "write extra_index_urls: [https://download.pytorch.org/whl/cu118]"),
        ("pip install numpy", "is a command; write the packages alone"),
        (".", "installs from this machine"),
        (".[dev]", "installs from this machine"),
        ("-e .", "installs from this machine"),
        ("numpy==", "is not a requirement"),
        ("numpy 1.26", "is not a requirement"),
    ],
)
def test_a_line_that_no_image_can_install_is_refused_with_its_place(tmp_path, line, words):
    """Before a build that ends with an installer's message (E)."""
    message = refused(tmp_path, f"tqdm==4.66.4\n\n{line}\n")

    assert message.startswith("requirements.txt:3: ")
    assert words in message


@pytest.mark.parametrize(
    "text",
    [
        "--extra-index-url https://download.pytorch.org/whl/cu118\ntorch==2.1.0+cu118  # of that index\n",
        "--find-links=https://x.example.org/wheels\ntorch==2.1.0+cu118\n",
        "numpy==1.26.4 \\\n    --hash=sha256:abc \\\n    --hash=sha256:def\n",
        "requests[socks]>=2,<3 ; python_version >= '3.8'  # a note\n",
        "https://x.example.org/a-1.0-py3-none-any.whl\n",
        "a @ https://x.example.org/a-1.0-py3-none-any.whl#sha256=abc\n",
        "git+https://git@git.example.org/o/r.git@main#egg=r\n",
        "git+ssh://git@git.example.org/o/r.git\n",
        "--pre\n--no-binary :all:\n-c https://x.example.org/constraints.txt\nattrs~=23.1\nsix===1.16.0\n",
        "torch>=2.0,!=2.0.1\ndeepspeed==0.14.*\n",
        "\n# nothing yet\n",
    ],
)
def test_what_pip_reads_is_read(tmp_path, text):
    """Options, hashes, markers, addresses, extras (E)."""
    assert read(tmp_path, text).files["requirements.txt"] == text


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [("utf-8", codecs.BOM_UTF8), ("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", codecs.BOM_UTF16_BE),
     ("utf-32-le", codecs.BOM_UTF32_LE)],
)  # fmt: skip
@pytest.mark.parametrize("first", ["-r base.txt", "--extra-index-url https://x.example.org/simple"])
def test_a_byte_order_mark_belongs_to_no_name(tmp_path, encoding, mark, first):
    """The first line is an option, as pip reads it; PowerShell writes UTF-16 (E)."""
    (tmp_path / "base.txt").write_bytes(codecs.BOM_UTF8 + b"idna==3.7\n")

    found = read(tmp_path, mark + f"{first}\r\ntqdm==4.66.4\r\n".encode(encoding))

    assert found.files["requirements.txt"].startswith(first)
    assert [item.name for item in found.artefacts()].count("requirements/base.txt") == ("-r" in first)
    assert "\ufeff" not in "".join(item.text for item in found.artefacts())
    assert "installs from this machine" in refused(tmp_path, mark + "./mine\n".encode(encoding))


@pytest.mark.parametrize(
    ("line", "written"),
    [
        (f"-e {GIT}#egg=adapters", f"adapters @ {GIT}"),
        (f"--editable={GIT}#egg=adapters[gpu]&subdirectory=src", f"adapters[gpu] @ {GIT}#subdirectory=src"),
        (f"-e {GIT}#subdirectory=src&egg=adapters", f"adapters @ {GIT}#subdirectory=src"),
        (f"-e {GIT}", GIT),
        (f"-e {GIT} ; python_version > '3.8'", f"{GIT} ; python_version > '3.8'"),
    ],
)
def test_an_editable_from_git_is_installed_like_any_other(tmp_path, line, written):
    """Pip clones it into the image; uv knows no editable addresses (E)."""
    assert read(tmp_path, f"tqdm\n{line}\n").files["requirements.txt"] == f"tqdm\n{written}\n"


@pytest.mark.parametrize(
    ("text", "image", "packages"),
    [
        (f"adapters @ {GIT}\n", "python:3.11-slim", "ca-certificates git"),
        (f"-e {GIT}#egg=adapters\n", "debian:12-slim", "ca-certificates git"),
        ("git+ssh://git@git.example.org/o/r.git\n", "rockylinux:9", "ca-certificates git openssh-clients"),
        ("hg+https://hg.example.org/r\n", "ubuntu:22.04", "ca-certificates mercurial"),
    ],
)
def test_an_image_gets_what_fetches_its_requirements(tmp_path, text, image, packages):
    """A slim base has no git (E)."""
    spec = spec_of(tmp_path, text, image=image)

    dockerfile = render_dockerfile(spec, read_requirements(spec))[0].text

    assert f" {packages}\n" in dockerfile


def test_nothing_is_added_where_nothing_is_missing(tmp_path):
    """A base with git, a spec that names it, requirements of the index alone (E)."""
    assert fetching_packages(["git"], facts(spec_of(tmp_path, image="python:3.11").base)) == ()
    for text, image in ((f"adapters @ {GIT}\n", "python:3.11-bookworm"), ("tqdm\n", "python:3.11-slim")):
        spec = spec_of(tmp_path, text, image=image)
        assert "apt-get" not in render_dockerfile(spec, read_requirements(spec))[0].text
    named = spec_of(tmp_path, f"adapters @ {GIT}\n").model_copy(update={"system_packages": ("git=1:2.39",)})
    assert render_dockerfile(named, read_requirements(named))[0].text.count("git") == 1


def test_this_machine_says_that_it_has_no_git(tmp_path):
    """Where requirements are installed here (E)."""
    spec = spec_of(tmp_path, f"adapters @ {GIT}\n")
    here = Here(4, 8 << 30, 9 << 30, has_uv=lambda: True, has_program=lambda name: name != "git")

    assert any("fetched by git, not installed here" in text for text in missing_here(spec, here=here))


@pytest.mark.parametrize(
    ("lines", "chain"),
    [
        (["torch==2.0.1; os_name == 'nt'", "torch==2.7.1; sys_platform == 'linux'"], ("2.7.1", "12.6")),
        (["torch==2.7.1; sys_platform == 'win32'", "torch==2.0.1; os_name == 'posix'"], ("2.0.1", "11.7")),
        (["torch==2.7.1; python_version < '3.10'", "torch==2.0.1"], ("2.0.1", "11.7")),
        (["torch==2.7.1; platform_machine == 'aarch64'", "torch==2.0.1"], ("2.0.1", "11.7")),
        (["torch==2.7.1; extra == 'gpu'", "torch==2.0.1"], ("2.0.1", "11.7")),
        (["Torch[opt-einsum] == 2.0.1"], ("2.0.1", "11.7")),
        (["torch===2.0.1"], ("2.0.1", "11.7")),
        (["torch>=2.0.1"], (None, None)),
        (["torch @ https://download.pytorch.org/whl/cu118/torch-2.0.1%2Bcu118-cp310-cp310-linux_x86_64.whl"],
         ("2.0.1+cu118", "11.8")),
    ],
)  # fmt: skip
def test_the_pin_of_this_system_counts(tmp_path, lines, chain):
    """By its marker; in ``packages`` and in a file (E)."""
    for spec in (spec_of(tmp_path, packages=lines), spec_of(tmp_path, "\n".join(lines))):
        found = software(spec, read_requirements(spec))

        assert (found.torch, found.cuda) == chain


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("# see https://download.pytorch.org/whl/cu117\ntorch==2.7.1\n", "12.6"),
        ("torch==2.7.1  # or from https://download.pytorch.org/whl/cu118\n", "12.6"),
        ("--extra-index-url https://download.pytorch.org/whl/cu118  # old\ntorch==2.7.1\n", "11.8"),
        ("-f https://download.pytorch.org/whl/cu118/torch_stable.html\ntorch==2.7.1\n", "11.8"),
        ("--index-url=https://download.pytorch.org/whl/cpu\ntorch==2.7.1\n", None),
        (
            "--extra-index-url https://x/whl/cu118\n--extra-index-url https://x/whl/cu126\ntorch==2.7.1\n",
            "12.6",
        ),
    ],
)
def test_an_index_in_a_comment_is_none(tmp_path, text, cuda):
    """Only options name an index (E)."""
    spec = spec_of(tmp_path, text)

    assert software(spec, read_requirements(spec)).cuda == cuda


def test_a_gpu_is_refused_by_the_pin_of_this_system_alone(tmp_path):
    """As ``plan`` reads it (E)."""
    pins = ("torch=={}; sys_platform == 'darwin'", "torch=={}; sys_platform == 'linux'")
    lines = [pin.format(version) for pin, version in zip(pins, ("2.0.1", "2.7.1"), strict=True)]
    swapped = [pin.format(version) for pin, version in zip(pins, ("2.7.1", "2.0.1"), strict=True)]
    good, bad = spec_of(tmp_path, packages=lines), spec_of(tmp_path, packages=swapped)

    assert software_faults(good, read_requirements(good))("H100") is None
    assert "no kernels for H100" in software_faults(bad, read_requirements(bad))("H100")


def test_a_rendering_holds_no_mark_and_no_editable(tmp_path):
    """The file in the image is the file that was read (E)."""
    spec = spec_of(tmp_path, codecs.BOM_UTF8 + f"-e {GIT}#egg=adapters\n".encode())

    files = {item.name: item.text for item in read_requirements(spec).artefacts()}

    assert json.dumps(files) == json.dumps(
        {MAIN: "-r requirements/requirements.txt\n", "requirements/requirements.txt": f"adapters @ {GIT}\n"}
    )
