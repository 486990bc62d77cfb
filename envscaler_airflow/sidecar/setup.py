"""What a start needs: workdir, inputs, the checkpoint to resume from; then ``start.json``.

Until ``start.json`` exists the training waits, so every step may be repeated; once it exists nothing is
prepared again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from envscaler_agent.process import ADDRESS
from envscaler_agent.protocol import MAX_JSON_BYTES, Control, control_name
from envscaler_airflow.errors import CheckpointError, ProtocolError, SpecError, StoreError
from envscaler_airflow.sidecar import claim
from envscaler_airflow.sidecar.context import SetupCancelledError, Site
from envscaler_airflow.sidecar.frozen_spec import MAX_SPEC_BYTES, Frozen, read_frozen
from envscaler_airflow.sidecar.inputs import bring
from envscaler_airflow.sidecar.restore import empty, restore
from envscaler_airflow.sidecar.writeback import WriteBack
from envscaler_airflow.store import archive

HOLD_POLL_S = 1.0
"""Time between two readings of a control with ``hold``. Chosen: an owner lists checkpoints in seconds."""
_ARCHIVE = re.compile(r"workdir-([0-9a-f]{64})\.tar\.zst\Z")


def lay_out(site: Site) -> None:
    """Prepare everything and write ``start.json``; after a failure, with the reason in it.

    Raises:
        WorkInterruptedError: The sidecar must end; the next one continues.
    """
    if site.spool.start.exists():
        site.memory.update(is_laid_out=True)
        return
    frozen: Frozen | None = None
    try:
        site.patiently(lambda: claim.take(site), what="claim")
        frozen = read_spec(site)
        body = _lay_out(site, frozen)
    except (SpecError, CheckpointError, ProtocolError, StoreError, SetupCancelledError, OSError) as err:
        reason = _reason(site, err, has_answered=frozen is not None)
        body = {"failed": str(err), "reason": reason}
        site.memory.update(failed=f"set-up failed: {err}", failed_as=reason)
    else:
        site.memory.update(failed=None)  # from a try whose end could not be recorded
    site.spool.write_json(site.spool.start, body)
    site.memory.update(is_laid_out=True)


def _reason(site: Site, err: Exception, *, has_answered: bool) -> str:
    """The reason of the end: neither a requested stop nor an unreachable store is a fault of the stage."""
    if isinstance(err, SetupCancelledError):
        return "stopped"
    is_away = isinstance(err, StoreError) and has_answered and _is_away(site)
    return "orphaned" if is_away else "setup-failed"


def _is_away(site: Site) -> bool:
    try:
        site.store.size(site.layout.spec)
    except StoreError as err:
        return err.transient
    return False


def _lay_out(site: Site, frozen: Frozen) -> dict[str, Any]:
    control = _first_control(site)
    cwd = _workdir(site, frozen)
    for mount in site.layout.mounts:
        site.wanted()
        bring(site, mount)
    for path in site.layout.outputs.values():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if site.layout.checkpoint_path is not None:
        Path(site.layout.checkpoint_path).mkdir(parents=True, exist_ok=True)
    WriteBack(site).mark()
    site.remember_places()
    site.wanted()
    restored = restore(site, control)
    site.wanted()
    address = site.address if site.who.node == 0 else site.rendezvous
    env = {} if address is None else {ADDRESS: address}
    return {
        "cwd": cwd,
        "env": env | ({"ENVSCALER_RESTORE": str(restored.path)} if restored else {}),
        "restore": restored.to_start() if restored else None,
        "session": _session(site, frozen),
    }


def read_spec(site: Site) -> Frozen:
    """The frozen spec that the launch names, from the store, with the interval that the owner requests.

    Raises:
        ProtocolError: It is absent or cannot be read.
        StoreError: The store did not answer in time.
    """
    name = site.layout.spec
    if not name:
        raise ProtocolError("layout.json: spec: is missing; expected the name of the frozen spec")
    body = site.patiently(lambda: site.store.read(name, max_bytes=MAX_SPEC_BYTES), what=name)
    if body is None:
        raise ProtocolError(f"{site.store.uri(name)} is absent: sidecar and owner must see the same store")
    return read_frozen(body).with_interval(_first_control(site).checkpoint_every_s)


def _first_control(site: Site) -> Control:
    """The owner's control, once it has listed the checkpoints that this attempt may resume from."""
    name = control_name(site.who.generation, site.who.attempt)
    while True:
        body = site.patiently(lambda: site.store.read(name, max_bytes=MAX_JSON_BYTES), what=name)
        if body is None:
            raise ProtocolError(f"{site.store.uri(name)} is absent: the owner writes it before the start")
        control = Control.from_json(body, where=name)
        if control.action != "hold":
            site.messages.say("hold", None)
            return control
        site.messages.say("hold", "waits until the owner has listed the checkpoints to resume from")
        site.ending.wait(HOLD_POLL_S)
        site.wanted()


def _workdir(site: Site, frozen: Frozen) -> str | None:
    if site.layout.work is None:
        return None
    work = Path(site.layout.work)
    work.mkdir(parents=True, exist_ok=True)
    name = site.layout.workdir_archive or frozen.workdir_archive or _only_archive(site)
    if name is None:
        return str(work)
    match = _ARCHIVE.match(name)
    if match is None:
        raise ProtocolError(f"workdir archive {name!r:.200}: expected workdir-<sha256>.tar.zst")
    part = site.spool.root / name
    try:
        if site.patiently(lambda: site.store.size(name), what=name) is None:
            raise CheckpointError(f"{site.store.uri(name)} is absent")
        site.patiently(lambda: site.store.get_file(name, part), what=name)
        empty(work)
        archive.unpack(part, work, sha256=match[1])
    finally:
        part.unlink(missing_ok=True)
    return str(work)


def _only_archive(site: Site) -> str | None:
    names = [
        name
        for name in site.patiently(lambda: site.store.children(""), what="workdir")
        if _ARCHIVE.match(name)
    ]
    if len(names) > 1:
        raise ProtocolError(f"{len(names)} workdir archives and neither layout nor spec names one")
    return names[0] if names else None


def _session(site: Site, frozen: Frozen) -> dict[str, Any]:
    who = site.who
    body = {
        "generation": who.generation,
        "attempt": who.attempt,
        "node": who.node,
        "nodes": who.nodes,
        "every": dict(frozen.every) if frozen.every else None,
        "align": frozen.align,
        "global_batch": frozen.global_batch,
        "checkpoint_path": site.layout.checkpoint_path,
        "log_patterns": dict(frozen.log_patterns),
        "stall_factor": frozen.stall_factor,
        "stall_min_s": frozen.stall_min_s,
        "secret_env": list(frozen.secret_env),
        "success": "all-steps" if frozen.success == "all-steps" else None,
    }
    return {name: value for name, value in body.items() if value is not None}
