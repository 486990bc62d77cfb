"""``envscaler validate``: what is certainly wrong is a fault, with its place."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main

HEAD = "version: v1\nname: s\nentrypoint: [python, t.py]\n"
HDFS = "volumes: [{name: d, source: 'hdfs://nn:8020/x', mount_path: /d}]\n"


def validate(folder, text, *options):
    """Exit code and output."""
    path = folder / "envscaler.yaml"
    path.write_text(HEAD + text)
    got = CliRunner().invoke(main, ["validate", "-f", str(path), *options])
    return got.exit_code, got.output


def test_a_policy_that_nobody_has_is_a_fault(tmp_path):
    """With the nearest name, or all of them (F12)."""
    code, text = validate(tmp_path, "scaling: {policy: nonsense}\n")
    assert code == 2
    assert "envscaler.yaml:4: scaling.policy: 'nonsense' is not installed here; write one of cost-to" in text

    _, near = validate(tmp_path, "scaling: {policy: treshold, rules: [{metric: loss, above: 1}]}\n")
    assert "; write threshold, or install" in near


@pytest.mark.parametrize("policy", ["cost-to-finish", "deadline", "vertical"])
def test_a_policy_of_ours_is_none(tmp_path, policy):
    """All of them (F12)."""
    assert validate(tmp_path, f"scaling: {{policy: {policy}}}\n")[0] == 0


def test_hdfs_on_local_is_a_fault_where_nothing_opens_it(tmp_path, monkeypatch):
    """Validation passed, and the stage failed in setup (F12)."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    for options in ((), ("--target", "local")):
        code, text = validate(tmp_path, HDFS, *options)
        assert code == 2
        assert "envscaler.yaml:4: volumes[0].source: hdfs://nn:8020/x is HDFS" in text

    assert validate(tmp_path, HDFS, "--target", "vm")[0] == 0
    pyarrow = ModuleType("pyarrow")
    pyarrow.__spec__ = ModuleSpec("pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    assert validate(tmp_path, HDFS)[0] == 0


@pytest.mark.parametrize("words", [["run", "--name", "a"], ["dry-run"]])
def test_what_would_run_has_a_policy_that_is_installed(tmp_path, monkeypatch, words):
    """It is refused before anything is built, searched or started (D9)."""
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{tmp_path}/store")
    (tmp_path / "store").mkdir()
    (tmp_path / "envscaler.yaml").write_text(HEAD + "scaling: {policy: nonsense}\n")

    got = CliRunner().invoke(main, [*words, "-f", str(tmp_path / "envscaler.yaml")])

    assert got.exit_code == 2
    assert "scaling.policy: 'nonsense' is not installed here" in got.output


SPEEDUP = """scaling:
  max_nodes: 2
  speedup:
    - {offer: NAME, relative_to: local/cpu-1, mean: 1.7, stdev: 0.2, source: a}
"""


@pytest.mark.parametrize(
    ("name", "is_wrong"),
    [
        ("local/cpu-one", True),
        ("2 x local/cpu-1", False),
        ("3 x local/huge", True),
        ("kubernetes/big", False),
        ("1 x local/a + 1 x local/b", False),
    ],
)
def test_a_stated_speed_of_no_offer_is_a_warning(tmp_path, name, is_wrong):
    """For names of this machine's offers; the cluster checks its own (D9)."""
    code, text = validate(tmp_path, SPEEDUP.replace("NAME", name), "--target", "local")

    assert code == 0
    expected = f"on local: scaling.speedup names {name}, which matches no offer: write one of local/cpu-1"
    assert (expected in text) is is_wrong
