"""The operators that clean up: after owners that will not return, and after runs that ended long ago."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from envscaler_airflow.errors import SpecError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from envscaler_airflow.store.keys import RunKey


class ReapOperator(BaseOperator):
    """Ends and removes orphaned attempts of a backend; schedule it, for example every hour.

    Most stages end without it: a killed task asks its attempt to stop, and an attempt whose owner is
    silent ends by its lease. This operator removes what is left if neither worked, and asks Airflow for the
    state of this deployment's tasks. It leaves an attempt alone for its first 15 minutes. Pushes what it
    removed.

    Args:
        compute: Backend, one that can list what runs on it.
        conn_id: Connection of the backend; for ``kubernetes``, the kubeconfig if not given.
        store_url: Run store, instead of the connection's or ``[envscaler] store_url``.
        store_conn_id: Connection of type ``envscaler_store``.
        grace_s: Seconds that nodes may take to end.
        dry_run: If True, only report what would be removed.
    """

    template_fields: Sequence[str] = ("compute", "conn_id", "store_url", "store_conn_id")
    ui_color = "#e8f3ec"

    def __init__(
        self,
        *,
        compute: str = "kubernetes",
        conn_id: str | None = None,
        store_url: str | None = None,
        store_conn_id: str | None = None,
        grace_s: float = 30.0,
        dry_run: bool = False,
        **kwargs: Any,
    ) -> None:
        """Keep the arguments; parsing the DAG file requests nothing."""
        super().__init__(**kwargs)
        self.compute = compute
        self.conn_id = conn_id
        self.store_url = store_url
        self.store_conn_id = store_conn_id
        self.grace_s = grace_s
        self.only_say = dry_run

    def execute(self, context: Context) -> list[dict[str, str]]:
        """Return the names of what was removed, and why."""
        del context
        from envscaler_airflow.hooks.settings import (  # noqa: PLC0415  (DAG files do without)
            compute_place,
            open_backend,
            store_place,
        )
        from envscaler_airflow.hooks.states import why_over  # noqa: PLC0415  (as above)
        from envscaler_airflow.owner.reap import reap  # noqa: PLC0415  (as above)

        place = store_place(self.store_url, self.store_conn_id)
        store = place.open()
        backend = open_backend(compute_place(self.compute, self.conn_id))
        deployment = place.deployment(store)

        def over(key: RunKey) -> str | None:
            return why_over(key) if key.deployment == deployment else None

        removed = []
        for orphan in reap(store, backend, task_is_over=over, grace_s=self.grace_s, dry_run=self.only_say):
            self.log.info("attempt=%s reason=%r", orphan.handle.name, orphan.reason)
            removed.append({"attempt": orphan.handle.name, "run": orphan.prefix, "reason": orphan.reason})
        self.log.info("%d %s", len(removed), "would go" if self.only_say else "gone")
        return removed


class PruneOperator(BaseOperator):
    """Removes old runs of this deployment from the run store; schedule it, for example every day.

    It asks Airflow which DAG runs were deleted, and removes their runs after 15 minutes. It never removes a
    run that may still train, or one whose outputs a newer run reads. Pushes what it removed as XCom.

    Args:
        older_than: A run goes if its last sign of an owner is older, such as ``"30d"``.
        store_url: Run store, instead of the connection's or ``[envscaler] store_url``.
        store_conn_id: Connection of type ``envscaler_store``.
        dry_run: If True, only report what would be removed.
    """

    template_fields: Sequence[str] = ("older_than", "store_url", "store_conn_id")
    ui_color = "#e8f3ec"

    def __init__(
        self,
        *,
        older_than: str = "30d",
        store_url: str | None = None,
        store_conn_id: str | None = None,
        dry_run: bool = False,
        **kwargs: Any,
    ) -> None:
        """Keep the arguments; parsing the DAG file requests nothing."""
        super().__init__(**kwargs)
        self.older_than = older_than
        self.store_url = store_url
        self.store_conn_id = store_conn_id
        self.only_say = dry_run

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Return each old run with what it took, and why it stays if it does."""
        del context
        from envscaler_airflow.envspec.quantities import duration_s  # noqa: PLC0415  (DAG files do without)
        from envscaler_airflow.hooks.settings import store_place  # noqa: PLC0415  (as above)
        from envscaler_airflow.hooks.states import why_gone  # noqa: PLC0415  (as above)
        from envscaler_airflow.owner.prune import prune  # noqa: PLC0415  (as above)
        from envscaler_airflow.store.keys import encode_part  # noqa: PLC0415  (as above)

        try:
            older_than_s = duration_s(self.older_than)
        except ValueError as err:
            raise SpecError(f"older_than: {err}") from err
        place = store_place(self.store_url, self.store_conn_id)
        store = place.open()
        ours = encode_part(place.deployment(store))
        found = []
        for old in prune(
            store,
            older_than_s=older_than_s,
            why_gone=why_gone,
            applies_to=lambda prefix: re.split(r"[./]", prefix)[0] == ours,
            dry_run=self.only_say,
        ):
            self.log.info(
                "run=%s kept=%r reason=%r bytes=%d", old.prefix, old.kept, old.reason, old.size_bytes
            )
            found.append(asdict(old))
        gone = sum(not one["kept"] for one in found)
        self.log.info("%d runs %s", gone, "would go" if self.only_say else "gone")
        return found
