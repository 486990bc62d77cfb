"""How long a checkpoint of many small files takes to go up, to be pruned around, and to come back.

Run: ``python benchmarks/checkpoint_files.py``. Each request to the store takes an additional
``--latency-ms``, like requests to an object store. The store itself is a folder, in memory if possible.
Prints seconds, CPU and requests. Target: 100,000 files at 10 ms are uploaded in under 3 min, and pruned in
under 15 s.
"""

import argparse
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from envscaler_agent.protocol import Manifest, manifest_name
from envscaler_airflow.store import checkpoints, manifests, open_store

PAGE = 1000  # names in one answer of a listing; source: Amazon S3 API reference, ListObjectsV2
METHODS = (
    *("read", "write", "size", "sizes", "names", "children", "delete", "delete_tree", "put_file", "get_file"),
)


class Distant:
    """A store with delayed answers, which are counted by kind."""

    def __init__(self, store: Any, latency_s: float) -> None:
        """Wrap *store*."""
        self._store, self._latency_s = store, latency_s
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        """A method of the store, with the delay."""
        call = getattr(self._store, name)
        return self._later(name, call) if name in METHODS else call

    def _later(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def later(*arguments: Any, **options: Any) -> Any:
            answer = call(*arguments, **options)
            pages = max(1, -(-len(answer) // PAGE)) if name in ("sizes", "names") else 1
            with self._lock:
                self.requests[name] += pages
            time.sleep(pages * self._latency_s)
            return answer

        return later


def fill(folder: Path, files: int) -> None:
    """*files* of 100 bytes, a thousand in each folder."""
    for number in range(files):
        path = folder / f"{number // 1000:04d}" / f"{number:06d}.bin"
        if number % 1000 == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(b"%100d" % number)


def timed(what: str, store: Distant, act: Callable[[], Any]) -> Any:
    """Call it, and print its duration, its CPU time and its requests."""
    store.requests.clear()
    start, cpu = time.perf_counter(), time.process_time()
    result = act()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    asked = ", ".join(f"{count} {name}" for name, count in sorted(store.requests.items()))
    print(f"{what:22} {seconds:7.1f} s  {cpu:6.1f} s CPU   {asked}", flush=True)
    return result


def measure(root: Path, files: int, latency_s: float) -> None:
    """Upload three checkpoints of one tree, list and prune them, restore the newest."""
    fill(root / "tree", files)
    (root / "back").mkdir()
    store: Any = Distant(open_store(str(root / "store")), latency_s)
    for step in (1, 2, 3):
        name = f"g1-step-{step:08d}-a1"
        prefix = checkpoints.checkpoint_prefix(name)

        def upload(prefix: str = prefix) -> tuple[manifests.ManifestFile, ...]:
            return manifests.upload(store, prefix, manifests.walk(root / "tree"), claim=1)

        done = timed(f"upload {step}", store, upload)
        manifest = Manifest(files=done, step=step, generation=1, attempt=1)
        timed(
            "  its manifest",
            store,
            partial(manifests.write_manifest, store, prefix, manifest, name=manifest_name(1)),
        )
    print(f"a manifest has {len(manifest.to_json()) / (1 << 20):.1f} MiB")
    timed("owner lists", store, lambda: checkpoints.complete_checkpoints(store, 1))
    timed("manifest is read", store, lambda: checkpoints.read_checkpoint(store, name))
    who: Any = {"generation": 1, "attempt": 1, "claim": 1, "candidates": ()}
    gone = timed("prune, one goes", store, lambda: checkpoints.prune(store, keep=2, **who))
    assert gone == ("g1-step-00000001-a1",), gone
    timed("restore", store, lambda: manifests.fetch(store, prefix, manifest, root / "back"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts KiB
    print(f"largest resident set {peak:.0f} MiB")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--latency-ms", type=float, default=10.0)
    options = parser.parse_args()
    memory = Path("/dev/shm")  # a file system in memory, of Linux
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        measure(Path(folder), options.files, options.latency_ms / 1000)


if __name__ == "__main__":
    main()
