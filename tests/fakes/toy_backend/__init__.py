"""A backend of another package: a desk whose attempts are files, and whose trainings end at once."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from envscaler_agent.protocol import Ended, Status, status_name
from envscaler_airflow.backends import BackendType, ShellOption
from envscaler_airflow.backends.base import AttemptStatus, Leftover
from envscaler_airflow.envspec.models import Base
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.run import Handle, NodeStatus
from envscaler_airflow.run.cost import UsageInterval
from envscaler_airflow.store import open_store

DESK = Offer("toy", "", "desk", "on-demand", vcpus=2.0, memory_gib=4.0, usd_per_hour=0.5)


class ToyBackend:
    """Runs the command of an attempt within ``submit``, or with the setting ``waits`` in :meth:`work`."""

    name = "toy"

    def __init__(self, *, root=None, waits=False, user=None):
        """Keep attempts below *root*; *user* is the login of the connection."""
        if root is None:
            raise SpecError("toy: set root: [envscaler] toy_root, ENVSCALER_TOY_ROOT or --desk")
        self.root, self.waits, self.user = Path(root), waits, user

    def offers(self):
        """One desk."""
        return (DESK,)

    def prepare(self, spec):
        """Every stage runs in the desk's image."""
        return spec.model_copy(update={"base": Base(image="desk:1")})

    def render(self, request):
        """What ``submit`` writes."""
        return {
            "name": f"{request.run_prefix.replace('/', '.')}-g{request.generation}-a{request.attempt}",
            "store": request.store_url,
            "prefix": request.run_prefix,
            "key": [request.generation, request.attempt],
            "command": list(request.launch.command),
            "image": request.launch.image,
            "secrets": dict.fromkeys(request.secret_env, ""),
        }

    def submit(self, request):
        """Write the attempt's file, and run it."""
        body = self.render(request)
        self.root.mkdir(exist_ok=True)
        if not self._file(body["name"]).exists():
            self._write({**body, "start": time.time(), "end": None, "reason": ""})
        handle = Handle(self.name, body["name"])
        if not self.waits:
            self.work(handle)
        return handle

    def work(self, handle):
        """Run the command, and report its end to the store as a node does."""
        body = self._read(handle)
        if body["reason"]:
            return
        code = subprocess.run(body["command"], check=False).returncode
        reason, (generation, attempt) = "failed" if code else "succeeded", body["key"]
        ended = Ended(exit_code=code, reason=reason)
        status = Status(generation=generation, attempt=attempt, sequence=9, phase="ended", ended=ended)
        name = f"{body['prefix']}/{status_name(generation, attempt, 0)}"
        open_store(body["store"]).write(name, status.to_json())
        self._write({**body, "end": time.time(), "reason": reason})

    def find(self, request):
        """The handle, if its file is there."""
        name = self.render(request)["name"]
        return Handle(self.name, name) if self._file(name).exists() else None

    def observe(self, handle):
        """Running until it worked or was stopped; lost without a file."""
        body = self._read(handle)
        if body is None:
            return AttemptStatus((NodeStatus(0, "lost"),))
        if not body["reason"]:
            return AttemptStatus((NodeStatus(0, "running"),))
        code = {"succeeded": 0, "stopped": 87}.get(body["reason"], 1)
        return AttemptStatus((NodeStatus(0, "ended", code, None, body["reason"]),))

    def stop(self, handle, *, grace_s):
        """End it without a trace of grace."""
        body = self._read(handle)
        if body is not None and not body["reason"]:
            self._write({**body, "end": time.time(), "reason": "stopped"})

    def usage(self, handle):
        """From submit to the end."""
        body = self._read(handle)
        return () if body is None else (UsageInterval(0, body["start"], body["end"], time.time()),)

    def release(self, handle):
        """Remove the file of an ended attempt."""
        body = self._read(handle)
        if body is not None and body["reason"]:
            self.remove(handle)

    def leftovers(self, store_url):
        """Every file of a run of that store."""
        for path in sorted(self.root.glob("*.json")):
            body = json.loads(path.read_text())
            if body["store"] == store_url:
                age_s = time.time() - body["start"]
                handle = Handle(self.name, body["name"])
                yield Leftover(handle, body["prefix"], *body["key"], age_s=age_s, runs=not body["reason"])

    def remove(self, handle):
        """Delete the file."""
        self._file(handle.name).unlink(missing_ok=True)

    def _file(self, name):
        return self.root / f"{name}.json"

    def _read(self, handle):
        path = self._file(handle.name)
        return json.loads(path.read_text()) if path.exists() else None

    def _write(self, body):
        self._file(body["name"]).write_text(json.dumps(body))


def _missing(spec, _store_url):
    gpus = [need for need in spec.resources.alternatives if need.requests.gpu is not None]
    return ["gpu: a desk has none; ask for less under targets.toy"] if gpus else []


BACKEND = BackendType(
    name="toy",
    create=lambda settings, access: ToyBackend(**settings, user=None if access is None else access.login),
    conn_type="toy",
    options={"root": "toy_root"},
    shell_options=(ShellOption(("--desk",), "root", "Folder of the desk."),),
    mounted_secrets=frozenset({"secret"}),
    missing=_missing,
)
USURPER = BackendType(name="local", create=BACKEND.create)
