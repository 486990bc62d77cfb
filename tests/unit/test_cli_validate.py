"""``envscaler validate``: what can only be wrong is a fault, with its place."""

import pytest
from click.testing import CliRunner

from envscaler_airflow.build import needs
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
    """It passed, and the stage failed in set-up (F12)."""
    monkeypatch.setattr(needs, "_has_module", lambda name: False)

    for options in ((), ("--target", "local")):
        code, text = validate(tmp_path, HDFS, *options)
        assert code == 2
        assert "envscaler.yaml:4: volumes[0].source: hdfs://nn:8020/x is HDFS" in text

    assert validate(tmp_path, HDFS, "--target", "vm")[0] == 0
    monkeypatch.setattr(needs, "_has_module", lambda name: True)
    assert validate(tmp_path, HDFS)[0] == 0
