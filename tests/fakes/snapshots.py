"""Actions and checks for tests of snapshots, on a sidecar's bench."""

import json
import os


def run(bench, seconds):
    """Let *seconds* pass, with a check every second."""
    for _ in range(seconds):
        bench.clock.now += 1
        bench.snapshots.step()


def saved(bench):
    """Names of the local saves."""
    return bench.spool.saved(bench.who)


def facts(bench, name):
    """The record of a snapshot."""
    return json.loads((bench.spool.checkpoints / f"{name}.snapshot.json").read_bytes())


def answer(bench):
    """Content of snapshot.done."""
    return json.loads(bench.spool.snapshot.read_bytes())


def notice(bench):
    """The message for the training's log; None when nothing."""
    body = bench.spool.read_json(bench.spool.root / "notice.json")
    return body and body["text"]


def replace_with(bench, **files):
    """Save each file under another name and rename it."""
    for name, data in files.items():
        (bench.ck / f"{name}.tmp").write_bytes(data)
        (bench.ck / f"{name}.tmp").replace(bench.ck / name)


def end(bench, *, age_s, **ended):
    """The command ends *age_s* seconds after the last write."""
    newest = max(path.stat().st_mtime for path in bench.ck.rglob("*") if path.is_file())
    bench.wrapper_says(ended=ended, progress={"step": 8})
    os.utime(bench.spool.wrapper, (newest + age_s,) * 2)
    run(bench, 1)
