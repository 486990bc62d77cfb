"""The status of a pod, derived from its containers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fakes.kubernetes.objects import Object, condition, set_condition
from fakes.kubernetes.programs import Execution

Role = Literal["init", "sidecar", "main"]


@dataclass(slots=True)
class Container:
    """One container of a pod that a kubelet runs.

    Attributes:
        state: As the API shows it: waiting, running or terminated.
        backoff: How often it was restarted after a failure or could not be pulled.
        again: It has ended and is about to be restarted.
    """

    spec: Object
    role: Role
    state: Object
    last_state: Object = field(default_factory=dict)
    restarts: int = 0
    backoff: int = 0
    execution: Execution | None = None
    killed: str = ""
    again: bool = False
    resources: Object = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in the pod."""
        return str(self.spec["name"])

    @property
    def is_running(self) -> bool:
        """Return whether it runs now."""
        return "running" in self.state

    @property
    def began(self) -> bool:
        """Return whether it has run at all."""
        return "waiting" not in self.state or bool(self.last_state)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, None before its end."""
        ended = self.state.get("terminated")
        return None if ended is None else int(ended["exitCode"])

    @property
    def is_ready(self) -> bool:
        """An init container is ready when it has succeeded, any other while it runs."""
        return self.exit_code == 0 if self.role == "init" else self.is_running

    def shown(self) -> Object:
        """Its entry in the pod's status."""
        known = self.began
        entry: Object = {
            "name": self.name,
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.is_ready,
            "restartCount": self.restarts,
            "image": self.spec["image"],
            "imageID": f"sha256:{abs(hash(self.spec['image'])):064x}" if known else "",
            "started": self.is_running,
        }
        if known:
            entry["containerID"] = f"containerd://{abs(hash((self.name, self.restarts))):064x}"
            if self.resources.get("requests"):
                entry["allocatedResources"] = dict(self.resources["requests"])
            entry["resources"] = self.resources
        return entry


def draw(
    pod: Object, containers: list[Container], phase: str, now: float, *, sandbox: bool, failing: bool = False
) -> None:
    """Write phase, conditions and container statuses into *pod*; other conditions stay, first."""
    status = pod["status"]
    generation = pod["metadata"].get("generation", 1)
    inits = [one for one in containers if one.role != "main"]
    mains = [one for one in containers if one.role == "main"]
    others = [one for one in status.get("conditions") or () if one["type"] not in _OWN]
    scheduled = condition(pod, "PodScheduled")
    drawn: Object = {"status": {"conditions": list(status.get("conditions") or ())}}
    for fresh in _conditions(phase, inits, mains, sandbox=sandbox, failing=failing):
        set_condition(drawn, fresh | {"observedGeneration": generation}, now)
    by_type = {one["type"]: one for one in drawn["status"]["conditions"]}
    status["conditions"] = [
        *others,
        *(by_type[name] for name in _OWN if name in by_type and name != "PodScheduled"),
    ]
    if scheduled is not None:
        status["conditions"].append(scheduled | {"observedGeneration": generation})
    status["observedGeneration"] = generation
    status["phase"] = phase
    status["containerStatuses"] = [one.shown() for one in mains]
    if inits:
        status["initContainerStatuses"] = [one.shown() for one in inits]


_OWN = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")


def _conditions(
    phase: str, inits: list[Container], mains: list[Container], *, sandbox: bool, failing: bool
) -> list[Object]:
    final = failing or phase in {"Succeeded", "Failed"} or _all_ended(inits, mains)
    failed = failing or _has_failed(phase, inits, mains)
    reason = "PodFailed" if failed else "PodCompleted"
    incomplete = [one.name for one in inits if not (one.is_ready or (one.role == "sidecar" and one.began))]
    unready = [one.name for one in [*inits, *mains] if one.role != "init" and not one.is_ready]
    initialized: Object = {"type": "Initialized", "status": "True"}
    if incomplete and not all(one.began for one in mains):
        text = f"containers with incomplete status: [{' '.join(incomplete)}]"
        initialized |= {"status": "False", "reason": "ContainersNotInitialized", "message": text}
    elif final and not failed:
        initialized["reason"] = "PodCompleted"
    ready: Object = {"status": "True"}
    if final:
        ready = {"status": "False", "reason": reason}
    elif unready:
        text = f"containers with unready status: [{' '.join(unready)}]"
        ready = {"status": "False", "reason": "ContainersNotReady", "message": text}
    return [
        {"type": "PodReadyToStartContainers", "status": "True" if sandbox else "False"},
        initialized,
        {"type": "Ready"} | ready,
        {"type": "ContainersReady"} | ready,
    ]


def _all_ended(inits: list[Container], mains: list[Container]) -> bool:
    if any(one.again for one in [*inits, *mains] if one.role != "sidecar"):
        return False
    if any(one.role == "init" and one.exit_code for one in inits):
        return True
    return all(one.exit_code is not None for one in mains) and not any(one.is_running for one in inits)


def _has_failed(phase: str, inits: list[Container], mains: list[Container]) -> bool:
    if phase in {"Failed", "Succeeded"}:
        return phase == "Failed"
    return any(one.exit_code for one in mains) or any(one.role == "init" and one.exit_code for one in inits)
