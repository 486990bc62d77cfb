"""Invalid options, files and folders: one clear error, no traceback, nothing lost."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from envscaler_airflow.catalog import prices as shelf_module
from envscaler_airflow.catalog import sources
from envscaler_airflow.catalog.prices import Fetched, PriceCache
from envscaler_airflow.catalog.sources import COLUMNS
from envscaler_airflow.cli import main
from envscaler_airflow.cli.catalog import offers_command
from envscaler_airflow.clouds import Quote
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import Offer
from envscaler_airflow.planning.table import table_of

LINES = [
    "aws,us-east-1,us-east-1a,g4dn.xlarge,4,16,T4,1,16,0.526,0.2,x86_64,5-10%,list,list",
    "azure,eastus,,NC4as_T4_v3,4,28,T4,1,16,0.55,,x86_64,,list,",
]
SPEC = """
version: v1
name: train
resources: {accelerators: "T4:1"}
entrypoint: [python, train.py]
"""
BOX = "box,cpus=8,memory=32Gi,gpu=T4:1"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Run a command on the two offers above; *scope* is the text of a scope file."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "offers.csv").write_text("\n".join([",".join(COLUMNS), *LINES]) + "\n")
    (tmp_path / "s.yaml").write_text(SPEC)

    def run(command, *more, scope=None):
        spec = ["-f", str(tmp_path / "s.yaml")] if command == "plan" else []
        if scope is not None:
            (tmp_path / "scope.json").write_text(scope)
            spec += ["--scope", str(tmp_path / "scope.json")]
        return CliRunner().invoke(main, [command, *spec, "--offers", str(tmp_path), *more])

    return run


def is_refused(got, words):
    """Exit code 2, one error with *words*, and no plan."""
    assert isinstance(got.exception, SystemExit), got.exception
    assert got.exit_code == 2
    assert words in got.output.replace("\n", " ")
    assert "CHOSEN" not in got.output


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("plan", ["--max-usd-per-hour", "nan"], "'--max-usd-per-hour': max_usd_per_hour must be finite"),
        ("plan", ["--work", "nan", "--job", "resnet50-imagenet"], "'--work': units must be finite"),
        ("plan", ["--batch", "nan", "--job", "resnet50-imagenet"], "'--batch': batch must be finite"),
        ("plan", ["--value-of-hour", "nan"], "'--value-of-hour': value_of_hour must be finite"),
        ("plan", ["--work", "1e6"], "--work says nothing without a speed: add --job NAME"),
        ("plan", ["--batch", "8"], "--batch says nothing without a speed: add --job NAME"),
        ("plan", ["--deadline", "0s"], "--deadline 0s: no time is left to plan for; write 4h"),
        ("plan", ["--data", "awz:us-east-1:5"], "no cloud is named awz; there are alibaba, aws, azure"),
        ("plan", ["--data", f"aws:us-east-1:{'9' * 40}"], "write aws:us-east-1 or"),
        ("plan", ["--own", "box,cpus=4,cpus=8,memory=1Gi"], "write box,cpus=32,memory=128Gi"),
        ("plan", ["--own", f"box,cpus=4,memory=1Gi,gpu=T4:{'9' * 20}"], "write box,cpus=32,memory=128Gi"),
        ("offers", ["--clouds", ""], "--clouds '': there are aws, azure"),
        ("offers", ["--clouds", ","], "--clouds ',': there are aws, azure"),
        ("offers", ["--node-price", "pool=1"], "--node-price says nothing without the nodes"),
        ("offers", ["--like", "aws:g4dn.xlarge", "--gpu", "H100"], "--like says what is needed: leave out"),
        ("offers", ["--like", "aws:g4dn.xlarge", "--arch", "arm64"], "leave out --arch"),
        ("offers", ["--like", ""], "no such type in the catalog"),
        ("offers", ["--gpu", ""], "--gpu: "),
        ("run", ["--budget", "nan"], "'--budget': budget_usd must be finite"),
        ("run", ["--value-of-hour", "nan"], "'--value-of-hour': value_of_hour must be finite"),
        ("submit", ["--budget", "nan"], "'--budget': budget_usd must be finite"),
        ("plan", ["--strategy", "deadline", "--deadline", ""], "--deadline: '' is not a duration"),
        ("offers", ["--memory", ""], "--memory: '' is not an amount of memory"),
        ("run", ["--name", ""], "'--name': is empty; write one, or leave the option out"),
        ("run", ["--name", " "], "'--name': is empty"),
        ("run", ["--locked", ""], "'--locked': is empty"),
        ("run", ["--restore-from", ""], "'--restore-from': is empty"),
        ("submit", ["--name", ""], "'--name': is empty"),
        ("build", ["--locked", ""], "'--locked': is empty"),
    ],
)
def test_what_says_nothing_sensible_is_refused(shell, command, options, words):
    """The error has the option, and a valid value."""
    if command in ("run", "submit", "build"):
        is_refused(CliRunner().invoke(main, [command, *options]), words)
    else:
        is_refused(shell(command, *options), words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"aws": "us-east-1"}', "'us-east-1' is not a list of regions"),
        ('{"aws": ["us-east-1", null]}', "is not a list of regions"),
        ('{"aws": {"us-east-1": 1}}', "is not a list of regions"),
        ("{}", "names no cloud; write"),
        ("[]", "no scope"),
        ("[" * 100_000, "no scope"),
        ('{"awz": ["us-east-1"]}', "no offer is in any of its regions; there are offers of aws, azure"),
        ('{"aws": ["us-east-11"]}', "no offer is in any of its regions; there are offers of aws, azure"),
    ],
)
def test_a_scope_that_is_none_is_refused(shell, text, words):
    """A text is not a list of its letters, and a typo in a name is not an empty market."""
    is_refused(shell("offers", scope=text), words)


def test_nodes_that_are_nested_without_end_are_refused(shell, tmp_path):
    """Like every text that is not a list of nodes."""
    (tmp_path / "nodes.json").write_text('{"items": ' + "[" * 100_000)

    is_refused(shell("offers", "--nodes", str(tmp_path / "nodes.json")), "kubectl get nodes -o json")


def test_nodes_from_a_closed_standard_input_are_refused(monkeypatch):
    """Cron and daemons close it; click itself fails with a traceback then."""
    monkeypatch.setattr(sys, "stdin", None)

    with pytest.raises(click.BadParameter, match="standard input is closed; name a file"):
        offers_command.make_context("offers", ["--nodes", "-"])


def test_without_money_only_what_is_free_will_do(shell):
    """Every offer with a price exceeds a budget of zero, however fast it is."""
    is_refused(shell("plan", "--budget", "0", "--json"), "takes 0.2 USD an hour at best, budget is 0")

    free = json.loads(shell("plan", "--budget", "0", "--json", "--own", BOX).output)

    assert [item["name"] for item in free["candidates"]] == ["own/box/on-demand"]


def test_a_limit_without_a_known_time_says_that_it_has_no_effect(shell):
    """A budget is compared with the cost of the whole stage, which only a known job has (E5)."""
    note = (
        "--budget, --value-of-hour: without effect, since how long the stage takes is unknown: add --job NAME"
    )

    told = shell("plan", "--budget", "5", "--value-of-hour", "1").output
    known = shell("plan", "--budget", "5", "--job", "resnet50-imagenet", "--work", "1000").output

    assert note in told
    assert "without effect" not in known


def test_a_strategy_of_deadlines_without_one_says_so(shell):
    """It is planned as the cheapest."""
    assert "no --deadline was given" in shell("plan", "--strategy", "deadline").output
    assert "no --deadline was given" not in shell("plan", "--strategy", "deadline", "--deadline", "4h").output


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_run_from_a_shell_says_that_it_has_no_deadline(command):
    """Otherwise its strategy would silently count hours as free."""
    told = CliRunner().invoke(main, [command, "--strategy", "deadline", "--name", ""]).output
    plain = CliRunner().invoke(main, [command, "--strategy", "cost", "--name", ""]).output

    words = "a run from a shell has no deadline: --strategy deadline is cost here"
    assert (words in told, words in plain) == (True, False)


def test_a_full_disk_is_an_error_in_words(monkeypatch, shell):
    """Standard output is a file there."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("envscaler_airflow.cli.catalog.print_table", full)

    is_refused(shell("offers"), "No space left on device")


def test_without_a_home_one_hears_what_to_set(shell, monkeypatch):
    """A pod's user that the system does not know, without HOME; a folder for the cache is enough."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(sources.cache_dir()))
    assert shell("plan").exit_code == 0

    for name in ("ENVSCALER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)

    is_refused(shell("plan"), "Set HOME, or XDG_CACHE_HOME")
    is_refused(CliRunner().invoke(main, ["catalog", "show"]), "Set HOME, or XDG_CACHE_HOME")


def test_another_error_is_not_taken_for_a_missing_home(shell, monkeypatch):
    """A bug of ours stays a traceback."""

    def broken(*_, **__):
        raise RuntimeError("defect")

    monkeypatch.setattr("envscaler_airflow.cli.catalog.print_table", broken)

    assert str(shell("offers").exception) == "defect"


def test_a_cache_that_may_not_be_looked_into_costs_live_prices_only(shell, monkeypatch):
    """The folder of another user."""

    def closed(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", closed)
    monkeypatch.setattr(Path, "iterdir", closed)

    assert CliRunner().invoke(main, ["offers", "--gpu", "T4", "--limit", "1"]).exit_code == 0
    is_refused(CliRunner().invoke(main, ["catalog", "show"]), "cannot be read")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder for prices and a snapshot of five regions."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path))
    places = ["aws us-east-1", "aws us-west-2", "aws eu-west-1", "azure eastus", "gcp us-central1"]
    offers = [Offer(*place.split(), "g4dn.xlarge", "on-demand", 4, 16, usd_per_hour=0.5) for place in places]
    for module in ("catalog.prices", "cli.catalog"):
        monkeypatch.setattr(f"envscaler_airflow.{module}.packaged", lambda: table_of(offers))
    return tmp_path


class Feed:
    """Returns a T4's price in a region."""

    cloud = "aws"

    def fetch(self, region):
        """One price."""
        return Fetched("aws", region, (Quote("g4dn.xlarge", region, "", "on-demand", 0.6),), "test")


def _refresh(folder, region, start):
    start.wait()
    cache = PriceCache(folder)
    cache.refresh(Feed(), region, clock=lambda: 0.0)
    cache.compile()


def test_two_refreshes_at_once_lose_neither(cache):
    """The catalog that is built last has the price lists of both."""
    regions = ["us-east-1", "us-west-2", "eu-west-1"]
    context = multiprocessing.get_context("fork")
    start = context.Barrier(len(regions))
    found = [context.Process(target=_refresh, args=(cache, region, start)) for region in regions]
    for process in found:
        process.start()
    for process in found:
        process.join()

    index = json.loads((cache / "catalog.json").read_text())
    assert [process.exitcode for process in found] == [0, 0, 0]
    assert sorted(price_list["region"] for price_list in index["price_lists"]) == sorted(regions)
    assert not list(cache.glob("*.new"))


def test_nobody_changes_a_book_while_another_is_at_it(cache, monkeypatch):
    """The lock is taken while a price list is merged, and while the catalog is built."""
    held, real = [], {name: getattr(shelf_module, name) for name in ("refreshed", "pack")}

    def watched(name):
        def call(*args, **kwargs):
            with (cache / shelf_module.LOCK).open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(name)
            return real[name](*args, **kwargs)

        return call

    for name in real:
        monkeypatch.setattr(shelf_module, name, watched(name))

    PriceCache(cache).refresh(Feed(), "us-east-1", clock=lambda: 0.0)
    PriceCache(cache).compile()

    assert held == ["refreshed", "pack"]


def test_a_refresh_that_is_killed_keeps_what_it_had(cache, monkeypatch):
    """SIGKILL leaves no chance to clean up: plans already use the first region's prices."""

    class Killed(BaseException):
        pass

    class Cut(Feed):
        def fetch(self, region):
            if region != "us-east-1":
                raise Killed
            return super().fetch(region)

    monkeypatch.setattr("envscaler_airflow.cli.catalog.open_feed", lambda *_, **__: Cut())

    with pytest.raises(Killed):
        CliRunner().invoke(
            main, ["catalog", "refresh", "--cloud", "aws", "--region", "us-east-1", "--region", "us-west-2"]
        )

    index = json.loads((cache / "catalog.json").read_text())
    assert [price_list["region"] for price_list in index["price_lists"]] == ["us-east-1"]


@pytest.mark.parametrize("count", [1, 3])
def test_the_catalog_is_built_once_for_each_region(cache, monkeypatch, count):
    """It was built a second time at the end."""
    built, real = [], PriceCache.compile
    monkeypatch.setattr(PriceCache, "compile", lambda self: built.append(None) or real(self))
    monkeypatch.setattr("envscaler_airflow.cli.catalog.open_feed", lambda *_, **__: Feed())
    regions = [
        word for name in ("us-east-1", "us-west-2", "eu-west-1")[:count] for word in ("--region", name)
    ]

    done = CliRunner().invoke(main, ["catalog", "refresh", "--cloud", "aws", *regions])

    assert done.exit_code == 0, done.output
    assert len(built) == count


@pytest.mark.parametrize(
    ("clouds", "regions", "asked"),
    [
        (["aws"], ["us-east-1", "us-new-9"], ["aws us-east-1", "aws us-new-9"]),
        (["aws", "azure"], ["eastus", "us-east-1"], ["aws us-east-1", "azure eastus"]),
        (["aws", "azure"], ["eastus"], ["azure eastus"]),
        (["aws"], ["us-east-1", "us-east-1"], ["aws us-east-1"]),
    ],
)
def test_each_cloud_is_asked_for_its_own_regions(clouds, regions, asked, cache, monkeypatch):
    """None is left out silently, and each region goes to its own cloud."""
    heard = []

    def feed(cloud, **_):
        made = Feed()
        made.cloud = cloud
        made.fetch = lambda region: heard.append(f"{cloud} {region}") or Feed().fetch(region)
        return made

    monkeypatch.setattr("envscaler_airflow.cli.catalog.open_feed", feed)
    words = [word for cloud in clouds for word in ("--cloud", cloud)]
    words += [word for region in regions for word in ("--region", region)]

    CliRunner().invoke(main, ["catalog", "refresh", *words])

    assert heard == asked


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cloud", "aws", "--region", ""], "--region '': no such region of aws"),
        (["--cloud", "aws", "--region", "../etc"], "--region '../etc': no such region of aws"),
        (
            ["--region", "us-east-11"],
            "--region 'us-east-11': no such region of aws, azure, gcp; did you mean",
        ),
    ],
)
def test_a_region_that_is_none_is_refused(words, told, cache):
    """Before any request to a cloud."""
    is_refused(CliRunner().invoke(main, ["catalog", "refresh", *words]), told)
    assert not list(cache.iterdir())


def test_a_cloud_without_a_key_does_not_hold_up_the_others(cache, monkeypatch):
    """The others' answers are stored and in the catalog; the missing one is reported, exit code 2."""

    def feed(cloud, **_):
        if cloud == "gcp":
            raise SpecError("gcp: set ENVSCALER_GCP_API_KEY")
        return Feed()

    monkeypatch.setattr("envscaler_airflow.cli.catalog.open_feed", feed)
    words = ["catalog", "refresh", "--cloud", "gcp", "--cloud", "aws"]

    got = CliRunner().invoke(main, words)

    is_refused(got, "Error: gcp: set ENVSCALER_GCP_API_KEY")
    assert len(PriceCache(cache).price_lists()) == 3


def test_what_a_killed_refresh_left_half_written_is_written_over(cache):
    """A torn file of the last try is not a price list, and the next refresh removes it."""
    torn = cache / "prices-aws-us-east-1.json.new"
    torn.write_text('{"cloud": "a')

    assert PriceCache(cache).price_lists() == []
    PriceCache(cache).refresh(Feed(), "us-east-1", clock=lambda: 0.0)

    assert not torn.exists()
    assert [price_list.region for price_list in PriceCache(cache).price_lists()] == ["us-east-1"]
