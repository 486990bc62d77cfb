"""Secrets only by reference, and never in a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.envspec import load_spec
from envscaler_airflow.envspec.secret_forms import is_secret_name
from envscaler_airflow.envspec.secrets import Reference, parse_reference
from envscaler_airflow.errors import SpecError

HEAD = "version: v1\nname: s\n"
CANARY = "c4n4ry-v4lue"
SHAPES = [
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_" + "a1B2" * 9,
    "hf_" + "aBcD" * 8,
    "sk-" + "a1" * 12,
    "-----BEGIN RSA PRIVATE KEY-----",
]


def load(folder, text, **arguments):
    """A spec of *text* below the usual head."""
    path = folder / "spec.yaml"
    path.write_text(HEAD + text)
    return load_spec(path, **arguments)


def refused(folder, text, **arguments):
    """The message of the SpecError."""
    with pytest.raises(SpecError) as caught:
        load(folder, text, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"env: [{{name: WANDB_API_KEY, value: {CANARY}}}]",
        f"env: [{{name: DB_PASSWORD, value: {CANARY}}}]",
        f"env: {{authToken: {CANARY}}}",
        f"entrypoint: [python, t.py, --api-key, {CANARY}]",
        f"entrypoint: [python, t.py, --password={CANARY}]",
        f"entrypoint: [bash, -c, 'HF_TOKEN={CANARY} python t.py']",
        f"volumes: [{{name: d, source: 'nfs://user:{CANARY}@host/p', mount_path: /d}}]",
        f"runtimes: [{{index_url: 'https://user:{CANARY}@host/simple'}}]",
        f"runtimes: [{{packages: ['x @ git+https://{CANARY}@host/x']}}]",
        f"runtimes: [{{index_url: 'https://host/simple?token={CANARY}'}}]",
        f"description: see https://user:{CANARY}@host/",
        f"extends: ['https://user:{CANARY}@host/x.yaml']",
        f"modules: ['registry://user:{CANARY}@host/x']",
        f"workdir: 'https://user:{CANARY}@host/x'",
        f"parameters: {{api_key: {CANARY}}}",
        f"parameters: {{url: {{default: 'https://u:{CANARY}@h/'}}}}",
        f"base: {{image: x, credentials: {CANARY}}}",
        f"env: [{{name: WANDB_API_KEY, value_from: {CANARY}}}]",
        f"targets: {{local: {{env: {{DB_PASSWORD: {CANARY}}}}}}}",
        f"password: {CANARY}",
        f"parameters: {{api_key: {{type: string, description: {CANARY}}}}}",
    ],
)
def test_a_literal_is_refused_and_not_repeated(tmp_path, text):
    """At every place, also when something else is wrong with it."""
    message = refused(tmp_path, text + "\n")

    assert CANARY not in message


def test_the_message_shows_the_reference_to_write(tmp_path):
    """With the key from the variable's name."""
    message = refused(tmp_path, f"env: [{{name: WANDB_API_KEY, value: {CANARY}}}]\n")

    assert "spec.yaml:3: env[0].value: a literal under the secret's name 'WANDB_API_KEY'; " in message
    assert (
        "write value_from: secret:NAME/wandb-api-key (or env:NAME, connection:ID/field, variable:NAME)"
        in message
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_known_shapes_are_refused_anywhere(tmp_path, shape):
    """Under a harmless name, in a command, in a parameter's value."""
    for text in (f"env: {{A: '{shape}'}}", f"entrypoint: [x, '{shape}']", f"description: 'is {shape}'"):
        assert shape not in refused(tmp_path, text + "\n")
    text = "parameters: {x: {type: string}}\nenv: {A: '{{ parameters.x }}'}\n"
    assert shape not in refused(tmp_path, text, parameters={"x": shape})


def test_a_parameter_cannot_carry_a_literal_to_a_secret(tmp_path):
    """The field's name counts, not the parameter's."""
    text = "parameters: {x: {type: string}}\nenv: {DB_PASSWORD: '{{ parameters.x }}'}\n"

    assert CANARY not in refused(tmp_path, text, parameters={"x": CANARY})


def test_a_parameter_that_nothing_names_cannot_hold_a_secret(tmp_path):
    """It is stored with the run; and no parameter may have a secret's name."""
    message = refused(tmp_path, "parameters: {x: {type: string}}\n", parameters={"x": SHAPES[0]})
    assert "parameters.x: the value given looks like a secret" in message

    message = refused(tmp_path, "parameters: {api_key: {type: string, default: /a}}\n")
    assert "parameters.api_key: a parameter is stored and shown" in message


def test_a_number_under_a_secret_field_is_not_repeated(tmp_path):
    """Also when its type is the error."""
    assert "12345678" not in refused(tmp_path, "base: {image: x, credentials: 12345678}\n")


def test_inputs_cannot_carry_users_of_urls(tmp_path):
    """They are stored with the run."""
    assert CANARY not in refused(tmp_path, "", inputs={"m": f"s3://u:{CANARY}@b/k"})


@pytest.mark.parametrize(
    "text",
    [
        "env: {TOKENIZERS_PARALLELISM: false, MAX_TOKENS: 512, PAD_TOKEN: x, EOS_TOKEN: </s>}",
        "env: {GOOGLE_APPLICATION_CREDENTIALS: /var/run/key.json, API_KEY_FILE: key.txt}",
        "entrypoint: [bash, -c, 'API_TOKEN=$TOKEN python t.py --token $TOKEN']",
        "entrypoint: [python, t.py, --tokenizer, bert, --max-tokens, 512, --api-key, $KEY]",
        "entrypoint: [python, -c, 'token=tokenizer(x)']",
        "runtimes: [{packages: ['x @ git+ssh://git@github.com/o/x']}]",
        "volumes: [{name: d, source: 'abfss://box@account.dfs.core.windows.net/x', mount_path: /d}]",
        "env: [{name: A_SECRET, value_from: secret:a/b}, {name: B_TOKEN, value_from: env:B}]",
        "base: {image: x, credentials: 'secret:regcred'}",
    ],
)
def test_what_only_sounds_secret_is_let_through(tmp_path, text):
    """Tokens of text, paths, variables, the git user, containers of Azure."""
    load(tmp_path, text + "\n")


@pytest.mark.parametrize(
    ("text", "variable", "reference"),
    [
        ("secret:wandb/api-key", "X", Reference("secret", "wandb", "api-key")),
        ("secret:wandb-secret", "WANDB_API_KEY", Reference("secret", "wandb-secret", "api-key")),
        ("secret:db", "DB", Reference("secret", "db", "db")),
        ("env:MY_TOKEN", None, Reference("env", "MY_TOKEN")),
        ("connection:wandb/password", None, Reference("connection", "wandb", "password")),
        ("variable:wandb_key", None, Reference("variable", "wandb_key")),
    ],
)
def test_references_are_read(text, variable, reference):
    """And written back in the form in which they are used."""
    found = parse_reference(text, variable=variable)

    assert found == reference
    assert parse_reference(str(found)) == found


@pytest.mark.parametrize(
    "text", ["", "x", "secret:", "vault:x", "env:A/b", "connection:x", "secret:../x", "secret:a/b/c"]
)
def test_other_references_are_refused(text):
    """Each error names the fix."""
    with pytest.raises(ValueError, match="write"):
        parse_reference(text)


@pytest.mark.parametrize(
    "name", ["API_KEY", "apiKey", "db-password", "HF_TOKEN", "CLIENT_SECRET", "AWS_SECRET_ACCESS_KEY"]
)
def test_names_of_secrets(name):
    """In upper and lower case."""
    assert is_secret_name(name)


@given(st.text())
def test_any_text_is_read_or_refused_as_a_reference(text):
    """Nothing but ValueError."""
    try:
        parse_reference(text, variable="X")
    except ValueError as err:
        assert text not in str(err) or len(text) < 12  # noqa: PT017 (both ends are right)
