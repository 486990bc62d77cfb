"""Start a command that finds the paths of its spec where the spec says: run as a file, standard library only.

    python mount_main.py --root FOLDER [--bind SOURCE PATH ...] [--out SOURCE PATH ...] -- COMMAND ...

The command gets a mount namespace of its own. Its root is a small file system in memory into which the
machine's top-level folders are bound, so that ``/data`` and ``/output`` can exist without being created on
the machine. Without root a user namespace is used, in which the user keeps the same id. Where the system
allows neither, the command runs without it, and a line on stderr reports that; a shell script that names such
a path is refused there, because nothing rewrites the path and the script would write into the machine's own
folder.

``--out`` is for what the training writes: if the machine has nothing in the parent folder, the whole parent
is mounted, so that the training may replace PATH itself.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import stat
import sys

NEW_NS, NEW_USER = 0x00020000, 0x10000000
BIND, REC, PRIVATE, DETACH = 4096, 16384, 1 << 18, 2
"""Source: linux/sched.h, linux/mount.h, sys/mount.h (MNT_DETACH)."""
REFUSED, NOT_EXECUTABLE, NOT_FOUND = 78, 126, 127
"""Source: sysexits.h, EX_CONFIG; POSIX shell, exit status for commands."""
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash")

_LIBC = ctypes.CDLL(None, use_errno=True)


def main(words: list[str]) -> int:
    """Mount and exec the command; returns only when that fails."""
    end = words.index("--")
    options, command = words[:end], words[end + 1 :]
    triples = [options[at : at + 3] for at in range(2, end, 3)]
    try:
        enter(options[1], triples)
    except (OSError, AttributeError) as err:
        paths = [path for _, _, path in triples]
        if named := script_paths(command, paths):
            sys.stderr.write(f"envscaler: {refusal(named, str(err))}\n")
            return REFUSED
        if paths:
            sys.stderr.write(f"envscaler: {', '.join(paths)} cannot be mounted here ({err}); {WAY_OUT}\n")
        else:
            sys.stderr.write(f"{err}\n")
            return REFUSED  # the caller only asked whether mounting works
    return become(command)


WAY_OUT = (
    "read the variables ENVSCALER_OUTPUT_*, ENVSCALER_VOLUME_* and ENVSCALER_CHECKPOINT_DIR instead, or run "
    "the stage in a container: envscaler run --target docker"
)


def refusal(named: list[str], why: str) -> str:
    """Why a script is not started."""
    return (
        f"the script names {', '.join(named)}, which would be this machine's own, since it allows no mounts "
        f"({why}); {WAY_OUT}"
    )


def become(command: list[str]) -> int:
    """Replace this process; the exit code of a shell where that is not possible."""
    try:
        os.execvp(command[0], command)  # noqa: S606  # the stage's own command
    except FileNotFoundError:
        sys.stderr.write(f"{command[0]}: command not found\n")
        return NOT_FOUND
    except OSError as err:
        sys.stderr.write(f"{command[0]}: cannot be started: {err.strerror}\n")
        return NOT_EXECUTABLE


def script_paths(command: list[str], paths: list[str]) -> list[str]:
    """The *paths* that the script of ``bash -c SCRIPT`` names: nothing rewrites them there."""
    if not command or os.path.basename(command[0]) not in SHELLS:
        return []
    for option, script in itertools.pairwise(command):
        if option.startswith("-") and not option.startswith("--") and "c" in option:
            return [path for path in paths if path in script]
    return []


def enter(root: str, triples: list[list[str]]) -> None:
    """Mount each ``(option, source, path)`` for this process; the new root is built in the folder *root*.

    Raises:
        OSError: The system does not allow it, or a source does not exist.
        AttributeError: The system has no such calls (macOS).
    """
    here = os.getcwd()
    os.makedirs(root, exist_ok=True)
    targets = _targets(triples)
    try:
        _call("unshare", NEW_NS)
    except OSError:
        _keep_user()
        _call("unshare", NEW_NS)
    _mount("none", "/", REC | PRIVATE)
    _mount("tmpfs", root, 0, kind="tmpfs", data="mode=755")
    _mirror("/", root)
    for path, source in sorted(targets.items()):
        os.makedirs(source, exist_ok=True)
        _mount(source, _place(root, path, is_file=os.path.isfile(source)), BIND | REC)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", DETACH)
    os.chdir(here)


def _targets(triples: list[list[str]]) -> dict[str, str]:
    """Source of each path to mount; without single output files among others of the machine."""
    found: dict[str, str] = {}
    for option, source, path in triples:
        above, folder = os.path.dirname(path), os.path.dirname(source)
        is_own = option == "--out" and above != "/" and not (os.path.isdir(above) and os.listdir(above))
        if is_own and found.setdefault(above, folder) == folder:
            continue  # its content is there too
        if option == "--bind" or not os.path.splitext(path)[1]:
            found[path] = source
    return found


def _keep_user() -> None:
    """Create a user namespace with the same user and group: exec removes its privileges again."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _mirror(source: str, target: str) -> None:
    """Bind every entry of the folder *source* into the empty folder *target*; links remain links."""
    with os.scandir(source) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        there = os.path.join(target, entry.name)
        if os.path.abspath(entry.path) == os.path.abspath(target):
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), there)
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                os.mkdir(there)
            else:
                os.mknod(there, stat.S_IFREG | 0o644)
            _mount(entry.path, there, BIND | REC)
        except PermissionError:
            continue  # a folder that this user may not read is closed to the command too


def _place(root: str, path: str, *, is_file: bool) -> str:
    """The mount point of *path* below *root*; a folder that cannot be written becomes a mirror of itself."""
    here, parts = root, [part for part in path.split("/") if part]
    for index, part in enumerate(parts):
        there = os.path.join(here, part)
        if not os.path.lexists(there):
            try:
                _make(there, is_file=is_file and index == len(parts) - 1)
            except OSError:
                _replace_by_mirror(here)
                _make(there, is_file=is_file and index == len(parts) - 1)
        here = there
    return here


def _make(path: str, *, is_file: bool) -> None:
    if is_file:
        os.mknod(path, stat.S_IFREG | 0o644)
    else:
        os.mkdir(path)


def _replace_by_mirror(folder: str) -> None:
    old = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        _mount("tmpfs", folder, 0, kind="tmpfs", data="mode=755")
        _mirror(f"/proc/self/fd/{old}", folder)
    finally:
        os.close(old)


def _mount(source: str, target: str, flags: int, *, kind: str = "", data: str = "") -> None:
    _call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        flags,
        data.encode() or None,
        about=f"mount at {target}",
    )


def _call(name: str, *arguments: object, about: str = "") -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{about or name}: {os.strerror(code)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
