"""``demo``: the example pipeline on a real, temporary Airflow; one machine is lost during the run."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import envscaler_airflow
from envscaler_agent.protocol import Status
from envscaler_airflow.cli.common import echo_json, output_option
from envscaler_airflow.cli.demo_places import OnCluster, Place, ThisMachine
from envscaler_airflow.cli.follow import StageFollower, moves, progress_parts
from envscaler_airflow.cli.shell_owner import signals
from envscaler_airflow.cli.specs import pairs
from envscaler_airflow.cli.tables import print_report
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.owner.report import run_bill, run_report
from envscaler_airflow.planning.amounts import duration_text
from envscaler_airflow.run import AttemptState, outcome_of
from envscaler_airflow.run.cost import Bill
from envscaler_airflow.run.narration import transfer_text
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.airflow_services import AirflowServices

DAG_ID = "retrain_text_classifier"
STAGES = ("prepare", "train", "score")
STUCK_S = 600.0
"""After so many seconds without any progress the demo stops. Chosen: five times the longest pause seen on
a loaded machine, Airflow's start of a task."""
LOOK_S = 0.5
ASK_S = 2.0
"""Between two questions to the API server, which shares the cores with the training."""
LOSE_AFTER_STEPS = 10
"""Steps beyond a checkpoint at which a moved training's machine is removed. Chosen: a visible loss."""
LOSE_ANYWAY = 0.6
"""Share of the work after which the demo stops waiting for a move. Chosen: enough work is left to resume."""

LOG_COLUMNS = 120
"""Width where there is no terminal. Chosen: the widest table of the report."""


@click.command()
@click.option(
    "--backend",
    type=click.Choice(["local", "kubernetes"]),
    default="local",
    show_default=True,
    help="kubernetes: the current context of the kubeconfig; see docs/how-to/kubernetes.md.",
)
@click.option("--set", "params", multiple=True, metavar="NAME=VALUE", help="Param of the DAG; repeatable.")
@click.option("--serve", is_flag=True, help="Keep Airflow's UI running at the end, until Ctrl-C.")
@click.option("--keep", is_flag=True, help="Keep the throwaway home, with store and logs.")
@click.option(
    "--dags",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the example DAG; the default is the one that comes with this package.",
)
@output_option
@click.pass_context
def demo(
    context: click.Context,
    *,
    backend: str,
    params: tuple[str, ...],
    serve: bool,
    keep: bool,
    dags: Path | None,
    as_json: bool,
) -> None:
    """Retrain a text classifier on a real Airflow, move it when that pays, and lose its machine once.

    Airflow runs on this machine, in a throwaway home; stages run here too, or as pods. At the end the command
    stops everything that it started.
    """
    folder = dags or _examples()
    if not (folder / f"{DAG_ID}.py").is_file():
        raise SpecError(f"{folder}: there is no {DAG_ID}.py; write --dags with a folder that has it")
    if backend == "local":
        _check_numpy()
    conf = {name: _value(text) for name, text in pairs(params, "--set").items()}
    load_spec(folder / "envs" / "train.yaml", parameters=conf)  # refuses what the form of the DAG would
    cluster = OnCluster() if backend == "kubernetes" else None
    home = Path(tempfile.mkdtemp(prefix="envscaler-demo-"))
    place: Place = cluster or ThisMachine(home)
    code = 1
    try:
        with signals():
            code = Demo(home, folder, _console(to_stderr=as_json), place, conf).run(
                serve=serve, on_end=echo_json if as_json else None
            )
    except KeyboardInterrupt:
        click.echo("interrupted: everything that was started is stopped", err=True)
        code = 130  # 128 + SIGINT, as shells say it
    except (RuntimeError, TimeoutError, httpx.HTTPError) as err:
        click.echo(f"the demo failed: {err}", err=True)
    finally:
        place.close()
        keep = keep or code not in (0, 130)
        if keep:
            click.echo(f"store and logs are kept in {home}", err=True)
        else:
            shutil.rmtree(home, ignore_errors=True)
    context.exit(code)


def _examples() -> Path:
    """The example DAGs: a wheel carries the demo's, a clone has them all in dags/examples."""
    package = Path(envscaler_airflow.__file__).parent
    carried = package / "examples"
    return carried if carried.is_dir() else package.parent / "dags" / "examples"


def _check_numpy() -> None:
    """Refuse to start an Airflow whose stages would fail at their first import.

    Raises:
        SpecError: numpy cannot be imported.
    """
    try:
        import_module("numpy")
    except ImportError as err:
        raise SpecError(f"the demo's stages need numpy ({err}); run: pip install numpy") from err


def _value(text: str) -> Any:
    """A param as JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class Demo:
    """One run of the pipeline."""

    def __init__(self, home: Path, dags: Path, console: Console, place: Place, conf: dict[str, Any]) -> None:
        """Name the places; nothing is started yet. *conf* sets params of the DAG."""
        self._home, self._dags, self._console, self._place = home, dags, console, place
        self._conf = {"compute": place.compute, **conf}
        self._begun = time.monotonic()
        self._followers: dict[str, StageFollower] = {}
        self._tasks: dict[str, str | None] = {}
        self._lost: str | None = None
        self._plain_at = 0.0

    def run(self, *, serve: bool, on_end: Callable[[dict[str, Any]], None] | None = None) -> int:
        """Exit code: 0 when the pipeline succeeded. *on_end* gets what happened, as JSON."""
        self._say("demo", f"starting a real Airflow in {self._home}")
        for note in self._place.notes:
            self._say("demo", note)
        with AirflowServices(self._home, self._dags, config=self._place.config()) as airflow:
            self._say("demo", f"Airflow answers at {airflow.url}")
            code = self._pipeline(airflow, on_end, is_kept=serve)
            if serve:
                self._serve(airflow)
        self._say("demo", "everything that was started is stopped")
        return code

    def _pipeline(
        self, airflow: AirflowServices, on_end: Callable[[dict[str, Any]], None] | None, *, is_kept: bool
    ) -> int:
        """One run of the DAG; with *is_kept* a failure is printed and the UI stays up to show it."""
        try:
            run_id = airflow.trigger_dag(DAG_ID, conf=self._conf, timeout_s=STUCK_S)
            self._say("demo", f"triggered {DAG_ID} ({run_id})")
            self._open_followers(run_id)
            with self._view():
                state = self._follow(airflow, run_id)
            code = self._conclude(airflow, run_id, state)
            if on_end is not None:
                on_end(self._summary(state))
        except (RuntimeError, TimeoutError, httpx.HTTPError) as err:
            if not is_kept:
                raise
            self._say("demo", f"the demo failed: {err}")
            return 1
        return code

    def _summary(self, state: str) -> dict[str, Any]:
        reports = {
            stage: run_report(follower.state, now=time.time()).to_dict()
            for stage, follower in self._followers.items()
            if follower.state.attempts
        }
        told = conclusions(self._followers, self._lost)
        return {"state": state, "tasks": self._tasks, "conclusions": told, "reports": reports}

    # -- while it runs -------------------------------------------------------------------------

    def _open_followers(self, run_id: str) -> None:
        for stage in STAGES:
            key = RunKey(self._place.deployment, DAG_ID, run_id, stage)
            self._followers[stage] = StageFollower(Run(self._place.store, key), stage)

    def _follow(self, airflow: AirflowServices, run_id: str) -> str:
        """Report the progress of the DAG run, and return its final state."""
        asked_at, state = 0.0, "running"
        patience = Patience(time.monotonic())
        while state not in ("success", "failed"):
            self._look()
            patience.look(self._marks(), time.monotonic())
            self._lose_machine()
            if time.monotonic() - asked_at > ASK_S:
                state = self._ask(airflow, run_id, state)
                asked_at = time.monotonic()
            self._refresh()
            time.sleep(LOOK_S)
        self._look()
        return state

    def _ask(self, airflow: AirflowServices, run_id: str, state: str) -> str:
        """State of the DAG run; *state*, as it was, while the API server is too busy to answer."""
        airflow.keep_up()
        try:
            now = airflow.run_state(DAG_ID, run_id)
            self._note_tasks(airflow.task_states(DAG_ID, run_id))
        except httpx.TransportError as err:
            self._say("airflow", f"no answer, retrying: {err or type(err).__name__}")
            return state
        return now

    def _marks(self) -> tuple[object, ...]:
        """What changes when anything goes on: events, phases, steps, checkpoints, output, states of tasks."""
        followers = (follower.marks() for follower in self._followers.values())
        return (*followers, tuple(self._tasks.items()))

    def _look(self) -> None:
        for stage, follower in self._followers.items():
            for line in follower.lines():
                self._say(stage, line)

    def _note_tasks(self, tasks: dict[str, str | None]) -> None:
        for task, state in tasks.items():
            if state != self._tasks.get(task) and state in ("success", "failed", "skipped", "up_for_retry"):
                self._say("airflow", f"task {task} is {state}")
        self._tasks = tasks

    def _lose_machine(self) -> None:
        """Take the training's machine away, once."""
        follower = self._followers["train"]
        why = None if self._lost else reason_to_lose(follower)
        attempt = follower.attempt()
        if why is None or attempt is None or attempt.handle is None:
            return
        self._lost = why
        done = self._place.lose(attempt.handle)
        step = follower.status.progress.step if follower.status else None
        self._say("demo", f"{done.format(attempt=attempt.number, step=step)}: {why}")

    # -- what is shown -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _view(self) -> Iterator[None]:
        self._live: Live | None = None
        if not self._console.is_terminal:
            yield
            return
        with Live(self._panel(), console=self._console, auto_refresh=False, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def _say(self, who: str, text: str) -> None:
        seconds = time.monotonic() - self._begun
        style = "dim" if text.startswith("| ") else "bold" if who == "demo" else ""
        self._console.print(
            Text(f"{seconds:6.1f} s  {who:<8} ", style="cyan") + Text(text, style=style), soft_wrap=True
        )

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
        elif time.monotonic() - self._plain_at > 10:
            self._plain_at = time.monotonic()
            for stage, follower in self._followers.items():
                attempt, status = follower.attempt(), follower.status
                if attempt is not None and status is not None and status.progress.step:
                    self._say(stage, f"{attempt.allocation.name}: {progress_words(status)}")

    def _panel(self) -> RenderableType:
        table = Table("STAGE", "TASK", "ATTEMPT", "MACHINE", "DONE", "", box=None, pad_edge=False)
        for stage, follower in self._followers.items():
            current, status = follower.state.current, follower.status
            done, total = _done(status)
            table.add_row(
                stage,
                self._tasks.get(stage) or "-",
                str(current.number) if current else "-",
                current.allocation.name if current else "-",
                ProgressBar(total=total, completed=done, width=30) if total else "",
                progress_words(status) if status else "",
            )
        return Group(Text(""), table)

    # -- at the end ----------------------------------------------------------------------------

    def _conclude(self, airflow: AirflowServices, run_id: str, state: str) -> int:
        for stage, follower in self._followers.items():
            if follower.state.attempts:
                self._console.rule(f"cost of {stage}", align="left")
                print_report(run_report(follower.state, now=follower.now()), self._console)
        self._console.rule("what happened", align="left")
        for line in conclusions(self._followers, self._lost):
            self._console.print(f"- {line}", soft_wrap=True)
        if state == "success":
            self._console.print(f"- the pipeline succeeded in {time.monotonic() - self._begun:.0f} s")
            return 0
        failed = [task for task, outcome in self._tasks.items() if outcome == "failed"]
        for task in failed:
            self._console.rule(f"log of {task}", align="left")
            tries = airflow.task(DAG_ID, run_id, task)["try_number"]
            for line in airflow.logs(DAG_ID, run_id, task, try_number=tries)[-30:]:
                self._console.print(line, soft_wrap=True, markup=False)
        self._console.print(f"the pipeline failed: {', '.join(failed) or state}", style="bold red")
        return 1

    def _serve(self, airflow: AirflowServices) -> None:
        self._say("demo", f"Airflow keeps running at {airflow.url} (no login needed); Ctrl-C stops it")
        try:
            while True:
                airflow.keep_up()
                time.sleep(1)
        except KeyboardInterrupt:
            self._say("demo", "stopping")


class Patience:
    """Waits while something moves; stops once nothing has for :data:`STUCK_S`."""

    def __init__(self, now: float) -> None:
        """Begin at *now*, seconds of a monotonic clock."""
        self._moved = now
        self._last: tuple[object, ...] | None = None

    def look(self, marks: tuple[object, ...], now: float) -> None:
        """Compare *marks* with those of the previous check.

        Raises:
            TimeoutError: They have not changed for so long.
        """
        if marks != self._last:
            self._last, self._moved = marks, now
        elif now - self._moved > STUCK_S:
            raise TimeoutError(f"nothing has moved for {duration_text(now - self._moved)}: {marks[-1]}")


def reason_to_lose(follower: StageFollower) -> str | None:
    """Why now is the time to take the machine away; None while it is not.

    Some steps after a checkpoint of the attempt that was moved, so that something is lost and something is
    kept; or, once it is clear that no move comes, at the next report after a checkpoint: little time is left.
    """
    attempt, status = follower.attempt(), follower.status
    if attempt is None or status is None or follower.state.pending or status.ended is not None:
        return None
    step, saved = status.progress.step, status.last_checkpoint_step
    if status.attempt != attempt.number or step is None or saved is None:
        return None
    if moves(follower.state):
        return "a spot loss after the move" if step - saved >= LOSE_AFTER_STEPS else None
    done, total = _done(status)
    if total and done / total > LOSE_ANYWAY:
        return "a spot loss; no move was requested so far"
    return None


def conclusions(followers: dict[str, StageFollower], lost: str | None) -> list[str]:
    """What the demo was to show, and whether it did."""
    train = followers["train"].state
    lines = [_about_move(left, came) for left, came in moves(train)]
    if not lines:
        lines.append("no move: on this machine none would have paid within the time of the training")
    if lost is None:
        lines.append("the training ended before its machine could be removed")
    for before, after in itertools.pairwise(train.attempts_of(train.generation)):
        if outcome_of(before.outcome).is_disruption:
            kept, again = after.end.start_step, before.step
            steps = f", {again - kept} steps done again" if again is not None and kept is not None else ""
            lines.append(f"attempt {before.number} was lost, attempt {after.number} went on{steps}")
    worth = _worth(run_bill(train, now=followers["train"].now()), followers["train"].value_of_hour())
    lines += [worth] if worth else []
    metrics = followers["train"].output_json("model", "metrics.json")
    if metrics:
        lines.append(
            f"{metrics.get('samples')} samples in {metrics.get('epochs')} epochs make the model: "
            f"{metrics.get('samples_repeated')} repeated, {metrics.get('samples_dropped')} dropped"
        )
    scores = followers["score"].output_json("predictions", "scores.json")
    if scores:
        lines.append(
            f"accuracy {_share(scores.get('accuracy'))} on {scores.get('documents', '?')} held-out documents "
            f"(always the most frequent label: {_share(scores.get('majority'))})"
        )
    return lines


def _share(value: object) -> str:
    """A share of 1 as the stage wrote it; ``?`` when it did not."""
    return f"{value:.3f}" if isinstance(value, int | float) and not isinstance(value, bool) else "?"


def _worth(bill: Bill, hour_usd: float | None) -> str | None:
    """The objective of the run and of the plan that never moves; None when a part of it is unknown."""
    static = bill.static
    if hour_usd is None or bill.usd is None or bill.wall_s is None or static is None:
        return None
    if static.usd is None or static.hours is None:
        return None
    return (
        f"with an hour worth ${hour_usd:.2f}, cost plus time was "
        f"${bill.usd + hour_usd * bill.wall_s / 3600:.4f}; on {static.allocation.name} throughout, "
        f"with no loss, ${static.usd + hour_usd * static.hours:.4f}"
    )


def _about_move(left: AttemptState, came: AttemptState) -> str:
    words = f"moved from {left.allocation.name} to {came.allocation.name}"
    speeds = [_steps_per_s(attempt) for attempt in (left, came)]
    if speeds[0] and speeds[1]:
        words += f": {speeds[0]:.1f} steps/s, then {speeds[1]:.1f} ({speeds[1] / speeds[0]:.2f} times)"
    return words


def _steps_per_s(attempt: AttemptState) -> float | None:
    end = attempt.end
    if end.elapsed_s is None or end.first_step_s is None or end.step is None or end.start_step is None:
        return None
    seconds = end.elapsed_s - end.first_step_s
    return (end.step - end.start_step) / seconds if seconds > 0 else None


def progress_words(status: Status) -> str:
    """``epoch 12/36, step 528 of 1,584 (33 %), 18.3 steps/s, loss 0.71``, as far as it is known."""
    progress, moving = status.progress, transfer_text(status)
    epoch = f"epoch {progress.epoch}" + (f"/{progress.epochs}" if progress.epochs else "")
    parts = [
        *([] if progress.epoch is None else [epoch]),
        *progress_parts(status),
        *([moving] if moving else []),
    ]
    return ", ".join(parts) or status.phase


def _console(*, to_stderr: bool = False) -> Console:
    """The terminal as it is; wide enough for the report's tables where the output is piped."""
    is_terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    return Console(stderr=to_stderr) if is_terminal else Console(stderr=to_stderr, width=LOG_COLUMNS)


def _done(status: Status | None) -> tuple[int, int]:
    progress = status.progress if status else None
    return (progress.step or 0, progress.total_steps or 0) if progress else (0, 0)
