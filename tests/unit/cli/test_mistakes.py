"""The shell's answer to usual mistakes: what is wrong, where, the value, and what to write."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import NewGeneration
from envscaler_airflow.store import open_store
from envscaler_airflow.store.run import Run

SPEC = """version: v1
name: toy
resources: {requests: {cpu: 1, memory: 64Mi}}
workdir: .
entrypoint: [python, train.py]
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a command in a folder with a spec and its code; returns the exit code and the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("print('hi')\n")
    (tmp_path / "store").mkdir()

    def call(*words, spec=SPEC):
        (tmp_path / "envscaler.yaml").write_text(spec)
        got = CliRunner().invoke(main, list(words))
        assert got.exception is None or isinstance(got.exception, SystemExit)
        return got.exit_code, got.output

    return call


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("plan --budget 5$", "'5$' is not a number; write one without a unit, such as 25"),
        ("plan --nodes n.json", "'n.json': no such file; `kubectl get nodes -o json > n.json` writes it"),
        ("plan --offers o.csv", "o.csv: cannot be read (No such file or directory); write the path of"),
        ("run --locked l.json", "--locked l.json: no such file; `envscaler build --lock l.json` writes it"),
        ("run --target kubernetes", "run is for this machine; write `envscaler submit --backend kubernetes`"),
        ("run t.yaml", "'t.yaml' would be the command of the stage; a spec is -f t.yaml"),
        ("plan train.yml", "extra argument (train.yml); a spec is -f FILE"),
        ("kubernetes rbac --namespace Bad_NS", "--namespace: Kubernetes refuses the name 'Bad_NS'; write"),
        ("status --store http://h/x", "nothing can be written over http; write file:///path, s3://bucket/path"),
        ("status --store sftp://h/x", 'requires "paramiko" to be installed; install what it names'),
        ("registry pull team/x@1", "; `envscaler registry list` lists what is published"),
        ("submit --image i", "`kubectl config get-contexts` lists the contexts; name the file by KUBECONFIG"),
        ("submit", "or --image (`envscaler submit --image`)"),
        ("status --store /no/store", "it is not mounted here; mount it, or name the store"),
    ],
)  # fmt: skip
def test_an_answer_says_what_to_write(shell, words, answer):
    """Their messages named only what was wrong (F)."""
    code, text = shell(*words.split())

    assert code == 2
    assert answer in " ".join(text.split())


@pytest.mark.parametrize(
    ("entrypoint", "answer"),
    [
        ("[python, trian.py]", "; write train.py"),
        ("[python, /app/train.py]", "; write a path below the workdir, such as train.py"),
        ("[python train.py]", "; write each word apart: [python, train.py]"),
    ],
)
def test_a_script_that_is_missing_is_refused_before_anything_runs(shell, tmp_path, entrypoint, answer):
    """An attempt started, and Python's own error was the answer (F)."""
    code, text = shell("run", spec=SPEC.replace("[python, train.py]", entrypoint))

    assert (code, answer in text) == (2, True), text
    assert "generation" not in text


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ("entrypoint: [pyhton, train.py]", "there is no command 'pyhton' on this machine; write python"),
        (
            "entrypoint: [python, train.py, '{{ inputs.data }}']",
            "inputs: data is not given; add --input data=URI",
        ),
    ],
)
def test_dry_run_names_what_run_would_stumble_over(shell, more, answer):
    """The dry run printed "nothing missing", and the run failed (F4)."""
    code, text = shell("dry-run", spec=SPEC.replace("entrypoint: [python, train.py]", more))

    assert (code, answer in text) == (1, True), text


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ("env: [EPOCHS=3]", "env[0]: got 'EPOCHS=3'; write a map, such as {name: EPOCHS, value: \"3\"}"),
        ("outputs: [/output/model]", "outputs: got a list; write a map, such as {model: /output/model}"),
        ("scaling: fast", "scaling: got 'fast'; write a map, such as {policy: cost-to-finish}"),
    ],
)
def test_what_is_no_map_gets_an_example_of_one(shell, more, answer):
    """The words "write a map" did not show what map (F)."""
    assert answer in shell("validate", spec=f"{SPEC}{more}\n")[1]


def test_the_demo_refuses_params_that_its_dag_does_not_have(shell):
    """It ran for minutes and ignored them (F)."""
    assert "parameters: foo: is not declared by the spec" in shell("demo", "--set", "foo=1")[1]
    assert "epochs: 0 is out of bounds" in shell("demo", "--set", "epochs=0")[1].replace("'", "")


def test_init_says_where_the_next_command_is_typed(shell):
    """In the folder that it created and names (F)."""
    assert "next: cd 'a b', then envscaler validate, then envscaler run" in shell("init", "a b")[1]
    assert "next: envscaler validate" in shell("init", "--force", ".")[1]


def test_explain_without_a_check_says_so_as_json_too(shell, tmp_path):
    """Nothing was printed at all (F6)."""
    log = Run(open_store(f"file://{tmp_path}/store"), "d/shell/one/toy/-1").events
    log.append(0, NewGeneration(generation=1, spec_hash="0", reason="first"), actor=Actor("t"))

    for words in ((), ("--json",)):
        assert (
            "no scaling check is recorded: the stage has no ScalingSensor"
            in shell("explain", "one", *words)[1]
        )
