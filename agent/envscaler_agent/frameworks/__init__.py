"""A :class:`~envscaler_agent.Session` for each of the common training frameworks.

Each has a module, which only the training code imports: :mod:`.torch`, :mod:`.transformers`,
:mod:`.lightning`, :mod:`.keras`, :mod:`.accelerate`, and :mod:`.noise` for gradient noise. They are copied
into images with the agent, run on Python 3.8 and import nothing of this project except the agent.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, Dict

ONE_TRAINING = (
    "a SessionCallback carries one training: steps of a second one could not be distinguished "
    "from the first's; make it a stage of its own"
)
"""Why a callback refuses a second training."""


def random_state() -> Dict[str, Any]:
    """Return the states of Python's generator and, where they are loaded, of numpy, torch and each GPU."""
    state: Dict[str, Any] = {"python": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), position, has_gauss, gauss]
    if torch is not None:
        state["torch"] = torch.get_rng_state().tolist()
        if torch.cuda.is_available():
            state["cuda"] = [gpu.tolist() for gpu in torch.cuda.get_rng_state_all()]
    return state


def set_random_state(state: Dict[str, Any]) -> None:
    """Restore every generator to the state that :func:`random_state` returned.

    Libraries that are not loaded here, and GPUs that this machine does not have, are skipped.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
        for device, gpu in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.tensor(gpu, dtype=torch.uint8), device)


def save_random_state(folder: Path, rank: int) -> None:
    """Write this rank's state into *folder*."""
    _file(folder, rank).write_text(json.dumps(random_state()), encoding="utf-8")


def load_random_state(folder: Path, rank: int) -> bool:
    """Restore this rank's state; False when the training that saved had no such rank."""
    path = _file(folder, rank)
    if not path.exists():
        return False
    set_random_state(json.loads(path.read_text(encoding="utf-8")))
    return True


def _file(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank:05d}.json"
