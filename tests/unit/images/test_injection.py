"""Any text in a spec stays that text in every artefact."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.cli import main
from envscaler_airflow.cli.run_commands import render_attempt
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.models import Runtime
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.artefacts import comment, dockerfile_value, yaml_text
from envscaler_airflow.images.requirement_files import Requirements, check_packages
from envscaler_airflow.images.targets import RENDERINGS, render

CANARY = "zq7canaryzq7"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "LABEL", "USER", "ENTRYPOINT", "CMD"}

MARKS = [
    "$",
    "$(",
    "${",
    '"',
    "'",
    "\\",
    "`",
    "#",
    ":",
    "- ",
    "\n",
    "{{",
    "}}",
    "%",
    "!",
    "&",
    "*",
    "|",
    ">",
    "<<",
    "@",
]
"""Text with a meaning for a shell, YAML or Docker."""
letters = st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"), include_characters="\n\t")
texts = st.lists(
    st.sampled_from(MARKS) | st.text(letters, min_size=1, max_size=5), min_size=1, max_size=8
).map("".join)


def stage(value: str, **more):
    """A stage whose variable, argument and description contain *value*."""
    body = {
        "version": "v1",
        "name": "s",
        "description": value,
        "base": {"image": "python:3.11-slim"},
        "env": [{"name": "V", "value": value}],
        "entrypoint": ["python", value],
        **more,
    }
    return EnvSpec.from_dict(body)


def texts_of(target: str, spec: EnvSpec) -> dict[str, str]:
    """Artefacts of one target."""
    return {item.name: item.text for item in render(target, spec, Requirements(), image="i:1")}


def unquoted(quoted: str) -> str:
    r"""Docker's reading of double quotes: a backslash removes the meaning of ``\\``, ``"`` and ``$``."""
    assert quoted[0] == quoted[-1] == '"'
    inner = quoted[1:-1]
    assert not re.search(r'(?<!\\)(?:\\\\)*["$]', inner), "a quote or dollar that means something"
    return re.sub(r'\\(["$\\])', r"\1", inner)


@given(texts.filter(lambda text: "\n" not in text))
def test_a_value_in_a_dockerfile_is_read_back_as_it_was(text):
    """ENV and LABEL: nothing is expanded, nothing ends early."""
    assert unquoted(dockerfile_value(text)) == text


@given(texts)
@settings(max_examples=50)
def test_no_text_adds_an_instruction_to_a_dockerfile(text):
    """Each line begins with an instruction, a comment or the indent of a continued RUN."""
    dockerfile = texts_of("dockerfile", stage(text))["Dockerfile"]

    lines = [line for line in dockerfile.split("\n") if line and not line.startswith(("#", "    "))]
    assert {line.split(" ")[0] for line in lines} <= INSTRUCTIONS
    entrypoint = next(line for line in lines if line.startswith("ENTRYPOINT "))
    assert json.loads(entrypoint.removeprefix("ENTRYPOINT ")) == ["python", text]
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]


@given(texts)
@settings(max_examples=50)
def test_yaml_is_read_back_as_it_was(text):
    """Any text under any key is the same text to a reader of YAML 1.1, and quoted for others."""
    assert yaml.safe_load(yaml_text({"key": text, "list": [text]})) == {"key": text, "list": [text]}


@pytest.mark.parametrize(
    "text", ["1e3", "0o17", "0x1f", "yes", "NO", "null", "~", "1_000", "12:30", ".5", "n", "=", "<<"]
)
def test_texts_that_look_like_something_else_are_quoted(text):
    """Readers differ on what is a number: quotes make it clear."""
    assert yaml_text({"key": text}) == f'key: "{text}"\n'


@given(texts)
@settings(max_examples=50)
def test_a_jobs_command_and_environment_are_what_was_written(text):
    """Kubernetes' own ``$(NAME)`` is escaped and nothing else changes."""
    [found] = render_attempt(stage(text), KubernetesBackend(image="i:1"))

    *_, job = yaml.safe_load_all(found.text)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-3:] == ["--", "python", text.replace("$", "$$")]
    assert {"name": "V", "value": text.replace("$", "$$")} in container["env"]


@pytest.mark.parametrize(
    "text", ["'; touch hacked; '", "$(touch hacked)", "`touch hacked`", "a\ntouch hacked\n", "\\"]
)
def test_a_shell_reads_variables_as_they_were(text, tmp_path):
    """env.sh, sourced by a real shell."""
    script = texts_of("venv", stage(text))["env.sh"]

    shown = subprocess.run(
        ["sh", "-c", f'{script}\nprintf %s "$V"'], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert shown.stdout == text
    assert list(tmp_path.iterdir()) == []


@given(texts)
@settings(max_examples=50)
def test_user_data_runs_the_command_that_was_written(text):
    """The machine's script, split as a shell splits it, ends with the user's own words."""
    data = yaml.safe_load(texts_of("vm", stage(text))["user-data"])

    script = next(file for file in data["write_files"] if file["path"].endswith("run.sh"))
    if "encoding" in script:
        return
    inside = shlex.split(script["content"].partition("set +a\n")[2])[-1]
    assert shlex.split(inside) == ["exec", "python", text]


@pytest.mark.parametrize(
    "package", ["torch --index-url https://evil.example.com", "torch\\", "torch; rm -rf /", "x /etc/passwd"]
)
def test_a_package_that_is_no_requirement_is_refused(package):
    """Options and shell words after a name are not a requirement."""
    with pytest.raises(SpecError, match="is not a valid requirement"):
        check_packages(Runtime(packages=(package,)))


def test_a_comment_cannot_leave_its_line():
    """Line breaks in a comment's text become spaces."""
    assert comment(["one\nUSER root"]) == "# one USER root\n"


@pytest.mark.parametrize("target", [*RENDERINGS, "spec", "kubernetes"])
def test_no_artefact_holds_a_secret(target, monkeypatch, tmp_path):
    """Canaries in the environment of the renderer, referred to by name, are in no rendering of any target."""
    for name in ("WANDB_API_KEY", "REGISTRY", "WHEELS"):
        monkeypatch.setenv(name, f"me:{CANARY}-{name}")
    runtime = {"type": "python", "packages": ["attrs"], "credentials": "env:WHEELS"}
    body = stage("plain", env=[
        {"name": "WANDB_API_KEY", "value_from": "env:WANDB_API_KEY"},
        {"name": "OTHER", "value_from": "secret:wandb/api-key"},
        {"name": "THIRD", "value_from": "connection:wandb/password"},
    ], base={"image": "r.example.com/base:1", "credentials": "env:REGISTRY"},
        runtimes=[{**runtime, "index_url": "https://wheels.example.com/simple"}],
    ).model_dump(mode="json", exclude_none=True, exclude_defaults=True)  # fmt: skip
    (tmp_path / "envscaler.yaml").write_text(json.dumps({**body, "version": "v1"}))
    monkeypatch.chdir(tmp_path)

    got = CliRunner().invoke(main, ["render", "--target", target, "--image", "i:1"])
    told = CliRunner().invoke(main, ["validate", "--json"])

    assert got.exit_code == told.exit_code == 0, got.output + told.output
    assert CANARY not in got.output + told.output
