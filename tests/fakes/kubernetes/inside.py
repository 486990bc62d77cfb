"""Starts a container's command in a file system of its own, as a program of the standard library alone.

The root is a tmpfs into which the host's top-level folders are bound, so that programs of the host work,
and into which the pod's volumes are mounted where its containers want them. The command is PID 1 of a PID
namespace: when this program dies, the container's processes die with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_NS, NEW_UTS, NEW_USER, NEW_PID = 0x00020000, 0x04000000, 0x10000000, 0x20000000
READ_ONLY, REMOUNT, BIND, MOVE, REC, PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18
SET_DEATH_SIGNAL = 1
NO_COMMAND = 127


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Make a system call; raises OSError."""
    done = LIBC.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Leave the namespaces of *flags*; raises OSError."""
    if LIBC.unshare(flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def become_root() -> None:
    """Without root rights: enter a user namespace in which this process is root."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEW_USER)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1", encoding="ascii")


class Root:
    """The container's root folder while it is being built."""

    def __init__(self, path: str) -> None:
        """Mount a tmpfs at *path* and bind the host's folders into it."""
        self.path = path
        self.private: set[str] = {path}
        mount("tmpfs", path, "tmpfs", 0, "mode=755")
        for entry in os.scandir("/"):
            if entry.name not in {"proc", "lost+found"}:
                self._mirror(f"/{entry.name}", f"{path}/{entry.name}")
        Path(f"{path}/proc").mkdir()
        mount("proc", f"{path}/proc", "proc")

    def _mirror(self, source: str, target: str) -> None:
        """Bind *source* at *target*, which does not exist yet; links stay links."""
        if Path(source).is_symlink():
            Path(target).symlink_to(Path(source).readlink())
        elif Path(source).is_dir():
            Path(target).mkdir()
            mount(source, target, "", BIND | REC)
        elif Path(source).exists():
            Path(target).touch()
            mount(source, target, "", BIND)

    def place(self, path: str, *, is_file: bool) -> str:
        """Create *path* in the container without a change of the host; returns its path from outside."""
        here, left = self.path, [part for part in path.split("/") if part]
        while left:
            part = left.pop(0)
            there = f"{here}/{part}"
            if Path(there).is_symlink():
                target = str(Path(there).readlink())
                if target.startswith("/"):
                    here = self.path
                left = [one for one in target.split("/") if one and one != "."] + left
                continue
            if not Path(there).exists():
                self._own(here)
                if left or not is_file:
                    Path(there).mkdir()
                    self.private.add(there)
                else:
                    Path(there).touch()
            here = there
        return here

    def _own(self, folder: str) -> None:
        """Replace a bound folder by one of ours that mirrors its entries."""
        if folder in self.private:
            return
        fresh = f"{self.path}/.own-{len(self.private)}"
        Path(fresh).mkdir()
        mount("tmpfs", fresh, "tmpfs", 0, "mode=755")
        for entry in os.scandir(folder):
            self._mirror(f"{folder}/{entry.name}", f"{fresh}/{entry.name}")
        mount(fresh, folder, "", MOVE)
        Path(fresh).rmdir()
        self.private.add(folder)

    def bind(self, source: str, path: str, *, read_only: bool) -> None:
        """Mount *source* of the host at *path* of the container."""
        target = self.place(path, is_file=Path(source).is_file())
        mount(source, target, "", BIND | REC)
        if read_only:
            mount("none", target, "", BIND | REMOUNT | READ_ONLY)


def enter(order: dict[str, Any]) -> None:
    """Build the root, change into it and become the command; never returns."""
    die_with_parent()
    mount("none", "/", "", REC | PRIVATE)
    root = Root(order["root"])
    for one in sorted(order["mounts"], key=lambda one: one["path"].count("/")):
        root.bind(one["source"], one["path"], read_only=one["read_only"])
    os.chroot(root.path)
    os.chdir("/")
    Path(order["cwd"]).mkdir(parents=True, exist_ok=True)
    os.chdir(order["cwd"])
    LIBC.sethostname(order["hostname"].encode(), len(order["hostname"]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(order["argv"][0], order["argv"], order["env"])
    except OSError as error:
        sys.stderr.write(f"exec {order['argv'][0]}: {error.strerror}\n")
        os._exit(NO_COMMAND)


def main() -> int:
    """Carry out the order in the file of the first argument; returns the container's exit code."""
    die_with_parent()
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[1]).unlink()
    if os.geteuid() != 0:
        become_root()
    unshare(NEW_NS | NEW_UTS | NEW_PID)
    child = os.fork()
    if child == 0:
        try:
            enter(order)
        except OSError as error:
            sys.stderr.write(f"container: {error}\n")
            os._exit(NO_COMMAND)
    signal.signal(signal.SIGTERM, lambda *_args: os.kill(child, signal.SIGTERM))
    _pid, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
