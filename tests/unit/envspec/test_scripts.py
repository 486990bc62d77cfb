"""Text from a form never becomes a part of a script, nor days of work for a matcher."""

import json
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envscaler_airflow.envspec import load_spec, patterns
from envscaler_airflow.envspec.templates import contexts
from envscaler_airflow.errors import SpecError
from envscaler_airflow.operators.params import spec_params

FREE = {"x": {"type": "string", "default": "a"}}
SLOW = r"(a+)+b"


def load(folder, entrypoint, *, declared=FREE, **arguments):
    """A spec with *entrypoint*."""
    path = folder / "spec.json"
    body = {"version": "v1", "name": "s", "parameters": declared, "entrypoint": entrypoint}
    path.write_text(json.dumps(body))
    return load_spec(path, **arguments)


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "-c", "python t.py {{ parameters.x }}"],
        ["bash", "-c", "python t.py '{{ parameters.x }}'"],
        ["bash", "-c", 'python t.py "{{ parameters.x }}"'],
        ["/bin/sh", "-ec", "echo {{ .parameters.x }}"],
        ["bash", "-euo", "pipefail", "-c", "echo {{ parameters['x'] }}"],
        ["env", "A=1", "timeout", "60", "bash", "-lc", "echo {{ parameters.x | upper }}"],
        ["bash", "-c", "echo {{ 'a' ~ parameters.x }}"],
        ["bash", "-c", "echo {{ parameters.x if parameters.x == 'a' else 'b' }}"],
        ["bash", "-c", "echo {{ parameters.x ~ (parameters.x | quote) }}"],
        ["bash", "-c", 'echo "{{ parameters.x | quote }}"'],
        ["bash", "-c", "echo '{{ parameters.x | quote }}'"],
        ["bash", "-c", "echo `echo {{ parameters.x | quote }}`"],
        ["bash", "-c", "cat <<END\n{{ parameters.x | quote }}\nEND"],
        ["bash", "-c", "echo $(( {{ parameters.x | quote }} ))"],
        ["bash", "-c", "true # {{ parameters.x | quote }}"],
        ["bash", "-c", "{{ parameters.x }}"],
        ["su", "train", "-c", "echo {{ parameters.x }}"],
        ["python", "-c", "print('{{ parameters.x }}')"],
        ["python3.11", "-uc", "print({{ parameters.x | quote }})"],
        ["perl", "-e", "print '{{ parameters.x }}'"],
        ["node", "--eval", "console.log('{{ parameters.x }}')"],
        ["perl", "-e", "$x = 1;", "-e", "print '{{ parameters.x }}'"],
        ["ruby", "-eputs '{{ parameters.x }}'"],
        ["node", "--eval=f('{{ parameters.x }}')"],
        ["ipython", "-c", "print('{{ parameters.x }}')"],
        ["awk", "-F", ",", "$1 == {{ parameters.x }}", "table.csv"],
        ["sed", "-n", "s/a/{{ parameters.x }}/", "table.csv"],
        ["sed", "-i", "-e", "s/a/{{ parameters.x }}/", "table.csv"],
        ["pwsh", "-Command", "echo {{ parameters.x }}"],
        ["tcsh", "-c", "echo {{ parameters.x }}"],
        ["fish", "-c", "echo {{ parameters.x | quote }}"],
        "bash -c 'echo {{ parameters.x }}'",
    ],
)
def test_a_free_text_within_a_script_is_refused(tmp_path, words):
    """Also where the quotes that the author wrote, or the filter, have no effect (B4)."""
    with pytest.raises(SpecError, match="what is typed could run commands; ") as caught:
        load(tmp_path, words)

    assert re.search(
        r"write \{\{ parameters.x \| quote \}\}|as an argument of its own, or by env", str(caught.value)
    )
    assert "values: [...]" in str(caught.value)


def test_a_script_of_one_target_is_checked_too(tmp_path):
    """Each overlay may have an entrypoint of its own (B4)."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "version: v1\nname: s\nparameters: {x: {type: string, default: a}}\nentrypoint: [python, t.py]\n"
        "targets: {local: {entrypoint: [sh, -c, 'echo {{ parameters.x }}']}}\n"
    )

    with pytest.raises(SpecError, match=r"entrypoint\[2\]: parameter 'x' is put into a shell script"):
        load_spec(path)


@pytest.mark.parametrize(
    ("words", "declared"),
    [
        (["bash", "-c", "python t.py {{ parameters.x | quote }} && echo done"], FREE),
        (["bash", "-c", 'python t.py "$(cat {{ parameters.x | quote }})"'], FREE),
        (["bash", "-c", "echo 'a' \"b\" {{ parameters.x | trim | quote }} 'c'"], FREE),
        (["bash", "-c", "echo {{ parameters.x | length }}"], FREE),
        (["bash", "-c", 'exec "$@"', "-", "python", "t.py", "{{ parameters.x }}"], FREE),
        (["bash", "t.sh", "{{ parameters.x }}"], FREE),
        (["python", "t.py", "-c", "{{ parameters.x }}"], FREE),
        (["python", "-m", "t", "--name={{ parameters.x }}"], FREE),
        (["python", "-c", "import t; t.main()", "-config={{ parameters.x }}"], FREE),
        (["sed", "-n", "p", "{{ parameters.x }}"], FREE),
        (["bash", "-c", "echo {{ parameters.x }}"], {"x": {"values": ["a", "b"], "default": "a"}}),
        (["bash", "-c", "echo {{ parameters.x }}"], {"x": {"type": "string", "pattern": "[A-Za-z0-9_.-]+"}}),
        (["bash", "-c", "echo {{ parameters.x }}"], {"x": {"type": "integer", "default": 1}}),
        (["bash", "-c", "sleep {{ parameters.x }}"], {"x": {"type": "duration", "default": "10m"}}),
        (["python", "-c", "print({{ parameters.x }})"], {"x": {"type": "number", "default": 0.5}}),
        ("python t.py {{ parameters.x }}", FREE),
    ],
)  # fmt: skip
def test_what_cannot_be_a_command_is_accepted(tmp_path, words, declared):
    """Quoted, listed, of a safe pattern, a number, or an argument of its own (B4)."""
    given = {} if "default" in declared["x"] else {"x": "a"}

    assert load(tmp_path, words, declared=declared, parameters=given).entrypoint


def test_the_pattern_of_a_script_s_parameter_must_leave_nothing_to_a_shell(tmp_path):
    """``.*`` is a pattern, too (B4)."""
    for pattern in (".*", "[^;]+", "[a-z ]+", "[a-z$]*"):
        with pytest.raises(SpecError, match="could run commands"):
            load(
                tmp_path,
                ["sh", "-c", "echo {{ parameters.x }}"],
                declared={"x": {**FREE["x"], "pattern": pattern}},
            )


def test_an_input_within_a_script_is_a_plain_address(tmp_path):
    """Its value is known when the stage starts (B4)."""
    words = ["sh", "-c", "ls {{ inputs.data }}"]

    assert (
        load(tmp_path, words, inputs={"data": "s3://bucket/a-b_c/1.0"}).entrypoint[2]
        == "ls s3://bucket/a-b_c/1.0"
    )
    with pytest.raises(
        SpecError, match=r"input 'data' has characters .*write \{\{ inputs.data \| quote \}\}"
    ):
        load(tmp_path, words, inputs={"data": "s3://bucket/$(id)"})


@settings(max_examples=40)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=30))
def test_quoted_text_arrives_as_it_was_typed(tmp_path_factory, text):
    """By the shell itself, for any text; the loader's refusals are not run (B4)."""
    folder = tmp_path_factory.mktemp("quoted")
    try:
        spec = load(folder, ["sh", "-c", "printf %s {{ parameters.x | quote }}"], parameters={"x": text})
    except SpecError:
        return

    done = subprocess.run(spec.entrypoint, capture_output=True, timeout=20, check=True)

    assert done.stdout.decode() == text


@pytest.mark.parametrize(
    ("script", "places"),
    [
        ("a @ 'b' @", ["plain", "plain"]),
        ("'@' \"@\" $'\\'@'", ["single quotes", "double quotes", "ANSI quotes"]),
        ('"a \\" @" @', ["double quotes", "plain"]),
        ('"$(a @ "@")" @', ["plain", "double quotes", "plain"]),
        ("`a @` @", ["backquotes", "plain"]),
        ("$((1 + @)) @", ["arithmetic", "plain"]),
        ("a#b @ # @\n@", ["plain", "comment", "plain"]),
        ("cat <<< @; cat << E\n@", ["plain", "here-document"]),
        ("(a; @) && b \\' @", ["plain", "plain"]),
    ],
)
def test_the_place_of_a_template_in_a_script(script, places):
    """Quotes, substitutions, comments and here-documents as POSIX has them (B4)."""
    assert contexts(script, "@") == places


def test_a_pattern_is_matched_in_linear_time(tmp_path):
    """41 letters took ``re`` more than a day, and a test has minutes (B3)."""
    declared = {"x": {"type": "string", "pattern": SLOW}}

    with pytest.raises(SpecError, match="does not match"):
        load(tmp_path, ["true"], declared=declared, parameters={"x": "a" * 4000})


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(?=a)b", "cannot be matched in linear time"),
        (r"(a)\1", "cannot be matched in linear time"),
        ("a" * 501, "write a pattern of at most 500"),
        ("(", "is not a valid regular expression"),
    ],
)
def test_a_pattern_without_a_linear_matcher_is_refused(tmp_path, pattern, words):
    """Look-around, back-references, and patterns without end (B3)."""
    with pytest.raises(SpecError, match=words):
        load(tmp_path, ["true"], declared={"x": {"type": "string", "pattern": pattern}})


def test_airflow_gets_a_pattern_only_where_its_own_matcher_is_linear(tmp_path):
    """Its form and API server match with ``re``; the length is bounded there in any case (B3)."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "version: v1\nname: s\nparameters:\n"
        f"  slow: {{type: string, pattern: '{SLOW}', default: ab}}\n"
        "  good: {type: string, pattern: '[a-z]+-[0-9]+', default: a-1}\n"
    )

    params = spec_params(str(path))

    assert params["slow"].schema == {"type": "string", "maxLength": 4096}
    assert params["good"].schema == {"type": "string", "maxLength": 4096, "pattern": "^(?:[a-z]+-[0-9]+)$"}


@pytest.mark.parametrize(
    "pattern",
    [SLOW, "(a*)*", "([a-z]+)*", "(a|a)*", "(a|ab|b)*c", "a*a*b", "(a?){30}b", "(a{1,9}){1,9}", "(x+x+)+y",
     "(.*a){20}", "((a|b)?)*", r"(\w+\s?)*!"],
)  # fmt: skip
def test_patterns_that_backtrack_are_known(pattern):
    """Nested, overlapping and empty repeats (B3)."""
    assert not patterns.is_safe_elsewhere(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["[a-z]+", "[a-z][a-z0-9-]*[a-z0-9]", r"v?[0-9]+\.[0-9]+(\.[0-9]+)?", "s3://[a-z0-9./-]+", ".{1,200}",
     r"[\w.-]+", "(adam|sgd|adafactor)", r"\d{4}-\d{2}-\d{2}", "[A-Za-z0-9_-]+/[A-Za-z0-9_.-]+", "^[a-z]+$"],
)  # fmt: skip
def test_usual_patterns_go_on_to_the_form(pattern):
    """Names, versions, dates, model ids, URLs (B3)."""
    assert patterns.is_safe_elsewhere(pattern)


_ATOMS = st.sampled_from(["a", "b", "[ab]", "[a-c]", r"\w", "[^a]", "c"])
_PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,3}", "{2,}", "*?"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(_PATTERNS, st.sampled_from(["a", "ab", "aab", "abc", "c"]))
def test_a_pattern_that_is_called_safe_is_fast_by_backtracking(pattern, unit):
    """Python's own matcher ends on a text that almost matches; one that repeats repeats would not (B3)."""
    if not patterns.is_safe_elsewhere(pattern):
        return
    text = (unit * 4000)[:4000] + "!"

    re.compile(f"^(?:{pattern})$").search(text)  # one that backtracks runs into the test's time limit
