"""Parameters and templates."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envscaler_airflow.envspec import load_spec, spec_params
from envscaler_airflow.envspec.documents import Faults, Node
from envscaler_airflow.envspec.templates import Names, render
from envscaler_airflow.errors import SpecError

HEAD = "version: v1\nname: s\n"


def write(folder, text):
    """A spec of *text* below the usual head."""
    path = folder / "spec.yaml"
    path.write_text(HEAD + text)
    return path


def faults_of(folder, text, **arguments):
    """Faults of *text* below the usual head, without the folder; its first line is 3."""
    with pytest.raises(SpecError) as caught:
        load_spec(write(folder, text), **arguments)
    return [fault.replace(f"{folder}/spec.yaml:", "") for fault in caught.value.faults]


def rendered(text, **parameters):
    """Value of a template."""
    faults = Faults()
    node = render(Node(text), Names(parameters), faults)
    faults.raise_if_any()
    return node.value


@pytest.mark.parametrize(
    ("kind", "given_value", "value"),
    [
        ("integer", "4", 4), ("integer", 4.0, 4), ("number", "0.5", 0.5), ("number", 1, 1),
        ("boolean", "true", True), ("boolean", "off", False), ("string", 4, "4"), ("string", "x y", "x y"),
        ("duration", "1h30m", "1h30m"), ("quantity", "32Gi", "32Gi"), ("quantity", "500m", "500m"),
    ],
)  # fmt: skip
def test_text_from_a_shell_becomes_the_parameters_type(tmp_path, kind, given_value, value):
    """--set gives text, Airflow's form gives JSON."""
    path = write(tmp_path, f"parameters: {{x: {{type: {kind}}}}}\n")

    assert load_spec(path, parameters={"x": given_value}).parameters == {"x": value}


@pytest.mark.parametrize(
    ("declaration", "value", "fault"),
    [
        ("{type: integer}", "4.5", "3: parameters.x: '4.5' is not a whole number; write one such as 4"),
        ("{type: integer}", True, "3: parameters.x: True is not a whole number; write one such as 4"),
        ("{type: integer, maximum: 8}", 9, "3: parameters.x: 9 is out of bounds; write at most 8"),
        ("{type: number, exclusiveMinimum: 0}", 0, "3: parameters.x: 0 is out of bounds; write more than 0"),
        ("{type: number}", "nan",
         "3: parameters.x: is not a finite number below 1e15; write one such as 0.1"),
        ("{type: number}", float("inf"),
         "3: parameters.x: is not a finite number below 1e15; write one such as 0.1"),
        ("{type: boolean}", "maybe", "3: parameters.x: 'maybe' is not a boolean; write true or false"),
        ("{values: [small, large]}", "medium",
         "3: parameters.x: 'medium' is not one of the values; write one of small, large"),
        ("{type: string, pattern: '[a-z]+'}", "A1",
         "3: parameters.x: 'A1' does not match [a-z]+; write text that does"),
        ("{type: duration, minimum: 10m}", "5m",
         "3: parameters.x: '5m' is out of bounds; write at least 10m"),
        ("{type: quantity, maximum: 8Gi}", "16Gi",
         "3: parameters.x: '16Gi' is out of bounds; write at most 8Gi"),
        ("{type: quantity}", "16GB",
         "3: parameters.x: '16GB' has an unknown unit; write 16Gi (1024s) or 16G (1000s)"),
        ("{type: string}", "a\0b",
         "3: parameters.x: is not a string of at most 4096 characters; write plain text"),
    ],
)  # fmt: skip
def test_a_wrong_value_says_what_to_write(tmp_path, declaration, value, fault):
    """At the line of the declaration."""
    assert faults_of(tmp_path, f"parameters: {{x: {declaration}}}\n", parameters={"x": value}) == [fault]


@pytest.mark.parametrize(
    ("declaration", "fault"),
    [
        ("{type: int}",
         ("3: parameters.x.type: 'int' is not a type; write one of integer, number, string, boolean, "
          "enum, duration, quantity")),
        ("{type: integer, defualt: 1}", "3: parameters.x.defualt: unknown field; write default"),
        ("{type: integer, default: a}",
         "3: parameters.x.default: default: 'a' is not a whole number; write one such as 4"),
        ("{type: integer, minimum: 2, maximum: 1}",
         "3: parameters.x.minimum: minimum 2 is above maximum 1; write them in order"),
        ("{type: enum}", "3: parameters.x.type: an enum without values; write values: [small, large]"),
        ("{type: integer, values: 3}",
         "3: parameters.x.values: an enum without values; write values: [small, large]"),
        ("{type: string, minimum: 1}", "3: parameters.x.minimum: a string has no minimum; leave it out"),
        ("{description: a, b c}",
         ("3: parameters.x.b c: unknown field; if it belongs to the text before it, "
          "quote that text: a comma in braces ends it")),
        ("{default: '{{ parameters.y }}'}",
         "3: parameters.x.default: a template in a parameter's declaration; write the value itself"),
        ("{type: string, pattern: '('}", None),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_one_fault(tmp_path, declaration, fault):
    """Also when a field names the parameter."""
    text = f"parameters: {{x: {declaration}}}\nenv: {{A: '{{{{ parameters.x }}}}'}}\n"

    found = faults_of(tmp_path, text)

    assert len(found) == 1
    assert fault is None or found == [fault]


def test_parameters_that_are_not_declared_are_refused_with_the_nearest(tmp_path):
    """A misspelt --set."""
    assert faults_of(tmp_path, "parameters: {gpu_count: 1}\n", parameters={"gpu_cuont": 2}) == [
        "parameters: gpu_cuont: is not declared by the spec; write gpu_count"
    ]


def test_a_required_parameter_without_a_value_is_one_fault(tmp_path):
    """Its uses are not reported in addition."""
    text = "parameters: {x: {type: integer}}\nnum_nodes: '{{ parameters.x }}'\n"

    assert faults_of(tmp_path, text) == [
        "3: parameters.x: has no value and no default; give one: --set x=..., or parameters={...}"
    ]


def test_the_form_has_types_bounds_and_descriptions(tmp_path):
    """As JSON schemas (feature E5)."""
    path = write(
        tmp_path,
        "parameters:\n"
        "  n: {type: integer, default: 1, minimum: 1, maximum: 8, description: GPUs.}\n"
        "  rate: {type: number, exclusiveMinimum: 0}\n"
        "  size: {values: [small, large], default: small}\n"
        "  wait: {type: duration, default: 10m}\n"
        "  word: {type: string, pattern: '[a-z]+', title: Word}\n",
    )

    assert spec_params(path) == {
        "n": {"default": 1, "type": "integer", "minimum": 1, "maximum": 8, "description": "GPUs."},
        "rate": {"type": "number", "exclusiveMinimum": 0},
        "size": {"default": "small", "enum": ["small", "large"], "type": "string"},
        "wait": {"default": "10m", "type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$"},
        "word": {"type": "string", "maxLength": 4096, "pattern": "^(?:[a-z]+)$", "title": "Word"},
    }


def test_the_form_needs_neither_pydantic_nor_jinja(tmp_path):
    """DAG files call it at every parse."""
    code = (
        "import sys; from envscaler_airflow.envspec import spec_params; spec_params(sys.argv[1]); "
        "sys.exit(any(name in sys.modules for name in ('pydantic', 'jinja2')))"
    )

    done = subprocess.run([sys.executable, "-c", code, write(tmp_path, "parameters: {x: 1}\n")], check=False)

    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{{ parameters.n }}", 4),
        ("{{ .parameters.n }}", 4),
        ("{{.parameters.n}}", 4),
        ("{{- parameters.n -}}", 4),
        ("{{ -1 }}", -1),
        ("{{ parameters['n'] * 2 + 1 }}", 9),
        ("{{ 'a' if parameters.n > 2 else 'b' }}", "a"),
        ("{{ parameters.n / 8 }}", 0.5),
        ("{{ (parameters.n / 3) | round }}", 1),
        ("x{{ parameters.n }}y{{ .parameters.s }}", "x4yA b"),
        ("{{ parameters.s | lower }}", "a b"),
        ("{{ parameters.flag }}", True),
        ("{{ '{{' }}", "{{"),
        ("{{ inputs.model }}/x", "{{ inputs.model }}/x"),
        ("no template {", "no template {"),
    ],
)
def test_expressions(text, value):
    """One alone keeps its type."""
    assert rendered(text, n=4, s="A b", flag=True) == value


@pytest.mark.parametrize(
    "text",
    [
        "{{ parameters.__class__ }}",
        "{{ parameters.n.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ parameters['__init__'] }}",
        "{{ self }}",
        "{{ range(10) }}",
        "{{ lipsum() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ parameters.n | attr('__class__') }}",
        "{{ parameters.s.format(x) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 1.5 | round(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{% for x in [1] %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{# comment #}",
        "{{ parameters }}",
        "x{{ parameters }}",
        "x{{ {'a': 1} }}",
        "{{ 2 ** 3 }}",
        "x{{ 'abc' is string }}",
        "{{ inputs }}",
        "{{ [1, 2] }}",
        "{{ 1 / 0 }}",
        "{{ 10000000 * 10000000 * 100 }}",
        "{{ unknown.x }}",
        "{{ parameters.nothing }}",
        "{{ parameters.n",
        "{{ }}",
        "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
        "{{ " + "-" * 3000 + "1 }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ parameters.n + 'x' }}",
        "{{ parameters[parameters.s] }}",
        "{{ namespace(x=1) }}",
        "{{ x" * 3000,
    ],
)
def test_escapes_and_bombs_are_refused(text):
    """Each is one fault, at once."""
    with pytest.raises(SpecError):
        rendered(text, n=4, s="A b")


pieces = st.sampled_from(
    ["{{", "}}", "{%", "%}", "{#", "#}", " ", ".", "parameters", "inputs", ".n", "|", "round", "(", ")", "*",
     "%", "-", "1", "'", '"', "[", "]", "if", "else", "not", "~", "is", "in", "__class__", "\n", ","]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(pieces, max_size=15).map("".join))
def test_any_template_gives_a_scalar_or_a_fault(text):
    """Nothing else is raised."""
    try:
        value = rendered(text, n=4)
    except SpecError:
        return
    assert value is None or isinstance(value, (str, int, float, bool))
