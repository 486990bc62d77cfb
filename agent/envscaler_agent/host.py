"""CPU, memory, disk and network of the command, from /proc and its cgroup. Unknown elsewhere.

============================== ==============================================================
metric                         meaning
============================== ==============================================================
``cpu_percent``                CPU time of the command's processes; 100 is one core
``cpu_seconds``                CPU seconds so far, including processes that have ended
``cpu_throttled_percent``      share of periods in which the cgroup's quota was used up
``processes``, ``threads``     how many the command has
``memory_rss_bytes``           resident memory of its processes; shared pages count in each
``memory_bytes``               cgroup usage without inactive file pages (kubelet's working set)
``memory_peak_bytes``          highest cgroup usage, page cache included
``memory_limit_bytes``         cgroup limit
``disk_read_bytes_per_s``      read from block devices by its processes
``disk_write_bytes_per_s``     written to block devices by its processes
``disk_free_bytes``            free space where it works
``network_receive_bytes_per_s``  of its network namespace, loopback left out
``network_transmit_bytes_per_s`` of its network namespace, loopback left out
============================== ==============================================================

``memory_bytes`` and the other cgroup metrics are left out if the cgroup has no limit of its own: its usage
would be the whole machine's.

Source: proc(5), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from envscaler_agent.process import family, parents, stat_fields

RESCAN_S = 5.0
"""Time between two scans for new processes. Chosen: a walk through /proc costs 1 ms for 100 processes."""
FEW = 32
"""Families up to this size are read with every sample, larger ones with every rescan. Chosen for the same
reason.
"""
_CGROUPS = Path("/sys/fs/cgroup")


def read_small(path: str) -> bytes:
    """Return the first 64 KiB of a file of /proc or /sys, b"" when it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(file)


def number_in(path: str) -> Optional[int]:
    """Return the number that is the whole content of a file, None for ``max`` and for an absent file."""
    text = read_small(path).strip()
    return int(text) if text.isdigit() else None


def fields_in(path: str) -> Dict[str, int]:
    """Return the ``name number`` lines of a file."""
    pairs = (line.split() for line in read_small(path).splitlines())
    return {pair[0].decode(): int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


class Cgroup:
    """Where the kernel accounts for a process: one folder per controller (v1) or one for all (v2)."""

    def __init__(self, pid: int, *, root: Path = _CGROUPS, table: Optional[bytes] = None) -> None:
        """Find the cgroup of *pid*; inside a container its path may be that of the host."""
        self._folders: Dict[str, Path] = {}
        for line in (read_small(f"/proc/{pid}/cgroup") if table is None else table).decode().splitlines():
            number, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            if number == "0" and not names:
                self._take("", root, path)
            for name in names.split(","):
                if name in ("memory", "cpu"):
                    self._take(name, root / name, path)

    def file(self, v2: str, v1: Tuple[str, str]) -> Optional[str]:
        """Return the path of a v2 file or of its v1 (controller, file) counterpart, None for neither."""
        for folder, name in ((self._folders.get(v1[0]), v1[1]), (self._folders.get(""), v2)):
            if folder is not None and (folder / name).exists():
                return str(folder / name)
        return None

    def _take(self, controller: str, mount: Path, path: str) -> None:
        own = mount / path.lstrip("/")
        folder = own if own.is_dir() else mount
        if folder.is_dir():
            self._folders[controller] = folder


def oom_kills(pid: int) -> int:
    """Return how often the out-of-memory killer acted in the cgroup of *pid*, 0 when unknown."""
    path = Cgroup(pid).file("memory.events", ("memory", "memory.oom_control"))
    return fields_in(path).get("oom_kill", 0) if path else 0


class Host:
    """Samples one command's processes."""

    def __init__(self, root: int) -> None:
        """Sample the family of process *root*."""
        self._root = root
        self._pids: List[int] = []
        self._scanned_at = -RESCAN_S
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._before: Dict[str, Tuple[float, float]] = {}
        self._kept: Dict[str, Optional[float]] = {}
        self._memory = _MemoryFiles(Cgroup(root))
        self._cpu_stat = Cgroup(root).file("cpu.stat", ("cpu", "cpu.stat"))
        self._cwd = f"/proc/{root}/cwd"
        self._net = f"/proc/{root}/net/dev"

    def sample(self, now: float, *, own: int = -1) -> Dict[str, Optional[float]]:
        """Return the metrics at *now*; process *own* (the sampler) does not count."""
        rescan = now - self._scanned_at >= RESCAN_S
        if rescan:
            self._scanned_at = now
            self._pids = [pid for pid in family(self._root, parents()) if pid != own]
        values: Dict[str, Optional[float]] = {}
        if rescan or len(self._pids) <= FEW:
            self._kept.update(self._processes(now))
        values.update(self._kept)
        values.update(self._memory.sample())
        values.update(self._network(now))
        if rescan:
            self._kept["disk_free_bytes"] = self._disk_free()
            self._kept["cpu_throttled_percent"] = self._throttled()
        return values

    def _processes(self, now: float) -> Dict[str, Optional[float]]:
        ticks = rss = threads = alive = 0
        read = written = 0
        can_read_io = True
        for pid in self._pids:
            fields = stat_fields(pid)
            if not fields:
                continue
            alive += 1
            ticks += sum(int(fields[index]) for index in (11, 12, 13, 14))
            threads += int(fields[17])
            rss += int(fields[21])
            moved = _io(pid)
            can_read_io = can_read_io and moved is not None
            if moved is not None:
                read += moved[0]
                written += moved[1]
        seconds = ticks / self._ticks_per_s
        rate = self._rate("cpu", now, seconds)
        return {
            "cpu_seconds": seconds if alive else None,
            "cpu_percent": None if rate is None else 100 * rate,
            "processes": float(alive),
            "threads": float(threads),
            "memory_rss_bytes": float(rss * self._page),
            "disk_read_bytes_per_s": self._rate("read", now, read) if can_read_io else None,
            "disk_write_bytes_per_s": self._rate("written", now, written) if can_read_io else None,
        }

    def _network(self, now: float) -> Dict[str, Optional[float]]:
        moved = parse_net_dev(read_small(self._net))
        if moved is None:
            return {}
        return {
            "network_receive_bytes_per_s": self._rate("received", now, moved[0]),
            "network_transmit_bytes_per_s": self._rate("sent", now, moved[1]),
        }

    def _disk_free(self) -> Optional[float]:
        try:
            stat = os.statvfs(self._cwd)
        except OSError:
            return None
        return float(stat.f_bavail * stat.f_frsize)

    def _throttled(self) -> Optional[float]:
        stat = fields_in(self._cpu_stat) if self._cpu_stat else {}
        periods = self._rate("periods", 0.0, stat.get("nr_periods", 0), over=None)
        throttled = self._rate("throttled", 0.0, stat.get("nr_throttled", 0), over=None)
        return 100 * throttled / periods if periods and throttled is not None else None

    def _rate(self, name: str, now: float, count: float, *, over: Optional[float] = 1.0) -> Optional[float]:
        """Return the growth of *count* per second (in all, with *over* None); None when it fell or is new."""
        before = self._before.get(name)
        self._before[name] = (now, count)
        if before is None or count < before[1]:
            return None
        if over is None:
            return count - before[1]
        return (count - before[1]) / (now - before[0]) if now > before[0] else None


class _MemoryFiles:
    """The memory files of a cgroup; empty if it has no limit of its own."""

    def __init__(self, cgroup: Cgroup) -> None:
        self._usage = cgroup.file("memory.current", ("memory", "memory.usage_in_bytes"))
        self._peak = cgroup.file("memory.peak", ("memory", "memory.max_usage_in_bytes"))
        self._stat = cgroup.file("memory.stat", ("memory", "memory.stat"))
        path = cgroup.file("memory.max", ("memory", "memory.limit_in_bytes"))
        limit = number_in(path) if path else None
        total = fields_in_kib("/proc/meminfo", "MemTotal")
        self._limit = limit if limit is not None and total is not None and limit < total else None

    def sample(self) -> Dict[str, Optional[float]]:
        usage = number_in(self._usage) if self._limit is not None and self._usage else None
        if usage is None:
            return {}
        stat = fields_in(self._stat) if self._stat else {}
        inactive = stat.get("total_inactive_file", stat.get("inactive_file"))
        peak = number_in(self._peak) if self._peak else None
        return {
            "memory_bytes": None if inactive is None else float(max(0, usage - inactive)),
            "memory_peak_bytes": None if peak is None else float(peak),
            "memory_limit_bytes": float(self._limit or 0),
        }


def fields_in_kib(path: str, name: str) -> Optional[int]:
    """Return the bytes of a ``Name:  123 kB`` line, None when there is none."""
    for line in read_small(path).splitlines():
        words = line.split()
        if words and words[0] == name.encode() + b":":
            return int(words[1]) * 1024
    return None


def _io(pid: int) -> Optional[Tuple[int, int]]:
    """Return bytes read from and written to block devices, None when not allowed or unknown."""
    values = {}
    for line in read_small(f"/proc/{pid}/io").splitlines():
        name, _, number = line.partition(b": ")
        values[name] = number
    if b"read_bytes" not in values:
        return None
    return int(values[b"read_bytes"]), int(values[b"write_bytes"])


def parse_net_dev(text: bytes) -> Optional[Tuple[int, int]]:
    """Return bytes received and sent over all interfaces except loopback, None when there are none."""
    rows = [line.split(b":", 1) for line in text.splitlines() if b":" in line]
    counts = [numbers.split() for name, numbers in rows if name.strip() != b"lo"]
    if not rows:
        return None
    return sum(int(row[0]) for row in counts), sum(int(row[8]) for row in counts)


__all__ = ["Cgroup", "Host", "fields_in", "number_in", "oom_kills", "parse_net_dev", "read_small"]
