"""Templates in a spec: only expressions over parameters and inputs.

``{{ parameters.x }}``, ``{{ .parameters.x }}`` and ``{{ inputs.x }}``, with arithmetic, comparison,
``if``/``else`` and a few filters. Calls, statements, and attributes of anything except the two maps are not
allowed: the syntax tree is checked against a list before it runs in Jinja2's sandbox. A string that is a
single expression gets the expression's type.

User input never becomes part of a script (``bash -c``, ``python -c``). Any user who may trigger the
DAG can fill in a text parameter, even one who may not read the stage's secrets. A script may contain a
parameter only if its value cannot have a special meaning in a shell: it is one of ``values``, its ``pattern``
excludes such characters, or the filter ``quote`` quotes it where quoting works.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from envscaler_airflow.envspec import patterns
from envscaler_airflow.envspec.documents import Faults, Node
from envscaler_airflow.envspec.parameters import BROKEN, MAX_NUMBER, Parameter
from envscaler_airflow.envspec.secrets import ScriptKind, scripts

MAX_TEMPLATE = 10_000
"""Longest text with a template, characters. Chosen: several times an entrypoint's script."""

_FILTERS = ("abs", "default", "length", "lower", "quote", "round", "string", "trim", "upper")
MAX_DEPTH = 40
"""Deepest expression. Chosen: users write up to 5."""
_ALLOWED: tuple[type[nodes.Node], ...] = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Const,
    nodes.Filter, nodes.Keyword, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not,
    nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos, nodes.Concat,
    nodes.Test, nodes.List, nodes.Tuple,
)  # fmt: skip
_TESTS = ("defined", "undefined", "none", "equalto", "in")
EXPRESSION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
"""One expression of a template."""
_GO_DOT = re.compile(r"(?<![\w\])'\".])\.(?=(?:parameters|inputs)\b)")
_SCALARS = (str, int, float, bool, type(None))


class _Env(ImmutableSandboxedEnvironment):
    """Jinja2 environment for expressions; numbers stay small, and ``*`` and ``%`` accept only numbers."""

    intercepted_binops = frozenset({"*", "%", "/", "//", "+", "-"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator in "*%//-" and not (_is_number(left) and _is_number(right)):
            raise TemplateError(f"{operator} takes numbers")
        return super().call_binop(context, operator, left, right)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _round(value: float, digits: int = 0) -> float:
    """Round with a limited number of digits; Jinja2's own filter accepts any power of ten."""
    if not _is_number(value) or not isinstance(digits, int) or not 0 <= digits <= 15:
        raise TemplateError("round takes a number, and 0 to 15 digits")
    return round(value, digits) if digits else round(value)


def _quote(value: object) -> str:
    """Quote a value as one word of a shell."""
    if not isinstance(value, (str, int, float)):
        raise TemplateError("quote takes text")
    return shlex.quote(str(value))


def _environment() -> _Env:
    env = _Env(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    env.globals.clear()
    known = {**env.filters, "round": _round, "quote": _quote}
    env.filters = {name: known[name] for name in _FILTERS}
    env.tests = {name: env.tests[name] for name in _TESTS}
    return env


_ENV = _environment()


def parse(text: str) -> nodes.Template:
    """Parse template *text* without checking its expressions.

    Raises:
        TemplateError: *text* is not a valid template.
    """
    return _ENV.parse(_without_go_dots(text))


def _without_go_dots(text: str) -> str:
    return EXPRESSION.sub(lambda match: "{{" + _GO_DOT.sub("", match[1]) + "}}", text)


@dataclass(slots=True)
class Names:
    """Names that templates may use.

    Attributes:
        parameters: Parameter values by name.
        inputs: URI by name; None if not known yet, and ``{{ inputs.x }}`` is then left unchanged.
        declared: Input names that the spec declares; None when it declares none.
        used_inputs: Collects every input that a template uses.
    """

    parameters: Mapping[str, Any]
    inputs: Mapping[str, str] | None = None
    declared: frozenset[str] | None = None
    used_inputs: dict[str, None] = field(default_factory=dict)


def render(root: Node, names: Names, faults: Faults) -> Node:
    """Replace every template in *root* with its value."""
    if isinstance(root.value, dict):
        return replace(root, value={key: _entry(root, key, names, faults) for key in root.value})
    if isinstance(root.value, list):
        return replace(root, value=[render(item, names, faults) for item in root.value])
    if isinstance(root.value, str) and any(mark in root.value for mark in ("{{", "{%", "{#")):
        return _scalar(root, names, faults)
    return root


def _entry(root: Node, key: str, names: Names, faults: Faults) -> Node:
    item: Node = root.value[key]
    if "{{" in key or "{%" in key:
        faults.add(item.file, item.line, root.path, "a template as a key; write templates in values only")
    return render(item, names, faults)


def _scalar(node: Node, names: Names, faults: Faults) -> Node:
    try:
        value = _evaluate(node.value, names)
    except _BrokenParameterError:
        return replace(node, is_broken=True)
    except _TemplateFaultError as err:
        node.fault(str(err), faults)
        return replace(node, is_broken=True)
    return replace(node, value=value, raw=None)


class _Entries:
    """A map that exposes only its entries to templates: ``parameters.items`` is an entry, never a method."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]


class _TemplateFaultError(ValueError):
    """A fault of a template."""


class _BrokenParameterError(_TemplateFaultError):
    """The template uses a parameter whose fault was already reported."""


def _evaluate(text: str, names: Names) -> Any:
    if len(text) > MAX_TEMPLATE:
        raise _TemplateFaultError(f"a template of {len(text)} characters; write at most {MAX_TEMPLATE}")
    if "{%" in text or "{#" in text:
        raise _TemplateFaultError("a template statement; write expressions {{ parameters.x }} only")
    source = _without_go_dots(text)
    try:
        tree = _ENV.parse(source)
        _check_tree(tree, names)
        return _run(tree, source, names)
    except TemplateError as err:
        raise _TemplateFaultError(
            f"is not a valid template: {err.message or err!s:.200}; write {{{{ parameters.x }}}}"
        ) from err
    except (TypeError, ValueError, ArithmeticError, RecursionError, SyntaxError) as err:
        if isinstance(err, _TemplateFaultError):
            raise
        reason = f"{err}".splitlines()[0] if str(err) else type(err).__name__
        raise _TemplateFaultError(f"cannot be evaluated: {reason:.200}; check the parameters' types") from err


def _check_tree(tree: nodes.Template, names: Names) -> None:
    if _depth(tree, MAX_DEPTH) > MAX_DEPTH:
        raise _TemplateFaultError(f"an expression nested deeper than {MAX_DEPTH}; write a simpler one")
    for node in tree.find_all(nodes.Node):
        if not isinstance(node, _ALLOWED):
            kind = type(node).__name__
            raise _TemplateFaultError(f"{kind} is not allowed in a template; write {{{{ parameters.x }}}}")
        if isinstance(node, nodes.Name):
            _check_name(node.name)
        elif isinstance(node, (nodes.Getattr, nodes.Getitem)):
            _check_member(node, names)
        elif isinstance(node, nodes.Filter) and node.name not in _FILTERS:
            raise _TemplateFaultError(
                f"filter {node.name!r:.40} is not known; write one of {', '.join(_FILTERS)}"
            )
        elif isinstance(node, nodes.Test) and node.name not in _TESTS:
            raise _TemplateFaultError(
                f"test {node.name!r:.40} is not known; write one of {', '.join(_TESTS)}"
            )
    _check_whole_maps(tree)


def _depth(node: nodes.Node, most: int) -> int:
    if most < 0:
        return 1
    return 1 + max((_depth(child, most - 1) for child in node.iter_child_nodes()), default=0)


def _check_name(name: str) -> None:
    if name not in ("parameters", "inputs"):
        raise _TemplateFaultError(
            f"{name!r:.60} is not known; write {{{{ parameters.{name:.40} }}}} or {{{{ inputs.x }}}}"
        )


def _check_member(node: nodes.Getattr | nodes.Getitem, names: Names) -> None:
    if not isinstance(node.node, nodes.Name):
        raise _TemplateFaultError(
            "only entries of parameters and inputs can be named; write {{ parameters.x }}"
        )
    member = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
    if not isinstance(member, str):
        raise _TemplateFaultError(
            "an entry is named by text; write {{ parameters.x }} or {{ parameters['x'] }}"
        )
    if node.node.name == "inputs":
        _check_input(member, names)
    elif member not in names.parameters:
        known = ", ".join(sorted(names.parameters)) or "none"
        text = f"parameter {member!r:.60} is not declared (declared: {known}); declare it under parameters"
        raise _TemplateFaultError(text)
    elif names.parameters[member] is BROKEN:
        raise _BrokenParameterError


def _check_input(member: str, names: Names) -> None:
    names.used_inputs[member] = None
    known = names.declared if names.inputs is None else frozenset(names.inputs)
    if known is not None and member not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise _TemplateFaultError(
            f"input {member!r:.60} is not known (known: {listed}); hand it over: inputs={{...}}, or --input"
        )


def _check_whole_maps(tree: nodes.Template) -> None:
    members: list[Any] = list(tree.find_all((nodes.Getattr, nodes.Getitem)))
    inside = {id(member.node) for member in members}
    for node in tree.find_all(nodes.Name):
        if id(node) not in inside:
            raise _TemplateFaultError(f"names all {node.name}; write one of them: {{{{ {node.name}.x }}}}")


def _run(tree: nodes.Template, source: str, names: Names) -> Any:
    inputs = names.inputs
    if inputs is None:
        inputs = {name: f"{{{{ inputs.{name} }}}}" for name in names.used_inputs}
    context = {"parameters": _Entries(names.parameters), "inputs": _Entries(inputs)}
    single = _single_expression(tree)
    if single is None:
        return _ENV.from_string(source).render(context)
    inner = source[2:-2]
    inner = inner[1:] if inner[:1] in ("-", "+") else inner  # Jinja2's own marks for white space
    inner = inner[:-1] if inner[-1:] in ("-", "+") else inner
    value: Any = _ENV.compile_expression(inner.strip(), undefined_to_none=False)(**context)
    if not isinstance(value, _SCALARS):
        raise _TemplateFaultError("gives no text, number or switch; write {{ parameters.x }}")
    if _is_number(value) and not abs(value) < MAX_NUMBER:
        raise _TemplateFaultError("gives no finite number below 1e15; check the arithmetic")
    return value


def _single_expression(tree: nodes.Template) -> nodes.Expr | None:
    """The expression of a template that consists of only one expression."""
    if len(tree.body) == 1 and isinstance(tree.body[0], nodes.Output):
        parts = tree.body[0].nodes
        if len(parts) == 1 and not isinstance(parts[0], nodes.TemplateData):
            return parts[0]
    return None


_NUMERIC_FILTERS = frozenset({"abs", "length", "round"})
_PLAIN_INPUT = re.compile(r"[A-Za-z0-9_./:@%+=,-]*\Z")
"""Characters without a special meaning in any shell, after Python's ``shlex.quote``."""


def check_scripts(root: Node, declared: Mapping[str, Parameter | None], names: Names, faults: Faults) -> None:
    """Record a fault for every template in a script whose value could be a command."""
    free = {name for name, item in declared.items() if item is not None and not _is_plain(item)}
    free_inputs = {name for name, uri in (names.inputs or {}).items() if not _PLAIN_INPUT.match(str(uri))}
    for node in root.walk():
        if not node.is_list:
            continue
        for index, kind in scripts([item.value for item in node.value]):
            _check_script(node.value[index], kind, free, free_inputs, faults)


def _is_plain(parameter: Parameter) -> bool:
    """True when no value of *parameter* has a special meaning in a shell."""
    if parameter.type != "string":
        return True  # numbers, booleans, durations, sizes, and values that the spec's author listed
    return parameter.pattern is not None and patterns.is_shell_safe(parameter.pattern)


def _check_script(
    node: Node, kind: ScriptKind, free: set[str], free_inputs: set[str], faults: Faults
) -> None:
    if node.is_broken or not isinstance(node.value, str):
        return
    found = EXPRESSION.findall(node.value)
    places = contexts(EXPRESSION.sub("\ue000", node.value.replace("\ue000", ""))) if found else []
    for text, place in zip(found, places, strict=True):
        can_quote = kind == "shell" and place == "plain"
        for member in dict.fromkeys(_unquoted(text, can_quote=can_quote)):
            group, name = member
            if name in (free if group == "parameters" else free_inputs):
                node.fault(_words(group, name, kind, place), faults)


def _words(group: str, name: str, kind: ScriptKind, place: str) -> str:
    what = "the code of an interpreter" if kind == "code" else "a shell script"
    if kind == "code" or place == "arithmetic":
        fix = f"hand it over as an argument of its own, or by env: {{NAME: '{{{{ {group}.{name} }}}}'}}"
    elif place == "plain":
        fix = f"write {{{{ {group}.{name} | quote }}}}"
    else:
        fix = f"write {{{{ {group}.{name} | quote }}}} outside of the {place}: the filter writes the quotes"
    if group == "inputs":
        return f"input {name!r:.60} has characters that {what} acts on; {fix}"
    return (
        f"parameter {name!r:.60} is put into {what}, where what is typed could run commands; {fix}, or give "
        "the parameter values: [...] or pattern: '[A-Za-z0-9_.-]+'"
    )


def _unquoted(text: str, *, can_quote: bool) -> Iterator[tuple[str, str]]:
    """Entries of ``parameters`` and ``inputs`` that the result of expression *text* contains unquoted."""
    try:
        tree = parse("{{" + text + "}}")
    except TemplateError:
        return  # rendering reports it
    for output in tree.find_all(nodes.Output):
        for part in output.nodes:
            yield from _reaching(part, can_quote=can_quote)


def _reaching(node: nodes.Node, *, can_quote: bool) -> Iterator[tuple[str, str]]:
    if isinstance(node, (nodes.Getattr, nodes.Getitem)) and isinstance(node.node, nodes.Name):
        member = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
        yield node.node.name, str(member)
        return
    if isinstance(node, (nodes.Compare, nodes.Not, nodes.Test)):
        return  # a boolean
    if isinstance(node, nodes.Filter) and (
        node.name in _NUMERIC_FILTERS or (can_quote and node.name == "quote")
    ):
        return
    children = [node.expr1, node.expr2] if isinstance(node, nodes.CondExpr) else node.iter_child_nodes()
    for child in children:
        if child is not None:
            yield from _reaching(child, can_quote=can_quote)


def contexts(script: str, mark: str = "\ue000") -> list[str]:
    """Context of each *mark* in a shell script: ``plain``, or the quotes or other special place around it.

    Source: POSIX.1-2024, Shell Command Language, 2.2 Quoting and 2.6.3 Command Substitution.
    """
    return list(_Reader(script, mark).places())


class _Reader:
    """Reads a script once, with a stack of the open quotes and substitutions."""

    def __init__(self, script: str, mark: str) -> None:
        self.script, self.mark, self.at = script, mark, 0
        self.open: list[str] = []
        self.is_here_document = False

    def places(self) -> Iterator[str]:
        while self.at < len(self.script):
            char = self.script[self.at]
            if char == self.mark:
                yield self.place()
                self.at += 1
            else:
                self.at += self._step(char)

    def place(self) -> str:
        if self.is_here_document:
            return "here-document"
        special = next((name for name in self.open if name in ("backquotes", "arithmetic")), None)
        inner = self.open[-1] if self.open else "substitution"
        return special or ("plain" if inner == "substitution" else inner)

    def _step(self, char: str) -> int:
        inner = self.open[-1] if self.open else "substitution"
        return self._steps()[inner](char)

    def _steps(self) -> dict[str, Callable[[str], int]]:
        return {
            "single quotes": lambda char: self._until(char, "'", escapes=False),
            "ANSI quotes": lambda char: self._until(char, "'", escapes=True),
            "comment": lambda char: self._until(char, "\n", escapes=False),
            "double quotes": self._in_double,
            "backquotes": self._in_plain,
            "arithmetic": self._in_plain,
            "substitution": self._in_plain,
        }

    def _until(self, char: str, end: str, *, escapes: bool) -> int:
        if char == "\\" and escapes:
            return 2
        if char == end:
            self.open.pop()
        return 1

    def _in_double(self, char: str) -> int:
        if char == "\\":
            return 2
        if char == '"':
            self.open.pop()
            return 1
        return self._opened(char) or 1

    def _opened(self, char: str) -> int:
        """Open a substitution that starts here, in quotes or not; 0 when none starts."""
        ahead = self.script[self.at : self.at + 3]
        if ahead == "$((":
            self.open += ["arithmetic", "arithmetic"]
            return 3
        if ahead[:2] == "$(":
            self.open.append("substitution")
            return 2
        if char == "`":
            if "backquotes" in self.open:
                del self.open[self.open.index("backquotes") :]
            else:
                self.open.append("backquotes")
            return 1
        return 0

    def _in_plain(self, char: str) -> int:
        ahead = self.script[self.at : self.at + 3]
        if char == "\\":
            return 2
        if ahead[:2] == "$'":
            self.open.append("ANSI quotes")
            return 2
        if ahead[:2] == "<<" and ahead != "<<<":
            self.is_here_document = True
            return 2
        if ahead == "<<<":
            return 3
        if opened := self._opened(char):
            return opened
        if ahead[:2] == "((":
            self.open += ["arithmetic", "arithmetic"]
            return 2
        self._mark(char)
        return 1

    def _mark(self, char: str) -> None:
        before = self.script[self.at - 1 : self.at]
        if char == "'":
            self.open.append("single quotes")
        elif char == '"':
            self.open.append("double quotes")
        elif char == "#" and (not before or before in " \t\n;&|("):
            self.open.append("comment")
        elif char == "(":
            self.open.append("substitution")
        elif char == ")" and self.open and self.open[-1] in ("substitution", "arithmetic"):
            self.open.pop()
