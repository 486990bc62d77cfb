"""Where the store is, how secrets resolve, and what the checkpoint hook does. No network."""

from __future__ import annotations

import json
import re
import sys

import pytest
from airflow.sdk._shared.secrets_masker import redact, reset_secrets_masker
from botocore.exceptions import ClientError, CredentialRetrievalError, EndpointConnectionError

from envscaler_agent.protocol import Manifest
from envscaler_airflow import get_provider_info
from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.errors import CheckpointError, SpecError, StoreError
from envscaler_airflow.hooks.checkpoint import CheckpointHook
from envscaler_airflow.hooks.connections import resolve_secret
from envscaler_airflow.hooks.settings import store_place
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import NewGeneration
from envscaler_airflow.store import (
    check_store,
    checkpoints,
    manifests,
    open_store,
)
from envscaler_airflow.store.run import Run

CONNECTION = """{
  "conn_type": "envscaler_store", "login": "AKIDEXAMPLE", "password": "s3cr3t-key",
  "extra": {"store_url": "s3://from-connection/runs", "region_name": "eu-west-1", "endpoint_url": "", "x": 1}
}"""


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Settings of a deployment, a connection of our type and one of another type, and a JSON variable."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", "/from/setting")
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "unit")
    monkeypatch.setenv("AIRFLOW_CONN_STORE", CONNECTION)
    monkeypatch.setenv(
        "AIRFLOW_CONN_WANDB", '{"conn_type": "http", "password": "pw-12345", "extra": {"k": "ex-12345"}}'
    )
    monkeypatch.setenv("AIRFLOW_VAR_HF", '{"token": "hf-12345"}')
    monkeypatch.setenv("AIRFLOW_VAR_PLAIN", "plain-12345")
    monkeypatch.setenv("UNIT_SECRET", "env-12345")
    yield
    reset_secrets_masker()


def test_the_operators_url_wins_then_the_connections_then_the_setting():
    """The same order applies wherever a store is opened."""
    assert store_place("/mine", "store").url == "/mine"
    assert store_place(None, "store").url == "s3://from-connection/runs"
    assert store_place().url == "/from/setting"


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "s3://bucket/runs"}, "s3://bucket/runs"),
        ({"host": "file:///srv/store", "extra": {"store_url": "s3://other"}}, "file:///srv/store"),
        ({"host": "s3://bucket", "schema": "runs/of/ours"}, "s3://bucket/runs/of/ours"),
        ({"host": "", "extra": {"store_url": "s3://bucket/runs"}}, "s3://bucket/runs"),
    ],
)
def test_the_forms_first_field_is_the_stores_url(monkeypatch, fields, url):
    """Complete, as from the form, or in two parts, as from a connection's URI (F14)."""
    monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps({"conn_type": "envscaler_store", **fields}))

    assert store_place(None, "store").url == url


def test_the_form_asks_for_the_url_first():
    """Airflow shows ``host`` first; fields without a meaning for a store are hidden (F14)."""
    (form,) = get_provider_info()["connection-types"]
    behaviour = form["ui-field-behaviour"]

    assert behaviour["relabeling"]["host"] == "Store URL"
    assert behaviour["hidden-fields"] == ["schema", "port"]
    assert list(form["conn-fields"]) == ["region_name", "endpoint_url"]


def test_a_connection_gives_options_and_keeps_its_secrets_apart():
    """Options are in files of the machine; only its sidecar gets the keys, and they are not shown."""
    place = store_place(None, "store")

    assert place.options == {"region_name": "eu-west-1"}
    keys = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "s3cr3t-key"}
    assert place.login == StoreLogin(keys)
    assert "s3cr3t-key" not in repr(place)


@pytest.mark.parametrize(
    ("extra", "login"),
    [
        ({"profile_name": "team"}, StoreLogin(profile="team")),
        ({}, StoreLogin()),
        (
            {"role_arn": "arn:aws:iam::1:role/x"},
            StoreLogin(
                refusal="connection 'store' assumes arn:aws:iam::1:role/x, which a machine cannot renew"
            ),
        ),
        (
            {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_session_token": "c"},
            StoreLogin(
                refusal="connection 'store' has a session token, which expires and a machine cannot renew"
            ),
        ),
    ],
)
def test_what_a_machine_cannot_renew_is_no_login_of_it(monkeypatch, extra, login):
    """A profile is a name; a role and a token expire while the stage runs."""
    store_connection(monkeypatch, {"store_url": "s3://bucket/runs", **extra})

    assert store_place(None, "store").login == login


def test_keys_for_a_store_that_takes_none_are_refused(monkeypatch):
    """Neither side would use them."""
    body = {"conn_type": "envscaler_store", "host": "gs://bucket/runs", "login": "a", "password": "b"}
    monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps(body))

    with pytest.raises(SpecError, match=r"'store' has keys, which only an s3:// store takes: .*gs://"):
        store_place(None, "store")


def test_a_folder_needs_no_provider(monkeypatch):
    """Options apply to the buckets that a stage reads."""
    monkeypatch.setitem(sys.modules, "airflow.providers.amazon.aws.hooks.base_aws", None)

    assert store_place("/mine", "store").options == {"region_name": "eu-west-1"}


def test_without_the_amazon_provider_the_extra_is_named(monkeypatch):
    """The message contains the command to run."""
    monkeypatch.setitem(sys.modules, "airflow.providers.amazon.aws.hooks.base_aws", None)

    with pytest.raises(SpecError, match=r"pip install 'envscaler-airflow\[amazon\]'"):
        store_place(None, "store")


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ClientError({"Error": {"Code": "AccessDenied"}}, "AssumeRole"), False),
        (EndpointConnectionError(endpoint_url="http://sts"), True),
        (CredentialRetrievalError(provider="sso", error_msg="expired"), True),
        (FileNotFoundError("/token"), True),
    ],
)
def test_credentials_that_are_not_given_now_end_no_stage_that_runs(monkeypatch, error, transient):
    """It is an error of the store, and watchers continue; only a role that AWS refuses is permanent."""

    def refused(_):
        raise error

    monkeypatch.setattr("airflow.providers.amazon.aws.hooks.base_aws.AwsBaseHook.get_session", refused)

    with pytest.raises(StoreError, match="store s3://from-connection/runs: connection 'store': ") as caught:
        store_place(None, "store").open()

    assert caught.value.transient is transient


def store_connection(monkeypatch, extra):
    """Set the extra of connection ``store``."""
    text = json.dumps({"conn_type": "envscaler_store", "extra": extra})
    monkeypatch.setenv("AIRFLOW_CONN_STORE", text)


def test_an_option_that_is_false_is_an_option(monkeypatch):
    """``verify`` is false for a server whose certificate no authority has signed."""
    store_connection(monkeypatch, {"store_url": "s3://bucket/runs", "verify": False, "endpoint_url": ""})

    assert store_place(None, "store").options == {"verify": False}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["s3://bucket/runs"], "its extra is not a JSON object"),
        ({"store_url": 5}, "store_url: got 5, expected text"),
        ({"store_url": "s3://bucket/runs", "endpoint_url": "nonsense"}, "Invalid endpoint: nonsense"),
        ({"store_url": "s3://bucket/runs", "config_kwargs": "fast"}, "connection 'store': .*'str'"),
        ({"store_url": "s3://bucket/runs", "region_name": 5}, "cannot be opened with .*region_name"),
    ],
)
def test_an_extra_that_cannot_be_used_is_reported(monkeypatch, extra, words):
    """Under *Test*, and before a stage begins, with a clear message."""
    store_connection(monkeypatch, extra)

    is_good, said = CheckpointHook("store").test_connection()

    assert not is_good
    assert re.search(words, said)


def test_a_connection_of_another_type_is_refused():
    """Its host is not a valid store."""
    with pytest.raises(SpecError, match="'wandb' is of type 'http', expected envscaler_store or aws"):
        store_place(None, "wandb")


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("env:UNIT_SECRET", "env-12345"),
        ("connection:wandb/password", "pw-12345"),
        ("connection:wandb/k", "ex-12345"),
        ("variable:plain", "plain-12345"),
        ("secret:wandb/password", "pw-12345"),
        ("secret:hf/token", "hf-12345"),
    ],
)
def test_a_reference_becomes_its_value_and_is_masked(reference, value):
    """From now on Airflow masks it in its logs."""
    assert resolve_secret(reference) == value
    assert redact(f"it is {value}") == "it is ***"


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("env:UNIT_NOTHING", "no such environment variable"),
        ("connection:nobody/password", "no such connection"),
        ("connection:wandb/nothing", "that field of it is empty"),
        ("variable:nothing", "no such variable"),
        ("secret:hf/nothing", "neither a connection"),
    ],
)
def test_a_reference_to_nothing_says_where_it_looked(reference, told):
    """The training never starts without it."""
    with pytest.raises(SpecError, match=told):
        resolve_secret(reference)


def test_an_extra_that_is_no_object_holds_no_field(monkeypatch):
    """Another tool may have written it: the reference is reported as unresolvable."""
    monkeypatch.setenv("AIRFLOW_CONN_WANDB", '{"conn_type": "http", "extra": ["k"]}')

    with pytest.raises(SpecError, match="connection:wandb/k: Airflow has no such connection, or that field"):
        resolve_secret("connection:wandb/k")


def test_what_is_no_reference_is_not_repeated():
    """The text may be the secret itself."""
    with pytest.raises(SpecError) as caught:
        resolve_secret("hunter2-hunter2")

    assert "hunter2" not in str(caught.value)


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """Return a hook on a store with one run that has checkpoints at steps 10 and 20."""
    url = f"file://{tmp_path}/store"
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", url)
    store = open_store(url)
    check_store(store)
    made = CheckpointHook()
    key = made.key("dag", "run", "train")
    log = Run(store, key).events
    log.append(0, NewGeneration(generation=1, spec_hash="h"), actor=Actor("ti", 1, 3))
    for step in (10, 20):
        save(Run(store, key), tmp_path, step)
    return made


def save(run, tmp_path, step):
    """Write a complete checkpoint of attempt 1."""
    folder = tmp_path / f"step-{step}"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes([step]) * step)
    prefix = checkpoints.checkpoint_prefix(f"g1-step-{step:08d}-a1")
    files = manifests.upload(run, prefix, manifests.walk(folder))
    manifest = Manifest(files=files, step=step, generation=1, attempt=1)
    manifests.write_manifest(run, prefix, manifest, name="manifest-c1.json")


def test_the_hook_lists_newest_first(hook):
    """With the facts that the training reported and a URI for restore_from."""
    found = hook.list_checkpoints(hook.key("dag", "run", "train"))

    assert [(item.step, item.size_bytes, item.attempt) for item in found] == [(20, 20, 1), (10, 10, 1)]
    assert found[0].uri.endswith("/checkpoints/g1-step-00000020-a1")


def test_the_hook_finds_the_newest_good_one(hook):
    """It skips one whose bytes disagree with its manifest, and verify names the reason."""
    key = hook.key("dag", "run", "train")
    name = "g1-step-00000020-a1"
    hook.get_conn().write(f"{key.prefix}/checkpoints/{name}/weights.bin", b"x" * 20)

    assert hook.latest(key).step == 10
    with pytest.raises(CheckpointError, match="sha256"):
        hook.verify(key, name)


def test_the_hook_downloads_verified_files(hook, tmp_path):
    """With the same content as saved."""
    target = hook.download(hook.key("dag", "run", "train"), "g1-step-00000010-a1", tmp_path / "here")

    assert (target / "weights.bin").read_bytes() == bytes([10]) * 10


def test_the_hook_deletes_but_not_the_newest_of_a_run_that_goes_on(hook):
    """A training that resumes would lose its work."""
    key = hook.key("dag", "run", "train")

    hook.delete(key, "g1-step-00000010-a1")

    assert [item.step for item in hook.list_checkpoints(key)] == [20]
    with pytest.raises(CheckpointError, match="goes on"):
        hook.delete(key, "g1-step-00000020-a1")
    with pytest.raises(CheckpointError, match="not a checkpoint name"):
        hook.delete(key, "../../elsewhere")


def test_the_hook_keeps_the_newest_good_one_below_a_damaged_one(hook):
    """A live run resumes from an older checkpoint when the newest one lost a file."""
    key = hook.key("dag", "run", "train")
    hook.get_conn().delete(f"{key.prefix}/checkpoints/g1-step-00000020-a1/weights.bin")

    with pytest.raises(CheckpointError, match="goes on"):
        hook.delete(key, "g1-step-00000010-a1")
    assert [item.step for item in hook.list_checkpoints(key)] == [20, 10]


def test_the_hook_tests_its_connection(hook, tmp_path):
    """True with the URL, or False with the error; never an exception."""
    (tmp_path / "file").write_text("no folder")

    assert hook.test_connection()[0] is True
    status, told = CheckpointHook(store_url=f"file://{tmp_path}/file/store").test_connection()
    assert status is False
    assert "cannot be used" in told
