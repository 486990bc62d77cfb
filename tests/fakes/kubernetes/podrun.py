"""One pod on one node, from its binding to its end."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from fakes.kubernetes import deletion
from fakes.kubernetes.clock import Timer
from fakes.kubernetes.defaults import IMAGE
from fakes.kubernetes.environment import MissingError, environment, volumes_missing
from fakes.kubernetes.objects import Object, clone, is_going, is_over, quantity, said, set_condition, stamp
from fakes.kubernetes.podstatus import Container, draw
from fakes.kubernetes.programs import infer
from fakes.kubernetes.resources import PODS

if TYPE_CHECKING:
    from fakes.kubernetes.kubelet import Kubelet

RETRY_S = 2.0
"""Seconds between checks of missing sources; the real kubelet takes 1 to 15."""
CRASH_S = 10.0
CRASH_MOST_S = 300.0
"""Restart back-off. Source: kubelet, backOffPeriod and MaxContainerBackOff."""


class PodRun:
    """The kubelet's worker for one pod."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        """Take over the pod; `begin` starts it."""
        self.kubelet = kubelet
        self.cluster = kubelet.cluster
        self.uid: str = pod["metadata"]["uid"]
        self.pod = pod
        self.phase = "Pending"
        self.sandbox = False
        self.done = False
        self.stopping = False
        self.leaving = False
        self.is_held = False
        """True until its containers are being ended."""
        self.timers: list[Timer] = []
        self.grace: Timer | None = None
        self.asked_s: float | None = None
        self.fate: Object = {}
        """Reason and message of an end decided by the kubelet or the node."""
        spec = pod["spec"]
        waiting = "PodInitializing" if spec.get("initContainers") else "ContainerCreating"
        self.containers = [
            Container(
                one,
                "sidecar" if one.get("restartPolicy") == "Always" else "init",
                {"waiting": {"reason": waiting}},
            )
            for one in spec.get("initContainers") or ()
        ]
        self.containers += [
            Container(one, "main", {"waiting": {"reason": waiting}}) for one in spec["containers"]
        ]

    def begin(self) -> None:
        """Show the pod as accepted, then continue once sandbox and volumes exist."""
        self.show(start=True)
        limit = self.pod["spec"].get("activeDeadlineSeconds")
        if limit is not None:
            text = "Pod was active on the node longer than the specified deadline"
            self.timers.append(self.cluster.clock.after(limit, lambda: self.fail("DeadlineExceeded", text)))
        self._later(self.cluster.pace.sandbox_s, self._mount)

    def _later(self, seconds: float, act: object) -> None:
        if not callable(act):
            raise TypeError(act)
        if seconds <= 0:
            self.cluster.queue.call(lambda: None if self.done else act())
        else:
            self.timers.append(self.cluster.clock.after(seconds, lambda: None if self.done else act()))

    def _mount(self) -> None:
        missing = volumes_missing(self.cluster.store, self.pod)
        if missing:
            self.say("FailedMount", missing, warning=True)
            self._later(RETRY_S, self._mount)
            return
        self.sandbox = True
        self.show(address=True)
        self.advance()

    def advance(self) -> None:
        """Start the containers that are due: init containers one by one, then all main ones."""
        if self.done or self.stopping:
            return
        for one in self.containers:
            if one.role == "main" or (one.role == "init" and one.exit_code == 0):
                continue
            if one.role == "sidecar" and (one.is_running or one.last_state or one.exit_code is not None):
                continue
            if "waiting" in one.state and not one.backoff:
                self._pull(one)
            return
        for one in self.containers:
            if one.role == "main" and "waiting" in one.state and not one.backoff and one.execution is None:
                self._pull(one)

    def _pull(self, one: Container) -> None:
        """Pull the image, or record why not and retry for ever."""
        if self.stopping:
            return
        image = one.spec["image"]
        one.backoff = max(one.backoff, 1)
        if not IMAGE.fullmatch(image):
            self._unnamable(one, image)
            return
        trouble = self.cluster.images.trouble(image)
        if trouble and one.spec.get("imagePullPolicy") == "Never":
            text = f'Container image "{image}" is not present with pull policy of Never'
            self.say("ErrImageNeverPull", text, warning=True, container=one)
            self.say("Failed", "Error: ErrImageNeverPull", warning=True, container=one)
            self.wait(one, "ErrImageNeverPull", text)
            return
        if trouble:
            self._pull_failed(one, image, trouble)
            return
        seconds = self.cluster.images.seconds(image, self.kubelet.name)
        if seconds:
            self.say("Pulling", f'Pulling image "{image}"', container=one)
            self._later(
                seconds, lambda: self._pulled(one, f'Successfully pulled image "{image}" in {seconds:g}s')
            )
        else:
            text = f'Container image "{image}" already present on machine and can be accessed by the pod'
            self._pulled(one, text)

    def _unnamable(self, one: Container, image: str) -> None:
        """An image reference that cannot be parsed is never retried."""
        text = f'Failed to apply default image tag "{image}": couldn\'t parse image name "{image}": '
        text += "invalid reference format"
        repository = image.partition("/")[2].rpartition(":")[0]
        if repository != repository.lower():
            text += f": repository name ({repository}) must be lowercase"
        self.say("InspectFailed", text, warning=True, container=one)
        self.say("Failed", "Error: InvalidImageName", warning=True, container=one)
        self.wait(one, "InvalidImageName", text)

    def _pull_failed(self, one: Container, image: str, trouble: str) -> None:
        cause = f'failed to pull and unpack image "{image}": {trouble}'
        if trouble.endswith("not found"):
            cause = f"rpc error: code = NotFound desc = {cause}"
        self.say("Pulling", f'Pulling image "{image}"', container=one)
        self.say("Failed", f'Failed to pull image "{image}": {cause}', warning=True, container=one)
        self.say("Failed", "Error: ErrImagePull", warning=True, container=one)
        self.wait(one, "ErrImagePull", cause)

        def back_off() -> None:
            text = f'Back-off pulling image "{image}"'
            self.say("BackOff", text, container=one)
            self.say("Failed", "Error: ImagePullBackOff", warning=True, container=one)
            self.wait(one, "ImagePullBackOff", f"{text}: ErrImagePull: {cause}")

        self._later(1.0, back_off)
        delay = min(CRASH_S * 2 ** (one.backoff - 1), CRASH_MOST_S)
        one.backoff += 1
        self._later(delay, lambda: self._pull(one))

    def _pulled(self, one: Container, message: str) -> None:
        self.cluster.images.keep(one.spec["image"], self.kubelet.name)
        self.say("Pulled", message, container=one)
        self._create(one)

    def _create(self, one: Container) -> None:
        """Build its environment; wait for missing sources."""
        if self.stopping or self.done:
            return
        try:
            env = environment(self.cluster.store, self.pod, one.spec)
        except MissingError as missing:
            self.say("Failed", f"Error: {missing}", warning=True, container=one)
            self.wait(one, "CreateContainerConfigError", str(missing))
            self._later(RETRY_S, lambda: self._create(one))
            return
        self.say("Created", "Container created", container=one)
        self._later(self.cluster.pace.start_s, lambda: self._start(one, env))

    def _start(self, one: Container, env: dict[str, str]) -> None:
        if self.stopping or self.done:
            return
        one.backoff = 0
        one.killed, one.again = "", False
        one.resources = clone(one.spec.get("resources") or {})
        log = self.cluster.logs.begin(self.uid, one.name)
        execution = self.cluster.execution(self, one, env)
        if isinstance(execution, str):
            self._start_failed(one, execution)
            return
        one.execution = execution
        one.state = {"running": {"startedAt": stamp(self.cluster.clock.now())}}
        self.say("Started", "Container started", container=one)
        unborn = [other for other in self.containers if other.role == "main" and not other.began]
        if not unborn:
            self.phase = "Running"
        if one.role != "main" or all("message" in other.state["waiting"] for other in unborn):
            self.show()
        one.execution.start(lambda code, oom: self.ended(one, code, oom=oom), log.write)
        self.advance()

    def _start_failed(self, one: Container, why: str) -> None:
        now = self.cluster.clock.now()
        one.execution = None
        one.state = {
            "terminated": {
                "exitCode": 128, "reason": "StartError", "message": why, "startedAt": "1970-01-01T00:00:00Z",
                "finishedAt": stamp(now),
            }
        }  # fmt: skip
        self.say("Failed", f"Error: {why}", warning=True, container=one)
        self._after_end(one)

    def ended(self, one: Container, code: int, *, oom: bool = False) -> None:
        """Record a container's end and its consequences."""
        if "running" not in one.state:
            return
        one.execution = None
        oom = oom or one.killed == "OOMKilled"
        reason = "OOMKilled" if oom else "Completed" if code == 0 else "Error"
        now = self.cluster.clock.now()
        began = one.state["running"]["startedAt"]
        one.state = {
            "terminated": {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": stamp(now)}
        }
        self.cluster.logs.end(self.uid, one.name)
        if not self.kubelet.is_alive:
            return
        self._after_end(one)

    def _after_end(self, one: Container) -> None:
        code = one.exit_code
        policy = self.pod["spec"].get("restartPolicy", "Always")
        again = one.role == "sidecar" or policy == "Always" or (policy == "OnFailure" and code != 0)
        if one.role == "init" and code == 0:
            again = False
        mains_over = all(other.exit_code is not None for other in self.containers if other.role == "main")
        if again and not self.stopping and not (one.role == "sidecar" and mains_over):
            self._restart(one)
            return
        if one.role == "init" and code != 0:
            self._finish()
            return
        self._settle(one)

    def _settle(self, one: Container) -> None:
        """After a final end: stop the sidecars once all main containers have ended, then finish."""
        if all(other.exit_code is not None for other in self.containers if other.role == "main"):
            sidecars = [other for other in self.containers if other.role == "sidecar" and other.is_running]
            if sidecars:
                self.show()
                self._stop_sidecar(sidecars[-1])
                return
            self._finish()
            return
        if self.stopping:
            if not any(other.is_running for other in self.containers):
                self._finish()
            return
        self.show()
        if one.role == "init":
            self.advance()

    def _stop_sidecar(self, one: Container) -> None:
        """SIGTERM to the last running sidecar; SIGKILL after the grace period."""
        if one.execution is None or self.is_held:
            return
        if not self.stopping:
            self.say("Killing", f"Stopping container {one.name}", container=one)
            seconds = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
            self._later(seconds, lambda: one.execution and not self.is_held and one.execution.kill())
        one.execution.terminate()

    def _restart(self, one: Container) -> None:
        """First at once, then after 10 s, 20 s, ... shown as CrashLoopBackOff."""
        one.last_state = one.state
        one.again = True
        self.show()
        delay = 0.0 if one.restarts == 0 else min(CRASH_S * 2 ** (one.restarts - 1), CRASH_MOST_S)
        one.backoff = 1
        if delay:
            meta = self.pod["metadata"]
            place = f"{meta['name']}_{meta['namespace']}({self.uid})"
            text = f"back-off {delay:g}s restarting failed container={one.name} pod={place}"
            self.say(
                "BackOff",
                f"Back-off restarting failed container {one.name} in pod {place}",
                warning=True,
                container=one,
            )
            self.wait(one, "CrashLoopBackOff", text)

        def again() -> None:
            one.restarts += 1
            one.state = {"waiting": {"reason": "ContainerCreating"}}
            self._create(one)

        self._later(delay, again)

    def wait(self, one: Container, reason: str, message: str) -> None:
        """Show a container as waiting, with the reason."""
        if self.done or self.stopping:
            return
        one.state = {"waiting": {"reason": reason, "message": message}}
        self.show()

    def _finish(self) -> None:
        """All has ended: show the ends, then the final phase, then remove the object of a deleted pod."""
        if self.done:
            return
        failed = any(one.exit_code for one in self.containers if one.role != "sidecar") or bool(self.fate)
        unborn = any(one.exit_code is None for one in self.containers if one.role == "main")
        final = "Failed" if failed or unborn else "Succeeded"
        if not self.stopping:
            self.show()
        self._later(0 if self.stopping else self.cluster.pace.end_s, lambda: self._conclude(final))

    def _conclude(self, phase: str) -> None:
        self.done = True
        for timer in self.timers:
            timer.cancel()
        self.phase, self.sandbox = phase, False
        for one in self.containers:
            one.again = False
            if "waiting" in one.state and one.last_state and self.stopping:
                one.state = one.last_state
            if one.role == "main" and one.exit_code is None and self.stopping and not one.last_state:
                one.state = {
                    "terminated": {
                        "exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": None,
                        "finishedAt": None,
                        "message": "The container could not be located when the pod was terminated",
                    }
                }  # fmt: skip
        self.show()
        self.kubelet.finished(self)

    def remove(self) -> None:
        """The kubelet deletes the object with grace 0."""
        found = self.cluster.store.find(self.uid)
        if found is not None and is_going(found[1]):
            deletion.delete(self.cluster.store, PODS, found[1], {"gracePeriodSeconds": 0})

    def stop(self, grace_s: float) -> None:
        """SIGTERM to the main containers, SIGKILL to all after *grace_s*; a second call may shorten it."""
        if self.grace is not None:
            self.grace.cancel()
        self.grace = self.cluster.clock.after(grace_s, self.kill)
        if self.stopping or self.done:
            return
        self.stopping = True
        running = [one for one in self.containers if one.is_running]
        self.tell_killing()
        mains = [one for one in running if one.role != "sidecar"]
        for one in mains:
            self._terminate(one)
        if not mains:
            sidecars = [one for one in running if one.role == "sidecar"]
            if sidecars:
                self._stop_sidecar(sidecars[-1])
            else:
                self._finish()

    def tell_killing(self) -> None:
        """Record that the main containers are being stopped."""
        for one in self.containers:
            if one.is_running and one.role != "sidecar":
                self.say("Killing", f"Stopping container {one.name}", container=one)

    def _terminate(self, one: Container) -> None:
        """SIGTERM, after the preStop hook."""
        if self.is_held:
            return
        hook = (one.spec.get("lifecycle") or {}).get("preStop") or {}
        seconds = float((hook.get("sleep") or {}).get("seconds", 0))
        if hook.get("exec"):
            seconds = infer(hook["exec"]["command"], {}).seconds or 0.0
        self._later(seconds, lambda: one.execution and one.execution.terminate())

    def kill(self) -> None:
        """SIGKILL to every running container."""
        if self.is_held:
            return
        for one in self.containers:
            if one.execution is not None:
                one.execution.kill()

    def abandon(self) -> None:
        """The node is gone, or the object: kill without a report."""
        self.done = True
        for timer in self.timers:
            timer.cancel()
        if self.grace is not None:
            self.grace.cancel()
        self.is_held = False
        self.kill()

    def fail(self, reason: str, message: str, grace_s: float | None = None) -> None:
        """End the pod by decision of kubelet or node (Evicted, DeadlineExceeded, Terminated)."""
        if self.done or self.stopping:
            return
        self.fate = {"reason": reason, "message": message}
        self.say(reason, message, warning=reason != "DeadlineExceeded")
        self.show()
        given = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
        self.stop(given if grace_s is None else grace_s)

    def say(
        self, reason: str, message: str, *, warning: bool = False, container: Container | None = None
    ) -> None:
        """Record an event of this pod."""
        if self.done:
            return
        group = "containers" if container is None or container.role == "main" else "initContainers"
        path = f"spec.{group}{{{container.name}}}" if container else ""
        host = self.kubelet.name
        self.cluster.record(self.pod, reason, message, warning=warning, host=host, field_path=path)

    def show(self, *, start: bool = False, address: bool = False) -> None:
        """Write the status, unless the node is silent."""
        found = self.cluster.store.find(self.uid)
        if found is None or not self.kubelet.is_alive:
            return
        now = self.cluster.clock.now()

        def write(item: Object) -> None:
            if is_over(item) and self.phase not in {"Failed", "Succeeded"}:
                return
            draw(item, self.containers, self.phase, now, sandbox=self.sandbox, failing=bool(self.fate))
            item["status"] |= self.kubelet.addresses(self.pod, start=start, address=address or self.sandbox)
            item["status"] |= _amounts(self.containers)
            item["status"] |= self.fate if self.phase == "Failed" else {}

        self.pod = self.cluster.store.edit(PODS, found[1], write) or self.pod

    def mark(self, reason: str, message: str) -> None:
        """Write a DisruptionTarget condition."""
        found = self.cluster.store.find(self.uid)
        if found is not None:
            fresh = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
            now = self.cluster.clock.now()
            self.cluster.store.edit(PODS, found[1], lambda item: set_condition(item, fresh, now))


def _amounts(containers: list[Container]) -> Object:
    """Resources of the pod as a whole, in its status."""
    shown: Object = {"resources": {}}
    for part in ("limits", "requests"):
        total: dict[str, Decimal] = {}
        for one in containers:
            for name, text in ((one.resources or one.spec.get("resources") or {}).get(part) or {}).items():
                total[name] = total.get(name, Decimal(0)) + quantity(text)
        if total:
            shown["resources"][part] = {name: said(amount, name) for name, amount in total.items()}
    if "requests" in shown["resources"]:
        shown["allocatedResources"] = dict(shown["resources"]["requests"])
    return shown
