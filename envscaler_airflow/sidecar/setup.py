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
from envscaler_airflow.launch import SessionSettings
from envscaler_airflow.sidecar import owner_watch
from envscaler_airflow.sidecar.context import SetupCancelledError, SidecarContext
from envscaler_airflow.sidecar.inputs import copy_in
from envscaler_airflow.sidecar.restore import empty, restore
from envscaler_airflow.sidecar.uploads import WriteBack
from envscaler_airflow.store import archive

HOLD_POLL_S = 1.0
"""Time between two readings of a control with ``hold``. Chosen: an owner lists checkpoints in seconds."""
_ARCHIVE = re.compile(r"workdir-([0-9a-f]{64})\.tar\.zst\Z")


def lay_out(context: SidecarContext) -> None:
    """Prepare everything and write ``start.json``; after a failure, with the reason in it.

    Raises:
        WorkInterruptedError: The sidecar must end; the next one continues.
    """
    if context.spool.start.exists():
        context.memory.update(is_laid_out=True)
        return
    control: Control | None = None
    try:
        context.patiently(lambda: owner_watch.claim_node(context), what="claim")
        control = first_control(context)
        body = _lay_out(context, control)
    except (SpecError, CheckpointError, ProtocolError, StoreError, SetupCancelledError, OSError) as err:
        reason = _reason(context, err, has_answered=control is not None)
        body = {"failed": str(err), "reason": reason}
        context.memory.update(failed=f"set-up failed: {err}", failed_as=reason)
    else:
        context.memory.update(failed=None)  # from a try whose end could not be recorded
    context.spool.write_json(context.spool.start, body)
    context.memory.update(is_laid_out=True)


def _reason(context: SidecarContext, err: Exception, *, has_answered: bool) -> str:
    """The reason of the end: neither a requested stop nor an unreachable store is a fault of the stage."""
    if isinstance(err, SetupCancelledError):
        return "stopped"
    is_away = isinstance(err, StoreError) and has_answered and _is_away(context)
    return "orphaned" if is_away else "setup-failed"


def _is_away(context: SidecarContext) -> bool:
    try:
        context.run.size(control_name(context.who.generation, context.who.attempt))
    except StoreError as err:
        return err.transient
    return False


def _lay_out(context: SidecarContext, control: Control) -> dict[str, Any]:
    cwd = _workdir(context)
    for mount in context.layout.mounts:
        context.wanted()
        copy_in(context, mount)
    for path in context.layout.outputs.values():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if context.layout.checkpoint_path is not None:
        Path(context.layout.checkpoint_path).mkdir(parents=True, exist_ok=True)
    WriteBack(context).mark()
    context.remember_places()
    context.wanted()
    restored = restore(context, control)
    context.wanted()
    address = context.address if context.who.node == 0 else context.rendezvous
    env = {} if address is None else {ADDRESS: address}
    return {
        "cwd": cwd,
        "env": env | ({"ENVSCALER_RESTORE": str(restored.path)} if restored else {}),
        "restore": restored.to_start() if restored else None,
        "session": _session(context, control),
    }


def first_control(context: SidecarContext) -> Control:
    """The owner's control, once it has listed the checkpoints that this attempt may resume from.

    Raises:
        ProtocolError: It is absent or cannot be read.
        StoreError: The store did not answer in time.
    """
    name = control_name(context.who.generation, context.who.attempt)
    while True:
        body = context.patiently(lambda: context.run.read(name, max_bytes=MAX_JSON_BYTES), what=name)
        if body is None:
            raise ProtocolError(
                f"{context.run.uri(name)} is absent: sidecar and owner must see the same store"
            )
        control = Control.from_json(body, where=name)
        if control.action != "hold":
            context.messages.say("hold", None)
            return control
        context.messages.say("hold", "waits until the owner has listed the checkpoints to resume from")
        context.ending.wait(HOLD_POLL_S)
        context.wanted()


def _workdir(context: SidecarContext) -> str | None:
    if context.layout.work is None:
        return None
    work = Path(context.layout.work)
    work.mkdir(parents=True, exist_ok=True)
    name = context.layout.workdir_archive
    if name is None:
        return str(work)
    match = _ARCHIVE.match(name)
    if match is None:
        raise ProtocolError(f"workdir archive {name!r:.200}: expected workdir-<sha256>.tar.zst")
    part = context.spool.root / name
    try:
        if context.patiently(lambda: context.run.size(name), what=name) is None:
            raise CheckpointError(f"{context.run.uri(name)} is absent")
        context.patiently(lambda: context.run.get_file(name, part), what=name)
        empty(work)
        archive.unpack(part, work, sha256=match[1])
    finally:
        part.unlink(missing_ok=True)
    return str(work)


def session_of(context: SidecarContext, control: Control) -> SessionSettings:
    """The launch's settings, with the interval between checkpoints that the owner requests."""
    return context.layout.session.with_interval(control.checkpoint_every_s)


def _session(context: SidecarContext, control: Control) -> dict[str, Any]:
    who, path = context.who, context.layout.checkpoint_path
    return {
        "generation": who.generation,
        "attempt": who.attempt,
        "node": who.node,
        "nodes": who.nodes,
        **({"checkpoint_path": path} if path is not None else {}),
        **session_of(context, control).to_dict(),
    }
