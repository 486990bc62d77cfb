"""User input never becomes part of a script: templates within ``bash -c`` and ``python -c``.

Any user who may trigger the DAG can fill in a text parameter, even one who may not read the stage's secrets.
A script may contain a parameter only if its value cannot have a special meaning in a shell: it is one of
``values``, its ``pattern`` excludes such characters, or the filter ``quote`` quotes it where quoting works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from jinja2 import TemplateError, nodes

from envscaler_airflow.envspec import patterns
from envscaler_airflow.envspec.documents import Node
from envscaler_airflow.envspec.faults import Faults
from envscaler_airflow.envspec.parameters import Parameter
from envscaler_airflow.envspec.scripts import ScriptKind, scripts
from envscaler_airflow.envspec.templates import EXPRESSION, Names, parse

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
                faults.add(node.file, node.line, node.path, _words(group, name, kind, place))


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
