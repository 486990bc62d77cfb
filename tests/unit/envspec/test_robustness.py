"""Any file gives a spec or a SpecError; a frozen spec is read back equal."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envscaler_airflow.envspec import EnvSpec, load_spec, spec_hash
from envscaler_airflow.envspec.models import UNHASHED_FIELDS
from envscaler_airflow.errors import SpecError

DATA = Path(__file__).parents[1] / "data"
FIELDS = [
    *EnvSpec.model_fields,
    *[
        "extends",
        "modules",
        "targets",
        "accelerators",
        "cpus",
        "any_of",
        "requests",
        "gpu",
        "count",
        "type",
        "memory",
        "value",
        "value_from",
    ],
    *[
        "source",
        "mount_path",
        "every",
        "rules",
        "metric",
        "above",
        "for",
        "local",
        "default",
        "image",
        "packages",
        "infra",
        "use_spot",
    ],
]
TEXTS = [
    *(
        "v1",
        "s",
        "",
        "\n",
        "a\0b",
        "\ud800",
        "4Gi",
        "1..4",
        "{{ parameters.x }}",
        "{{ inputs.m }}",
        "{% x %}",
    ),
    *("A100:8", "../x", "/a", "s3://b/k", "secret:a/b", "10m", "yes", "`id`", "$(id)", "\"'\n]}", "x" * 3000),
    *("1 epoch", "http://u:p@h/", "\u0664", "nan"),
]
MARKS = "ab:-[]{}&*!|>'\"%@`#,? \n\t\\"
NUMBERS = st.one_of(st.integers(-5, 5), st.just(10**30), st.floats())

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.just(10**30),
    st.floats(),
    st.sampled_from(TEXTS),
    st.text(max_size=5),
)
values = st.recursive(
    scalars,
    lambda items: st.one_of(
        st.lists(items, max_size=3), st.dictionaries(st.sampled_from(FIELDS), items, max_size=4)
    ),
    max_leaves=12,
)
documents = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6).map(
    lambda body: {"version": "v1", "name": "s", **body}
)
fuzzing = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def load(folder, content):
    """A spec of *content*, bytes; None when it is refused."""
    path = folder / "spec.yaml"
    path.write_bytes(content)
    with contextlib.suppress(SpecError):
        return load_spec(path)
    return None


@fuzzing
@given(documents)
def test_any_document_is_a_spec_or_a_spec_error(tmp_path, body):
    """Known fields with any values: a loaded spec is frozen, read back and hashed."""
    content = yaml.safe_dump(body, allow_unicode=True).encode("utf-8", "surrogatepass")

    spec = load(tmp_path, content)

    if spec is not None:
        again = EnvSpec.from_dict(json.loads(json.dumps(spec.to_dict(), allow_nan=False)))
        assert again == spec
        assert spec_hash(again) == spec_hash(spec)


@fuzzing
@given(
    st.one_of(st.binary(max_size=200), st.text("ab:-[]{}&*!|>'\"%@`#,? \n\t\\", max_size=60).map(str.encode))
)
def test_any_bytes_are_a_spec_error(tmp_path, content):
    """None of it is a spec, and no other error is raised."""
    assert load(tmp_path, content) is None


@fuzzing
@given(st.data())
def test_a_damaged_spec_is_a_spec_or_a_spec_error(tmp_path, data):
    """One byte of a good one changed, left out or doubled."""
    good = (DATA / "design.yaml").read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    put = data.draw(
        st.sampled_from([b"", b"\x00", b"\xff", b"\t", b":", b"{", b"-", b"\n", b'"', b"*x", b"&x "])
    )

    load(tmp_path, good[:at] + put + good[at + 1 :])


@fuzzing
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=6))
def test_any_frozen_spec_is_read_or_refused(body):
    """From a store to which others write."""
    with contextlib.suppress(SpecError):
        EnvSpec.from_dict(body)
    with contextlib.suppress(SpecError):
        EnvSpec.from_dict({**load_spec(DATA / "short.yaml").to_dict(), **body})


@pytest.mark.parametrize("body", [None, [], "x", {1: 2}, {"name": [{}] * 3}, {"name": {"a": {2: 3}}}])
def test_a_frozen_spec_of_another_kind_is_refused(body):
    """Not a map, or with keys that are not text."""
    with pytest.raises(SpecError):
        EnvSpec.from_dict(body)


def test_a_frozen_spec_of_a_newer_version_is_read():
    """Unknown fields are ignored, at every depth."""
    body = load_spec(DATA / "short.yaml").to_dict()
    newer = json.loads(json.dumps(body))
    newer["archive"] = "x"
    newer["resources"]["requests"]["gpu"]["topology"] = {"a": 1}

    assert EnvSpec.from_dict(newer) == EnvSpec.from_dict(body)


def test_the_hash_is_over_what_runs(tmp_path):
    """Descriptions and folders do not count; a command, a parameter and an input do."""
    text = (DATA / "design.yaml").read_text()
    here, there = tmp_path / "a.yaml", tmp_path / "b" / "a.yaml"
    there.parent.mkdir()
    here.write_text(text)
    there.write_text(text.replace("Fine-tuning", "Training"))

    base = load_spec(here)

    assert spec_hash(load_spec(there)) == spec_hash(base)
    assert spec_hash(load_spec(here, parameters={"gpu_count": 2})) != spec_hash(base)
    assert all(field in EnvSpec.model_fields for field in UNHASHED_FIELDS)


@pytest.mark.parametrize(
    "field", ["name", "workdir", "capacity", "base.image", "env[0].name", "outputs.model"]
)
@pytest.mark.parametrize("bad", ["a\nb", "a\x00b", "a\x1b[2J", "a\u2028b", "\ud800"])
def test_line_breaks_and_controls_go_nowhere(field, bad):
    """No text that a renderer could take for a second line."""
    body = load_spec(DATA / "design.yaml").to_dict()
    holder = body
    *above, last = field.replace("[0]", ".0").split(".")
    for part in above:
        holder = holder[int(part) if part.isdigit() else part]
    holder[last] = f"/{bad}" if field == "outputs.m" else bad

    with pytest.raises(SpecError):
        EnvSpec.from_dict(body)


def test_a_value_may_have_several_lines():
    """Of env and of a command: renderers quote them."""
    body = load_spec(DATA / "design.yaml").to_dict()
    body["env"] = [{"name": "A", "value": "x\ny"}]
    body["entrypoint"] = ["bash", "-c", "set -e\npython train.py"]

    assert EnvSpec.from_dict(body).entrypoint[2] == "set -e\npython train.py"
