"""Secrets by their form: the usual ones are refused, and texts that only look random are accepted."""

import base64
import hashlib
import json

import pytest

from envscaler_airflow.cli.specs import refuse_own_secrets
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.envspec.secret_forms import has_secret_shape, mask
from envscaler_airflow.errors import SpecError

MIXED = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hI6kL9nO2qR5tU8wX1zA4cD7fG0iJ3lM6oP9rS2uV5xY8"
HEX = hashlib.sha256(b"a test").hexdigest()
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG" + "/bPxRfiCYEXAMPLEKEY"

IN_ENV = {
    "azure_sas": f"https://acct.blob.core.windows.net/data?sv=2024-11-04&sp=r&sig={MIXED[:43]}%3D",
    "azure_account_key": f"DefaultEndpointsProtocol=https;AccountName=acct;AccountKey={MIXED}zA==;Suffix=x",
    "service_bus": f"Endpoint=sb://x.servicebus.windows.net/;SharedAccessKeyName=root;SharedAccessKey={MIXED[:43]}=",
    "sql_server": "Server=tcp:db.example.org,1433;Database=x;User Id=train;Password=c4n4ry;Encrypt=true",
    "bearer_header": f"Authorization: Bearer {MIXED[:32]}",
    "basic_header": "Authorization: Basic " + base64.b64encode(b"train:c4n4ry-v4lue").decode(),
    "bearer_alone": f"Bearer {MIXED[:40]}",
    "slack_webhook": f"https://hooks.slack.com/services/T0{MIXED[:8]}/B0{MIXED[:8]}/{MIXED[:24]}",
    "discord_webhook": f"https://discord.com/api/webhooks/123456789012345678/{MIXED[:60]}",
    "teams_webhook": f"https://x.webhook.office.com/webhookb2/{HEX}@{HEX[:36]}/IncomingWebhook/{HEX[:32]}",
    "github_fine_grained": f"github_pat_11{MIXED[:20]}_{MIXED[:59]}",
    "gitlab": f"glpat-{MIXED[:20]}",
    "stripe": f"sk_live_{MIXED[:24]}",
    "sendgrid": f"SG.{MIXED[:22]}.{MIXED[:43]}",
    "npm": f"npm_{MIXED[:36]}",
    "pypi": f"pypi-AgEIcHlwaS5vcmc{MIXED[:60]}",
    "databricks": f"dapi{HEX[:32]}",
    "json_password": json.dumps({"user": "train", "password": "c4n4ry"}),
    "docker_config": json.dumps({"auths": {"registry.example.org": {"auth": "dHJhaW46YzRuNHJ5"}}}),
    "aws_secret_key": AWS_SECRET,
    "pgp_block": "-----BEGIN PGP PRIVATE KEY BLOCK-----\nabc",
    "presigned": f"https://b.s3.amazonaws.com/k?X-Amz-Expires=60&X-Amz-Signature={HEX}",
    "telegram": f"https://api.telegram.org/bot123456789:AA{MIXED[:33]}/sendMessage",
    "anthropic": f"sk-ant-api03-{MIXED[:60]}",
    "nvidia": f"nvapi-{MIXED[:60]}",
    "replicate": f"r8_{MIXED[:37]}",
    "google_oauth": f"GOCSPX-{MIXED[:28]}",
    "azure_client_secret": "aB3" + f"8Q~{MIXED[:34]}",
    "vault": f"hvs.{MIXED[:40]}",
    "docker_hub": f"dckr_pat_{MIXED[:27]}",
    "alibaba": f"LTAI{MIXED[:20]}",
}
IN_ARGUMENTS = {
    "curl_user": ["curl", "-u", "train:c4n4ry", "https://example.org/data"],
    "curl_user_together": ["curl", "--user=train:c4n4ry", "https://example.org/data"],
    "password_flag": ["python", "t.py", "--password", "c4n4ry"],
    "db_password_flag": ["python", "t.py", "--db-password=c4n4ry"],
    "token_in_script": ["bash", "-c", "python t.py --hub_token c4n4ry && echo done"],
    "header": ["curl", "-H", f"Authorization: Bearer {MIXED[:32]}", "https://example.org"],
    "own_header": ["curl", "-H", "X-Api-Key: c4n4ry-v4lue", "https://example.org"],
    "override": ["python", "t.py", "logger.wandb.api_key=c4n4ry"],
    "json_body": ["curl", "-d", '{"user": "train", "password": "c4n4ry"}', "https://example.org"],
    "query": ["wget", "https://example.org/data?access_token=c4n4ry"],
    "curl_in_script": ["sh", "-c", "curl -s -u train:c4n4ry https://example.org | tar x"],
    "sshpass": ["bash", "-lc", "sshpass -p c4n4ry scp host:x ."],
    "exported": ["bash", "-c", "export PGPASSWORD=c4n4ry; psql"],
    "small_letters": ["bash", "-c", "db_password=c4n4ry python t.py"],
    "aws_configure": ["bash", "-c", f"aws configure set aws_secret_access_key {AWS_SECRET}"],
    "login": ["bash", "-c", "huggingface-cli login --token c4n4ry-v4lue"],
    "mysql": ["mysql", "--user=train", "--password=c4n4ry"],
    "mysql_short": ["mysql", "-u", "train", "-pc4n4ry", "features"],
    "mysql_in_script": ["sh", "-c", "mysqldump -h db -utrain -pc4n4ry features > x.sql"],
    "registry_login": ["bash", "-c", "docker login -u train -p c4n4ry registry.example.org"],
    "redis": ["redis-cli", "-h", "cache", "-a", "c4n4ry", "get", "x"],
    "openssl": ["bash", "-c", "openssl enc -d -aes256 -pass pass:c4n4ry -in a -out b"],
    "auth_token": ["ngrok", "--authtoken", "c4n4ry"],
}
HARMLESS = {
    "md5": hashlib.md5(b"x").hexdigest(),
    "sha1": hashlib.sha1(b"x").hexdigest(),
    "sha256": HEX,
    "sha512": hashlib.sha512(b"x").hexdigest(),
    "oci_digest": f"sha256:{HEX}",
    "image_by_digest": f"nvcr.io/nvidia/pytorch@sha256:{HEX}",
    "git_commit": "0b5e5c0f9f2c6f1ff5f1c0b8fd4b8f3ac6a8d2ee",
    "short_commit": "0b5e5c0",
    "integrity": "sha384-" + base64.b64encode(hashlib.sha384(b"x").digest()).decode(),
    "crc": "c0ffee42",
    "uuid4": "6f1f3c0e-8f5a-4d6b-9f0e-2f6f4c1b7a10",
    "uuid7": "0192f3a4-7c1d-7e2a-b1f4-6a5d4c3b2a10",
    "ulid": "01J9ZQ4T8X6Y2B7C5D3E1F0G9H",
    "run_id": "manual__2026-11-30T08:02:36.123456+00:00",
    "wandb_run": "3k9q2z8x",
    "wandb_url": "https://wandb.ai/team/project/runs/3k9q2z8x",
    "base64_text": base64.b64encode(b"some settings of a training").decode(),
    "base64_of_30": base64.b64encode(b"thirty bytes of a text in here").decode(),
    "base64_json": base64.b64encode(b'{"lr": 0.001, "layers": [1, 2, 3], "name": "a"}').decode(),
    "base64_binary": base64.b64encode(hashlib.sha512(b"z").digest()).decode(),
    "png": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
    "gzip_base64": "H4sIAAAAAAAAA8tIzcnJVyjPL8pJAQCFEUoNCwAAAA==",
    "hub_model": "meta-llama/Llama-3.3-70B-Instruct",
    "hub_model_long": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "hub_dataset": "HuggingFaceFW/fineweb-edu",
    "hub_uri": "hf://datasets/allenai/c4/en/c4-train.00000-of-01024.json.gz",
    "timm_model": "vit_large_patch14_reg4_dinov2.lvd142m",
    "model_arn": "arn:aws:bedrock:us-east-1::foundation-model/anthropic.claude-3-5-sonnet-20241022-v2:0",
    "role_arn": "arn:aws:iam::123456789012:role/training-role-A1b2C3d4E5f6",
    "s3": "s3://team-bucket/data/2026-11-30/part-00000-6f1f3c0e.snappy.parquet",
    "gcs": "gs://bucket/checkpoints/step=000120/epoch=3",
    "abfss": "abfss://box@account.dfs.core.windows.net/x",
    "url_with_query": "https://example.org/data?version=3&format=parquet&page=1",
    "url_with_hash": f"https://example.org/files/{HEX}/download?file=part-1.bin&rev=main",
    "url_long_query": "https://example.org/api?q=select%20*%20from%20trainings%20where%20name%3D%27a%27&limit=100",
    "arxiv": "https://arxiv.org/abs/1706.03762?context=cs.CL",
    "mlflow": "http://mlflow.example.org:5000/#/experiments/12/runs/0b5e5c0f9f2c6f1ff5f1c0b8fd4b8f3a",
    "postgres_no_password": "postgresql://db.example.org:5432/features?sslmode=verify-full",
    "jdbc": "jdbc:sqlserver://db.example.org:1433;databaseName=x;encrypt=true",
    "git_ssh": "git@github.com:team/project.git",
    "pip_index": "https://download.pytorch.org/whl/cu126",
    "json_settings": json.dumps(
        {"max_tokens": 512, "pad_token": "<pad>", "tokenizer": "bert", "eos_token": "</s>"}
    ),
    "deepspeed": json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}),
    "sentence": "Fine-tunes the model on tokens of the authorization log, see the password policy.",
    "prose_basic": "The basic resnet50-imagenet training, token classification of bert-large-cased2.",
    "numbers": "0.9,0.95,0.99,1e-8,3e-4",
    "cuda_arch": "7.0;7.5;8.0;8.6;9.0+PTX",
    "java_opts": "-Xmx4g -Dspark.driver.maxResultSize=2g",
    "nccl": "NET,GRAPH,INIT",
    "ld_path": "/usr/local/nvidia/lib64:/opt/conda/envs/train-A1b2/lib",
    "forty_path": "data/train/ImageNet2012/shards/part00017x",
    "camel_class": "TransformersForSequenceClassificationV2X",
    "regex": r"^step=(\d+) loss=([0-9.]+) token/s=(\d+)$",
    "cron": "*/15 3 * * 1-5",
    "version": "1.21.0+cu126.git0b5e5c0f",
    "gpu_uuid": "GPU-6f1f3c0e-8f5a-4d6b-9f0e-2f6f4c1b7a10",
    "pci": "00000000:17:00.0",
    "host": "ip-10-0-12-34.eu-central-1.compute.internal",
    "email": "training-team@example.org",
    "publishable": "pk_test_" + MIXED[:24],
    "placeholder": "Bearer <your token>",
    "from_variable": "Authorization: Bearer $HF_TOKEN",
    "ssh_public_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl t@h",
    "certificate": "-----BEGIN CERTIFICATE-----\nMIIBszCCAVmgAwIBAgIUBx\n-----END CERTIFICATE-----",
}
HARMLESS_ARGUMENTS = [
    ["docker", "run", "-u", "1000:1000", "image"],
    ["chown", "--user", "nobody:nogroup", "/data"],
    ["python", "-u", "t.py", "--tokens", "512", "--max-new-tokens", "16", "--use-auth-token", "true"],
    ["python", "t.py", "--password-file", "pw.txt", "--token-env", "HF_TOKEN", "--password-stdin"],
    ["python", "t.py", "model.pad_token=x", "trainer.max_tokens=512", "tokenizer.name=bert"],
    ["python", "-c", "f(x, token=tok)\npassword = args.password"],
    ["bash", "-c", 'python t.py --token "$HF_TOKEN" --password `cat /run/pw` --api-key $(cat key)'],
    ["bash", "-c", 'curl -u "$USER:$PASSWORD" https://example.org/x?rev=main'],
    ["bash", "-c", "mysql -h db -p features; mkdir -p out/a; docker run -p 80:80 x; docker login -p $PW"],
    ["mkdir", "-p", "out/a"],
    ["python", "t.py", "-p", "0.5", "-a", "relu", "-w", "0.1"],
    ["curl", "-H", "Accept: application/json", "-H", "Content-Type: text/plain"],
    ["torchrun", "--rdzv-id", "6f1f3c0e", "--rdzv-endpoint", "host:29400", "t.py"],
]  # fmt: skip


def load(folder, **fields):
    """A spec with *fields*."""
    path = folder / "spec.json"
    path.write_text(json.dumps({"version": "v1", "name": "s", **fields}))
    return load_spec(path)


@pytest.mark.parametrize("value", IN_ENV.values(), ids=list(IN_ENV))
def test_usual_secrets_in_an_environment_are_refused(tmp_path, value):
    """Under a name without meaning, and the message does not repeat them (B5)."""
    with pytest.raises(SpecError, match="looks like a secret") as caught:
        load(tmp_path, env=[{"name": "SETTING", "value": value}])

    assert value[-12:] not in str(caught.value)


@pytest.mark.parametrize("words", IN_ARGUMENTS.values(), ids=list(IN_ARGUMENTS))
def test_usual_secrets_in_arguments_are_refused(tmp_path, words):
    """As arguments of their own, and within a script (B5)."""
    with pytest.raises(SpecError) as caught:
        load(tmp_path, entrypoint=words)

    assert "value_from" in str(caught.value) or "credentials" in str(caught.value)
    assert "c4n4ry" not in str(caught.value)


@pytest.mark.parametrize("value", HARMLESS.values(), ids=list(HARMLESS))
def test_what_only_looks_random_is_accepted(tmp_path, value):
    """Digests, ids, base64, models and URLs are as random as keys, but not secrets (B5)."""
    spec = load(tmp_path, env=[{"name": "SETTING", "value": value}], entrypoint=["python", "t.py", value])

    assert spec.env[0].value == value


@pytest.mark.parametrize("words", HARMLESS_ARGUMENTS, ids=lambda words: words[-1][:20])
def test_arguments_that_only_sound_secret_are_accepted(tmp_path, words):
    """Users and groups, files, variables, settings of tokenizers, code (B5)."""
    assert load(tmp_path, entrypoint=words).entrypoint == tuple(words)


def test_there_are_enough_of_each():
    """The lists stay as long as they were promised (B5)."""
    assert len(IN_ENV) >= 20
    assert len(IN_ARGUMENTS) >= 10
    assert len(HARMLESS) >= 60


@pytest.mark.parametrize("value", IN_ENV.values(), ids=list(IN_ENV))
def test_a_secret_typed_into_a_form_is_refused(tmp_path, value):
    """A parameter's value is stored with the run (B5)."""
    path = tmp_path / "spec.yaml"
    path.write_text("version: v1\nname: s\nparameters: {x: {type: string}}\n")

    with pytest.raises(SpecError, match="looks like a secret"):
        load_spec(path, parameters={"x": value})


@pytest.mark.parametrize(
    ("entry", "is_secret"),
    [
        ({"name": "DB_PASSWORD", "value_from": "variable:db"}, True),
        ({"name": "DB", "value_from": "secret:db/key"}, True),
        ({"name": "DB", "value_from": "connection:db/password"}, True),
        ({"name": "DB", "value_from": "env:DB_TOKEN"}, True),
        ({"name": "DB_HOST", "value_from": "connection:db/host"}, False),
        ({"name": "REGION", "value_from": "variable:region"}, False),
        ({"name": "REGION", "value": "x"}, False),
    ],
)
def test_references_whose_value_is_a_secret(tmp_path, entry, is_secret):
    """By kind, field and names (B5)."""
    assert load(tmp_path, env=[entry]).env[0].is_secret is is_secret


def test_a_shell_refuses_the_secret_of_an_own_reference(tmp_path, monkeypatch):
    """Given with ``--set``, it would be stored with the run; other values may be (B5)."""
    monkeypatch.setenv("UNIT_TOKEN", "w0rd-of-this-test")
    token = {"name": "OWN_TOKEN", "value_from": "env:UNIT_TOKEN"}
    region = {"name": "REGION", "value_from": "env:UNIT_TOKEN"}

    refuse_own_secrets(load(tmp_path, env=[token], description="fine"))
    refuse_own_secrets(
        load(tmp_path, env=[{**region, "value_from": "env:HOME"}], description="w0rd-of-this-test")
    )
    with pytest.raises(SpecError, match="contains the secret of env:UNIT_TOKEN") as caught:
        refuse_own_secrets(load(tmp_path, env=[token], description="is w0rd-of-this-test"))
    assert "w0rd" not in str(caught.value)


def test_messages_blank_known_forms():
    """Also in the middle of a message about something else (B5)."""
    shown = mask(f"got {IN_ENV['gitlab']} and {IN_ENV['azure_sas']}")

    assert MIXED[:20] not in shown


@pytest.mark.timeout(30)  # at most 3 s of a free core; to start over at each letter would take a minute
@pytest.mark.parametrize(
    "text", ["a", "bearer ", "sk-", "webhook.", "x:\\\\", "'a':'", ";a=b", "?a=", "AIza ghp_"]
)
def test_a_long_text_is_read_at_all(text):
    """256 KiB of repeated beginnings of a secret: time quadratic in it exceeds the limit (B3, B5)."""
    long = text * ((256 << 10) // len(text))

    assert len(mask(long)) > 0
    assert has_secret_shape(long) in (False, True)
