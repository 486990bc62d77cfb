"""Short worlds of one attempt without owner or cloud; this module, run, prints their facts as JSON.

:mod:`tests.simulation.test_node` starts it, because clocks are replaced before the project is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests.simulation import kernel, patches

if __name__ == "__main__":
    patches.install()

from envscaler_agent.protocol import Control, control_name
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.launch import Launch, Paths, SessionSettings
from envscaler_airflow.planning.offers import Allocation, Offer
from tests.simulation.node import SimNode
from tests.simulation.store import SimStore

PREFIX = "deployment/dag/run/task/-1"
HOUR = 3600.0
OFFER = Offer("aws", "us-east-1", "small", "spot", 2.0, 8.0, usd_per_hour=1.0, price_source="simulated")
PATTERNS = {"step": r"step (\d+)", "total_steps": r"of (\d+)"}


class Scene:
    """A store, a lease that is renewed, and the machines of one run."""

    def __init__(self, *, nodes: int = 1, seed: int = 1, max_nodes: int | None = None, **env: object) -> None:
        """Begin with *env* for the program: ``style="saver"`` is ``SIM_STYLE``."""
        self.world = kernel.World(seed)
        self.store = SimStore(self.world)
        self.nodes, self.max_nodes = nodes, max_nodes
        self.env = {f"SIM_{name.upper()}": str(value) for name, value in env.items()}
        self.is_owned = True
        self.machines: list[SimNode] = []
        self._number = 0

    def play(self, act: Callable[[], Any]) -> Any:
        """Run *act* as an actor; returns its facts."""
        facts: list[Any] = []
        with patches.running(self.world):
            self.world.spawn("owner", lambda: facts.append(act()), machine=kernel.Machine("owner"))
            self.world.spawn("lease", self._renew, machine=kernel.Machine("owner"))
            self.world.run(until=self.world.now + 48 * HOUR, is_over=lambda: bool(facts))
        return facts[0]

    def _renew(self) -> None:
        while True:
            self._number += 1
            if self.is_owned:
                self._write("lease/run.json", b'{"schema":"2.0","counter":%d}' % self._number)
            self.world.sleep(60.0)

    def ask(self, attempt: int, action: str, candidates: tuple[str, ...] = ()) -> None:
        """Write a control."""
        self._number += 1
        control = Control(sequence=self._number, action=action, candidates=candidates, grace_s=60.0)
        self._write(control_name(1, attempt), control.to_json())

    def _write(self, name: str, data: bytes) -> None:
        self.store.put("write", f"{PREFIX}/{name}", data, None, kernel.Machine("owner"))

    def start(self, attempt: int, node: int) -> SimNode:
        """Start a machine."""
        saver = self.env.get("SIM_STYLE") == "saver"
        launch = Launch(
            env=self.env,
            paths=Paths(outputs={"model": "/output/model"}, checkpoint="/output/checkpoints"),
            session=SessionSettings(every={"seconds": 600.0}, log_patterns=PATTERNS if saver else {}),
            max_nodes=self.max_nodes,
        )
        allocation = Allocation(OFFER, self.nodes)
        request = AttemptRequest("s3://simulated", PREFIX, "dag.task", 1, attempt, allocation, launch=launch)
        machine = kernel.Machine(f"m{len(self.machines)}")
        found = SimNode(self.world, self.store, request, node, machine, lambda: None)
        self.machines.append(found)
        found.begin()
        return found

    def begin(self, attempt: int, candidates: tuple[str, ...] = ()) -> list[SimNode]:
        """Start an attempt."""
        self.ask(attempt, "run", candidates)
        return [self.start(attempt, node) for node in range(self.nodes)]

    def await_ends(self, *nodes: SimNode) -> list[str]:
        """Reasons of the ends of *nodes*."""
        self.world.wait(lambda: all(node.end is not None for node in nodes), every_s=10.0, most_s=24 * HOUR)
        return [node.end.reason if node.end is not None else "none" for node in nodes]

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Names of the complete checkpoints, newest first."""
        names = {name.split("/")[6] for name in self.store.objects if "/manifest-c" in name}
        return tuple(sorted(names, reverse=True))


def drained(style: str) -> Mapping[str, Any]:
    """An attempt is asked to drain after 3,000 s; the next one continues."""
    scene = Scene(style=style)

    def act() -> Mapping[str, Any]:
        (first,) = scene.begin(1)
        scene.world.sleep(3000.0)
        scene.ask(1, "drain")
        ends = scene.await_ends(first)
        scene.ask(2, "hold")
        (second,) = scene.begin(2, scene.checkpoints)
        ends += scene.await_ends(second)
        return {
            "ends": ends,
            "trained": first.trained[-1][-1],
            "newest": scene.checkpoints[-1],
            "restored": [name for *_, name in second.restores],
            "begins": second.trained[0][-1],
            "saved": first.saves[-1][-1] if first.saves else None,
            "outputs": [name for name in scene.store.objects if name.endswith("model/manifest.json")],
        }

    return scene.play(act)


def lost_node(max_nodes: int | None) -> Mapping[str, Any]:
    """Node 1 of two is lost after 2,000 s and replaced 1,400 s later."""
    scene = Scene(nodes=2, max_nodes=max_nodes, style="session" if max_nodes is None else "saver", seed=4)

    def act() -> Mapping[str, Any]:
        first, second = scene.begin(1)
        scene.world.sleep(2000.0)
        together = [one.trained[-1][-1] for one in (first, second)]
        second.lose()
        scene.world.sleep(200.0)
        steps = [first.trained[-1][-1]]
        scene.world.sleep(1200.0)
        steps.append(first.trained[-1][-1])
        is_alive = first.end is None
        third = scene.start(1, 1)
        ends = scene.await_ends(first, third)
        claims = sorted(name.rpartition("/")[2] for name in scene.store.objects if "/claims/" in name)
        return {"together": together, "steps": steps, "is_alive": is_alive, "ends": ends, "claims": claims}

    return scene.play(act)


def second_rank_0() -> Mapping[str, Any]:
    """Node 0 of two stands still, and is replaced by another machine."""
    scene = Scene(nodes=2, seed=4)

    def act() -> Mapping[str, Any]:
        first, second = scene.begin(1)
        scene.world.sleep(2000.0)
        scene.world.halt(first.machine)
        scene.start(1, 0)
        began = scene.world.now
        (end,) = scene.await_ends(second)
        return {"end": end, "after_s": scene.world.now - began}

    return scene.play(act)


def killed_sidecar(point: int) -> Mapping[str, Any]:
    """The sidecar dies at its effect number *point*, and is started again."""
    scene = Scene(steps=300, step_s=5.0)
    counted = [0]
    world, real = scene.world, scene.world.point

    def count(what: str) -> None:
        if world.current is not None and world.current.kind == "sidecar":
            counted[0] += 1
            if counted[0] == point:
                world.kill(world.current, f"before {what}")
        real(what)

    world.point = count  # type: ignore[method-assign]

    def act() -> Mapping[str, Any]:
        (node,) = scene.begin(1)
        ends = scene.await_ends(node)
        claims = [name for name in scene.store.objects if "/claims/" in name]
        return {"ends": ends, "claims": len(claims), "checkpoints": len(scene.checkpoints)}

    return scene.play(act)


def orphaned() -> Mapping[str, Any]:
    """The lease stands still."""
    scene = Scene(steps=5000)

    def act() -> Mapping[str, Any]:
        (node,) = scene.begin(1)
        scene.world.sleep(1000.0)
        scene.is_owned = False
        began = scene.world.now
        ends = scene.await_ends(node)
        return {"ends": ends, "after_s": scene.world.now - began, "saved": node.saves[-1][-1]}

    return scene.play(act)


def signalled() -> Mapping[str, Any]:
    """The machine gets SIGTERM, as before a preemption."""
    scene = Scene()

    def act() -> Mapping[str, Any]:
        (node,) = scene.begin(1)
        scene.world.sleep(1000.0)
        node.signal(60.0)
        ends = scene.await_ends(node)
        return {"ends": ends, "trained": node.trained[-1][-1], "newest": scene.checkpoints[0]}

    return scene.play(act)


def killed_wrapper() -> Mapping[str, Any]:
    """The kernel kills the wrapper; its machine reports that, and the sidecar uploads what was saved."""
    scene = Scene()

    def act() -> Mapping[str, Any]:
        (node,) = scene.begin(1)
        scene.world.sleep(1000.0)
        scene.world.rates["crash-wrapper"] = 1.0
        ends = scene.await_ends(node)
        saved = [name for *_, name in node.saves]
        return {"ends": ends, "saved": saved, "checkpoints": list(scene.checkpoints)}

    return scene.play(act)


def torn() -> Mapping[str, Any]:
    """The newest checkpoint of a drained attempt loses bytes in the store."""
    scene = Scene(steps=600)

    def act() -> Mapping[str, Any]:
        (first,) = scene.begin(1)
        scene.world.sleep(2000.0)
        scene.ask(1, "drain")
        scene.await_ends(first)
        newest, before = scene.checkpoints[:2]
        scene.store.tear(f"{PREFIX}/checkpoints/{newest}")
        (second,) = scene.begin(2, scene.checkpoints)
        ends = scene.await_ends(second)
        return {"ends": ends, "before": before, "restored": [name for *_, name in second.restores]}

    return scene.play(act)


def lines(seed: int) -> list[str]:
    """The timeline of a world with faults."""
    scene = Scene(nodes=2, seed=seed)
    scene.world.rates = {"crash-sidecar": 0.01, "store-refuse": 0.05, "train-nan": 0.1, "disk-full": 0.05}

    def act() -> None:
        scene.await_ends(*scene.begin(1))

    scene.play(act)
    return [str(line) for line in scene.world.lines]


def facts() -> Mapping[str, Any]:
    """What happened in every scene."""
    return {
        "drained session": drained("session"),
        "drained saver": drained("saver"),
        "lost node": lost_node(None),
        "lost elastic node": lost_node(2),
        "second rank 0": second_rank_0(),
        "killed sidecar": [killed_sidecar(point) for point in range(1, 60, 4)],
        "orphaned": orphaned(),
        "signalled": signalled(),
        "torn": torn(),
        "killed wrapper": killed_wrapper(),
        "lines": [lines(7), lines(7), lines(8)],
    }


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
