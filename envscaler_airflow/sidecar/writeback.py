"""Upload the training's changes to writable volumes of an object store.

A file counts as changed when its ctime is later than the volume's copy-in or last upload, so the training's
clock has no effect. Deleted files stay in the store. If two nodes write the same name, the last upload
counts.
"""

from __future__ import annotations

from pathlib import Path

from envscaler_airflow.backoff import Backoff
from envscaler_airflow.errors import CheckpointError, ProtocolError, StoreError
from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.sidecar.spool_state import Mount
from envscaler_airflow.store import manifests
from envscaler_airflow.store.base import open_store
from envscaler_airflow.store.outputs import is_output_uri

COARSE_NS = 10_000_000
"""How far the file system's time may be behind, ns. Source: Linux, coarse clock, at most 10 ms."""


class WriteBack:
    """Uploads changed files with every checkpoint and at the end of a command that succeeded."""

    def __init__(self, context: SidecarContext) -> None:
        """Continue from the marks in the spool."""
        self._context = context
        self._backoff = Backoff(context.monotonic)

    def mark(self) -> None:
        """Record that the store has everything in the volumes now. Raises OSError."""
        for index, _ in self._writable():
            self._context.spool.write(self._mark(index), b"")

    def flush(self) -> None:
        """Upload what changed since the last time.

        Raises:
            CheckpointError: A link leads outside its volume, or a name cannot be kept; the others are
                uploaded.
            StoreError, OSError: Some files are not uploaded; the call can be repeated.
            WorkInterruptedError: The sidecar must end.
        """
        refused: CheckpointError | None = None
        for index, mount in self._writable():
            mark = self._mark(index)
            since = self._marked_ns(mark)
            now = mark.with_suffix(".new")
            self._context.spool.write(now, b"")
            try:
                self._upload(mount, since - COARSE_NS)
            except CheckpointError as err:
                refused = refused or err
            else:
                self._context.spool.folder.rename(now.name, mark.name)
        if refused is not None:
            raise refused

    def step(self) -> bool:
        """The same at the end; True when nothing is left, or when a volume cannot be uploaded.

        Raises:
            WorkInterruptedError: The sidecar must end; the next one continues.
        """
        if not self._backoff.is_ready:
            return False
        try:
            self.flush()
        except CheckpointError as err:
            self._context.memory.update(failed=str(err))
            return True
        except (StoreError, OSError) as err:
            self._backoff.failed()
            self._context.messages.say("volumes", f"volumes wait: {err}")
            return False
        self._context.messages.say("volumes", None)
        return True

    def _writable(self) -> list[tuple[int, Mount]]:
        found = [item for item in enumerate(self._context.layout.mounts) if item[1].is_written_back]
        return [(index, mount) for index, mount in found if not is_output_uri(mount.source)]

    def _marked_ns(self, mark: Path) -> int:
        """When the mark was made, by the file system's clock; 0 without one."""
        try:
            return self._context.spool.folder.stat(mark.name).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _mark(self, index: int) -> Path:
        return self._context.spool.root / f"volume-{index}.mark"

    def _upload(self, mount: Mount, since_ns: int) -> None:
        context = self._context
        context.check_place(Path(mount.path))
        store = open_store(mount.source, context.layout.store_options)
        found = manifests.walk(Path(mount.path), parent=context.place(Path(mount.path)))
        items = [item for item in found if item.ctime_ns >= since_ns]
        with context.transfer("uploading", f"volume {mount.name}") as moved:
            moved.begin(sum(item.size for item in items))

            def put(item: manifests.TreeFile) -> None:
                try:
                    with item.open() as stream, moved.sending(stream, item.size):
                        store.put_file(item.path, stream)
                except (FileNotFoundError, manifests.ChangedError):
                    return  # the file that replaced it is newer than this scan, and is uploaded next time
                except ProtocolError as err:
                    raise CheckpointError(f"volume {mount.name}: {item.path}: {err}") from err

            manifests.side_by_side(
                put, items, store.at_once, size=lambda item: item.size, between=context.between
            )
