"""What only a machine with an NVIDIA GPU can tell: metrics, overhead, out-of-memory, checkpoint speed.

``python benchmarks/gpu.py [--seconds S] [--pairs N] [--gib G] [--json FILE]``

It needs a driver, nvidia-ml-py and a torch with CUDA. If one is missing, it reports that and measures
nothing.

- metrics: of every GPU, with its performance monitors where it has them, while a matrix product keeps one
  busy: which are reported, which are not, and the cost of one round of queries.
- overhead: the same training step on the GPU, alternately bare and under the agent; median of the ratios of
  wall time per step with a 95 % interval by the bootstrap, as in benchmarks/agent.py.
- memory: more than the GPU has, and more than the machine has; the agent must distinguish the two.
- checkpoint: seconds and GB/s of a state of G GiB from the GPU to a file and back, by ``torch.save``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agent import interval, wrapped
from envscaler_agent.gpu import Gpus, load_nvml
from envscaler_agent.protocol import Status

BUSY = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    for _ in range(10):
        a @ a
    torch.cuda.synchronize()
"""
TRAIN = """
import sys, time, torch
steps, cooperates = int(sys.argv[1]), sys.argv[2] == "1"
if cooperates:
    from envscaler_agent import Session
    session = Session().__enter__()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(256, 2048, device="cuda")
def step():
    optimizer.zero_grad(set_to_none=True)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss
for _ in range(50):
    step()
torch.cuda.synchronize()
start = time.monotonic()
for _ in range(steps):
    loss = step()
    if cooperates:
        session.step(samples=256, loss=loss)
        session.checkpoint(lambda folder: None)
torch.cuda.synchronize()
print((time.monotonic() - start) / steps)
"""
TOO_MUCH = {
    "cuda-out-of-memory": (
        "import torch\nheld = []\n"
        "while True: held.append(torch.empty(1 << 30, dtype=torch.uint8, device='cuda'))"
    ),
    "out-of-memory": "import torch\ntorch.zeros(1 << 50, dtype=torch.uint8)",
}
"""The outcome that the agent must report."""
SAVE = """
import os, sys, time, torch
path, size = sys.argv[1] + "/state.pt", int(float(sys.argv[2]) * (1 << 30))
state = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
start = time.monotonic()
with open(path, "wb") as file:
    torch.save(state, file)
    os.fsync(file.fileno())
saved = time.monotonic()
torch.load(path, map_location="cuda")
torch.cuda.synchronize()
print(saved - start, time.monotonic() - saved)
"""


def missing() -> str | None:
    """What this machine lacks; None when nothing is missing."""
    if load_nvml() is None:
        return "no GPU here: NVML does not start (no NVIDIA driver, or nvidia-ml-py is missing)"
    if importlib.util.find_spec("torch") is None:
        return "there is a GPU, but no torch in this environment: pip install torch"
    import torch  # noqa: PLC0415 - seconds to import, and optional

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU (a CPU build?)"


def python(code: str, *arguments: str) -> list[str]:
    """A command that runs *code*."""
    return [sys.executable, "-c", code, *arguments]


def metrics(seconds: float) -> dict[str, Any]:
    """The metrics of the GPUs while one is busy, and the cost of a query."""
    nvml = load_nvml()
    gpus = Gpus(nvml).find()
    labels = {device.label: str(nvml.nvmlDeviceGetName(device.handle)) for device in gpus.devices}
    with subprocess.Popen(python(BUSY.format(seconds=seconds))) as busy:
        rounds: list[float] = []
        found: dict[str, float] = {}
        while busy.poll() is None:
            start = time.process_time()
            found.update(gpus.sample(time.monotonic()))
            rounds.append(time.process_time() - start)
            time.sleep(1.0)
    if busy.returncode:
        raise RuntimeError(f"what should keep the GPU busy ended with {busy.returncode}")
    return {
        "gpus": labels,
        "driver": str(nvml.nvmlSystemGetDriverVersion()),
        "values": found,
        "has_monitors": any(name.endswith("_sm_active_percent") for name in found),
        "cpu_ms_per_round": 1000 * sum(rounds) / max(1, len(rounds)),
    }


def overhead(pairs: int, steps: int) -> dict[str, float]:
    """Additional time of a step with the agent, per cent, with its 95 % interval."""
    chance = random.Random(1)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(pairs):
            took = {}
            for on in chance.sample([False, True], 2):
                command = python(TRAIN, str(steps), "1" if on else "0")
                command = wrapped(Path(folder) / str(number), *command) if on else command
                done = subprocess.run(command, capture_output=True, check=True, text=True)
                took[on] = float(done.stdout.split()[-1])
            ratios.append(took[True] / took[False])
    return {**interval(ratios, chance), "pairs": pairs}


def told_ends() -> dict[str, str]:
    """The outcome that the agent reports for each way to request too much memory."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (expected, code) in enumerate(TOO_MUCH.items()):
            spool = Path(folder) / str(number)
            subprocess.run(wrapped(spool, *python(code)), capture_output=True, check=False)
            status = Status.from_json((spool / "wrapper.json").read_bytes(), where="wrapper.json")
            found[expected] = status.ended.reason if status.ended else "never ended"
    return found


def checkpoint(gib: float) -> dict[str, float]:
    """Seconds and GB/s of one state of the GPU to disk and back."""
    with tempfile.TemporaryDirectory() as folder:
        command = python(SAVE, folder, str(gib))
        done = subprocess.run(command, capture_output=True, check=True, text=True)
    save_s, restore_s = (float(word) for word in done.stdout.split()[-2:])
    size = gib * (1 << 30) / 1e9
    return {
        "gib": gib,
        "save_s": save_s,
        "restore_s": restore_s,
        "save_gb_per_s": size / save_s,
        "restore_gb_per_s": size / restore_s,
    }


def main() -> int:
    """Measure and print; fail when the agent reports a wrong outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the GPU is kept busy")
    parser.add_argument("--pairs", type=int, default=10, help="A/B pairs of the training")
    parser.add_argument("--steps", type=int, default=500, help="steps of each run of it")
    parser.add_argument("--gib", type=float, default=8.0, help="size of the checkpoint")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    lack = missing()
    if lack is not None:
        print(lack)
        return 0
    found = {
        "metrics": metrics(options.seconds),
        "overhead": overhead(options.pairs, options.steps),
        "ends": told_ends(),
        "checkpoint": checkpoint(options.gib),
    }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(expected == got for expected, got in found["ends"].items()) else 1


if __name__ == "__main__":
    sys.exit(main())
