"""``submit``: own a stage on a Kubernetes cluster from a shell until it ends."""

from __future__ import annotations

import time
import uuid
from typing import Any

import click

from envscaler_airflow.backends.base import Handle
from envscaler_airflow.backends.kubernetes import KubernetesBackend
from envscaler_airflow.build.stage_image import with_image
from envscaler_airflow.cli.cluster import cluster_options
from envscaler_airflow.cli.common import NOT_NEGATIVE, not_empty, shell_key, store_option, without_deadline
from envscaler_airflow.cli.specs import environment_secret, spec_options, spec_registry
from envscaler_airflow.cli.tables import print_report
from envscaler_airflow.controller.act import Controller
from envscaler_airflow.controller.hold import Holder
from envscaler_airflow.controller.request import request_stop
from envscaler_airflow.controller.stage import Delivered, Stage, SupersededError, Waiting
from envscaler_airflow.controller.watch import Watch
from envscaler_airflow.errors import BackendError
from envscaler_airflow.lifecycle import Actor
from envscaler_airflow.spec import load_spec
from envscaler_airflow.store.base import Store, check_store
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.logs import read_logs


@click.command()
@spec_options
@click.option("--name", callback=not_empty, help="Name of the run; the same name again goes on with it.")
@click.option(
    "--strategy",
    default="balanced",
    callback=without_deadline,
    type=click.Choice(["cost", "balanced", "performance", "deadline"]),
)
@click.option("--budget", "budget_usd", type=NOT_NEGATIVE, help="Most that the run may cost, USD.")
@click.option("--fresh", is_flag=True, help="Begin anew even if the run exists.")
@cluster_options
@store_option
def submit(
    *,
    path: str,
    parameters: dict[str, str],
    inputs: dict[str, str] | None,
    store: Store,
    backend: KubernetesBackend,
    **options: Any,
) -> None:
    """Run the stage of a spec as a Job and wait for it; Ctrl-C checkpoints and stops it.

    The same name again goes on with that run; a process that still holds it then ends.

    status, logs, cancel and report take the run's name, from any machine that reaches the store.
    """
    check_store(store)
    spec = load_spec(
        path, parameters=parameters, inputs=inputs, target="kubernetes", registry=spec_registry()
    )
    spec = with_image(spec, image=backend.settings.image, repository=backend.settings.image_repository)
    name = str(options["name"] or f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:4]}")
    key = shell_key(store, name, spec.name)
    stage = Stage(
        spec=spec,
        spec_source=path,
        parameters=parameters,
        inputs=inputs or {},
        strategy=options["strategy"],
        budget_usd=options["budget_usd"],
        restart="fresh" if options["fresh"] else "resume",
        resolve_secret=cluster_secret,
    )
    click.echo(f"run: {key.prefix}")
    result = _Submission(store, key, stage, backend).hold()
    for output, uri in result.outputs.items():
        click.echo(f"output {output}: {uri}")
    print_report(result.report)


def cluster_secret(reference: str) -> str:
    """Value of ``env:NAME``; ``secret:NAME/key`` stays a reference, which the pod resolves.

    Raises:
        SpecError: Another kind of reference, or the variable is not set.
    """
    return "" if reference.startswith("secret:") else environment_secret(reference)


class _Submission:
    """One process that owns the run and shows what happens."""

    def __init__(self, store: Store, key: RunKey, stage: Stage, backend: KubernetesBackend) -> None:
        # Each start from a shell counts as a clear: what had ended is taken up again.
        now = time.time_ns()
        self._actor = Actor(ti_id=str(uuid.uuid4()), try_number=now, max_tries=now)
        self._store, self._prefix, self._backend = store, key.prefix, backend
        self._controller = Controller(store=store, key=key, backend=backend, actor=self._actor, stage=stage)
        self._waiting: Waiting | None = None
        self._cursors: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._shown: dict[int, str] = {}

    def hold(self) -> Delivered:
        """Until the run is delivered."""
        holder = Holder(
            self._controller,
            self._store,
            self._prefix,
            self._backend,
            self._actor,
            on_wait=self._on_wait,
            on_look=self._on_look,
        )
        try:
            return self._hold(holder)
        except SupersededError as err:
            raise SupersededError(
                f"{self._prefix}: another process was started with this name and goes on with the run; "
                "`envscaler logs -f` shows it"
            ) from err

    def _hold(self, holder: Holder) -> Delivered:
        try:
            return holder.hold()
        except KeyboardInterrupt:
            if not holder.is_ours():
                raise  # nothing was begun, and another owner is not to be stopped
            click.echo("-- asked to checkpoint and stop; Ctrl-C again leaves it to its lease", err=True)
            request_stop(self._store, self._prefix, reason="Ctrl-C", by="shell")
            return holder.go_on()

    def _on_wait(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._shown.clear()
        click.echo(f"-- {waiting.reason}", err=True)

    def _on_look(self, _watch: Watch) -> None:
        self._print_logs()
        handle = self._waiting.watching.handle if self._waiting is not None else None
        if handle is None:
            return
        try:
            self._print_states(Handle.from_dict(handle))
        except BackendError as err:
            self._say(-1, f"the cluster does not answer: {err}")

    def _print_states(self, handle: Handle) -> None:
        """What a node waits for, once per change."""
        for node in self._backend.observe(handle).nodes:
            words = [node.state, node.reason if node.reason != node.state else "", node.detail]
            self._say(node.node, f"node {node.node}: " + ", ".join(word for word in words if word))

    def _say(self, node: int, line: str) -> None:
        if self._shown.get(node) != line:
            self._shown[node] = line
            click.echo(f"-- {line}", err=True)

    def _print_logs(self) -> None:
        watching = self._waiting.watching if self._waiting is not None else None
        if watching is None or not watching.attempt:
            return
        for node in range(watching.nodes):
            key = (watching.generation, watching.attempt, node)
            data, self._cursors[key] = read_logs(
                self._store, self._prefix, attempt=key[:2], node=node, cursor=self._cursors.get(key, (1, 0))
            )
            text = data.decode("utf-8", errors="replace")
            prefix = f"[{node}] " if watching.nodes > 1 else ""
            for line in text.splitlines():
                click.echo(prefix + line)
