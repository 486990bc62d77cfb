"""``envscaler run`` of trainings without our library, each killed once: what the shell prints then."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.owned import Owned

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc"),
    pytest.mark.timeout(240),
]

SPEC = """
version: v1
name: {name}
resources: {{requests: {{cpu: 0.1, memory: 128Mi}}}}
workdir: .
entrypoint: [python, train.py, /output/checkpoints]
checkpoint: {{path: /output/checkpoints, every: 1s}}
metrics: {{log_patterns: {{step: 'step (\\d+)'}}}}
"""
LOOP = """
import json, os, pickle, signal, sys, time, zipfile
OUT = sys.argv[1]
os.makedirs(OUT, exist_ok=True)
def path(name):
    return os.path.join(OUT, name)
def put(name, data):
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    with open(path(name), "wb") as file:
        file.write(data)
{definitions}
begins = step = restore()
print("begins at step", step, flush=True)
while step < {steps}:
    step += 1
    time.sleep({pace})
    print("step", step, flush=True)
    each(step)
    if step == {killed_at} and not begins:
        os.kill(os.getpid(), signal.SIGKILL)
print("done at", step, flush=True)
"""
FOLDERS = """
def restore():
    found = [int(name.split("-")[1]) for name in os.listdir(OUT)]
    return pickle.load(open(path(f"checkpoint-{max(found)}/optimizer.bin"), "rb"))["step"] if found else 0
def each(step):
    if step % 10 == 0:
        for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
            put(f"checkpoint-{step}/{name}", pickle.dumps({"step": step}))
"""
LOG_BESIDE = """
def restore():
    return json.load(open(path("state.json")))["step"] if os.path.exists(path("state.json")) else 0
log = open(path("log.txt"), "a")
def each(step):
    log.write("x\\n")
    log.flush()
    if step % 30 == 0:
        put("state.json.tmp", json.dumps({"step": step}).encode())
        os.replace(path("state.json.tmp"), path("state.json"))
"""
BEST_AND_LAST = """
def save(name, step):
    with zipfile.ZipFile(path("draft.tmp"), "w") as archive:
        archive.writestr("state.json", json.dumps({"step": step}))
    os.replace(path("draft.tmp"), path(name))
def restore():
    print("finds", sorted(os.listdir(OUT)), flush=True)
    if not os.path.exists(path("last.ckpt")):
        return 0
    return json.loads(zipfile.ZipFile(path("last.ckpt")).read("state.json"))["step"]
def each(step):
    if step == 20:
        save("epoch=1-step=20.ckpt", step)
    if step % 10 == 0:
        save("last.ckpt", step)
"""
SHORT_EPOCHS = """
def restore():
    return json.load(open(path("meta.json")))["epoch"] if os.path.exists(path("meta.json")) else 0
def each(step):
    for name, data in (("weights.h5", b"x" * 4096), ("meta.json", json.dumps({"epoch": step}).encode())):
        put(name + ".tmp", data)
        os.replace(path(name + ".tmp"), path(name))
"""
BAR = """
import os, sys, time
for step in range(1, 61):
    while step > 30 and not os.path.exists("SEEN"):
        time.sleep(0.1)
    sys.stderr.write(f"\\r{step * 100 // 60:3d}%|{'#' * (step // 6)}| {step}/60 [1s, loss={1 / step:.4f}]")
    sys.stderr.flush()
    time.sleep(0.1)
sys.stderr.write("\\n")
"""
BAR_PATTERNS = """
metrics: {log_patterns: {step: '(\\d+)/60 \\[', total_steps: '\\d+/(60) \\[', loss: 'loss=([0-9.]+)'}}
"""


class Shell(Owned):
    """A run of a script, started by ``envscaler run``."""

    def __init__(self, folder: Path, script: str, spec: str) -> None:
        """Start it."""
        self._said = ""
        code = folder / "code"
        code.mkdir(parents=True)
        (code / "train.py").write_text(script)
        (code / "envscaler.yaml").write_text(spec)
        super().__init__(folder, code / "envscaler.yaml", Path(sys.executable))
        self.owner = self.start()

    def over(self) -> str:
        """Output of ``envscaler run`` after a success."""
        if not self._said:
            self._said, _ = self.owner.communicate(timeout=200)
        assert self.owner.returncode == 0, self._said
        return self._said

    def asks(self, *words: str) -> str:
        """The output in another shell."""
        command = [sys.executable, "-m", "envscaler_airflow.cli", *words]
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True).stdout

    def await_step(self) -> None:
        """Wait until the live attempt has reported a step."""
        for _ in range(1000):
            statuses = (self.folder / "store" / self.prefix()).glob("status/*.json") if self.prefix() else ()
            if any(json.loads(path.read_text())["progress"].get("step") for path in statuses):
                return
            time.sleep(0.1)
        raise AssertionError("no step was reported")

    def lines(self) -> list[dict]:
        """The attempts of ``envscaler report``."""
        return json.loads(self.asks("report", "one", "--json"))["bill"]["lines"]


def killed(definitions: str, *, at: int, steps: int, pace: float) -> str:
    """A complete training; a SIGKILL ends its first attempt after the step *at*."""
    return LOOP.format(definitions=definitions, killed_at=at, steps=steps, pace=pace)


TRAININGS = {
    "folders": killed(FOLDERS, at=38, steps=60, pace=0.1),
    "log-beside": killed(LOG_BESIDE, at=75, steps=100, pace=0.2),
    "best-and-last": killed(BEST_AND_LAST, at=77, steps=120, pace=0.1),
    "short-epochs": killed(SHORT_EPOCHS, at=25, steps=40, pace=1.0),
}


@pytest.fixture(scope="module")
def shells(tmp_path_factory):
    """All of them at once, since they wait most of the time."""
    root = tmp_path_factory.mktemp("shells")
    made = {name: Shell(root / name, text, SPEC.format(name=name)) for name, text in TRAININGS.items()}
    bar = SPEC.format(name="bar").partition("metrics:")[0].replace("checkpoint:", "# ") + BAR_PATTERNS
    made["bar"] = Shell(root / "bar", BAR.replace("SEEN", str(root / "bar/seen")), bar)
    yield made
    for shell in made.values():
        shell.close()


def test_a_bar_on_one_line_tells_the_steps_while_it_runs(shells):
    """``envscaler status`` counts before the only newline comes, and the end is that of the last (C14)."""
    shell = shells["bar"]
    shell.await_step()
    seen = shell.asks("status", "one")
    (shell.folder / "seen").touch()
    shell.over()
    end = shell.asks("status", "one")

    assert any(0 < int(step) <= 30 for step in re.findall(r"step (\d+)/60", seen)), seen
    assert "step 60/60" in end
    assert "loss 0.0167" in end


@pytest.mark.parametrize(
    ("name", "killed_at", "steps", "least"),
    [
        ("folders", 38, 60, 30),
        ("log-beside", 75, 100, 60),
        ("best-and-last", 77, 120, 70),
        ("short-epochs", 25, 40, 20),
    ],
)
def test_a_killed_training_goes_on_from_its_last_save_and_the_report_counts_what_was_lost(
    shells, name, killed_at, steps, least
):
    """By its own code, and ``envscaler report`` shows how many steps that cost (C1, C2, C4, C21)."""
    shell = shells[name]
    said = shell.over()
    begins = [int(step) for step in re.findall(r"begins at step (\d+)", said)]
    first, second = shell.lines()

    assert begins[0] == 0
    assert least <= begins[1] <= killed_at, said
    assert (first["steps"], first["lost_steps"]) == (killed_at, killed_at - begins[1]), first
    assert (second["steps"], second["lost_steps"]) == (steps - begins[1], 0), second


def test_the_best_of_long_ago_is_there_beside_the_last(shells):
    """At the path where the training wrote it (C3, C4) (feature C8)."""
    said = shells["best-and-last"].over()

    assert "finds ['epoch=1-step=20.ckpt', 'last.ckpt']" in said
