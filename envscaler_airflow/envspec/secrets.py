"""Secrets only by reference: report values that look like literal secrets, and parse references."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envscaler_airflow.envspec.documents import Faults, Node
from envscaler_airflow.envspec.secret_forms import (
    has_secret_shape,
    has_userinfo,
    is_literal,
    is_secret_name,
)
from envscaler_airflow.local_files import read_table

ScriptKind = Literal["shell", "code"]

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "rbash", "yash", "osh"})
_OTHER_SHELLS = frozenset({"fish", "csh", "tcsh", "nu", "elvish", "xonsh"})
"""Shells whose quoting differs from POSIX (in fish ``\\'`` is a quote within quotes), so that the filter
``quote`` does not work there.
"""
_BY_COMMAND = frozenset({"su", "runuser", "flock", "script", "sg"})
"""Programs that pass the text after ``-c`` to a shell."""
_REST_IS_SCRIPT = frozenset({"eval", "ssh", "watch", "parallel"})
"""Programs that join all following words and pass them to a shell."""
_SCRIPT_FIRST = {"awk": "-[Fv]", "gawk": "-[Fv]", "mawk": "-[Fv]", "nawk": "-[Fv]", "sed": "-[lE]"}
"""Programs whose first word that is not an option is code that can run commands, and options with a value."""
_FLAGS = read_table(Path(__file__).with_name("program_flags.csv"))
_CODE_FLAGS = {row["programs"]: row["flag"] for row in _FLAGS if row["before"] == "code"}
"""Flag after which each interpreter expects code."""
_ATTACHED = re.compile(r"(-[cCeE]|--[a-z]+(?==)).+", re.DOTALL)
"""Code attached to its flag: ``-cprint(1)``, ``--eval=f()``."""
_ENDS_OPTIONS = frozenset({"python", "pypy"})
"""Interpreters that pass everything after the first code to it as arguments."""
_COMMAND = r"-[a-z]*c|--command"
_TAKES_VALUE = re.compile(r"[-+][A-Za-z]*o|--rcfile|--init-file|-O")
_VERSION = re.compile(r"[0-9.]+\Z")


def scripts(words: Sequence[object]) -> Iterator[tuple[int, ScriptKind]]:
    """Index and kind of each word of *words* that a shell or an interpreter runs as a program."""
    texts = [word if isinstance(word, str) else "" for word in words]
    for index, text in enumerate(texts):
        program = text.rpartition("/")[2]
        if program in _SHELLS:
            found = _shell_script(texts, index + 1)
            if found is not None:
                yield found, "shell"
        elif program in _BY_COMMAND:
            yield from ((at, "shell") for at in _after(texts, index + 1, _COMMAND))
        elif program in _REST_IS_SCRIPT:
            yield from ((at, "shell") for at in range(index + 1, len(texts)))
        elif program in _OTHER_SHELLS:
            yield from ((at, "code") for at in _after(texts, index + 1, _COMMAND))
        else:
            yield from ((at, "code") for at in _code(texts, index))


def _code(texts: Sequence[str], index: int) -> Iterator[int]:
    """Words of code that are passed to the interpreter at *index*."""
    program = _VERSION.sub("", texts[index].rpartition("/")[2])
    found = list(_after(texts, index + 1, flag)) if (flag := _CODE_FLAGS.get(program)) else []
    if not found and (takes_value := _SCRIPT_FIRST.get(program)):
        at = index + 1
        while at < len(texts) and texts[at][:1] == "-":
            at += 2 if re.fullmatch(takes_value, texts[at]) else 1
        found = [at] if at < len(texts) else []
    yield from found[:1] if program in _ENDS_OPTIONS else found


def _shell_script(texts: Sequence[str], start: int) -> int | None:
    has_command, at = False, start
    while at < len(texts) and texts[at][:1] in ("-", "+") and texts[at] not in ("-", "--"):
        option = texts[at]
        has_command |= option == "--command" or (option[:2] != "--" and option[0] == "-" and "c" in option)
        at += 2 if _TAKES_VALUE.fullmatch(option) else 1
    if at < len(texts) and texts[at] == "--":
        at += 1
    return at if has_command and at < len(texts) else None


def _after(texts: Sequence[str], start: int, flag: str) -> Iterator[int]:
    """Words after each *flag*, and those that begin with it (``-cprint(1)``)."""
    at = start
    while at < len(texts):
        if re.fullmatch(flag, texts[at]) and at + 1 < len(texts):
            yield at + 1
            at += 1
        elif (attached := _ATTACHED.fullmatch(texts[at])) and re.fullmatch(flag, attached[1]):
            yield at
        elif texts[at][:1] != "-" and flag != _COMMAND:
            return  # the program's own file: its arguments follow
        at += 1


ReferenceKind = Literal["secret", "env", "connection", "variable"]

REFERENCE_FORMS = "secret:NAME/key, env:NAME, connection:ID/field or variable:NAME"

_AS_VARIABLE = f"write an env entry with value_from: {REFERENCE_FORMS}, and let the program read it"
_FLAG_IN_SCRIPT = re.compile(
    r"(?:^|\s)--?([A-Za-z][A-Za-z0-9_-]{0,60})(?:=|\s+)(\"[^\"]*\"|'[^']*'|[^\s\"';|&]+)"
)
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][A-Za-z0-9_.-]{0,200})=([^\s(]+)\Z")
"""``db.password=x``, as Hydra and Helm accept it."""
_ASSIGNED_IN_SHELL = re.compile(r"(?:^|[\s;])([A-Za-z_][A-Za-z0-9_.]{0,200})=([^\s\"'(),;]+)(?=[\s;]|$)")
_USER_FLAGS = frozenset(
    {"-u", "--user", "--proxy-user", "-U", "--userpwd", "--http-user", "-n", "--auth", "-a"}
)
_USER_PROGRAMS = re.compile(r"(?:^|[\s/;|&])(?:curl|wget|http|https|xh|lftp|aria2c|smbclient|mc)(?:\s|\Z)")
_USER_IN_SCRIPT = re.compile(
    r"\s(-u|--user|--proxy-user|--userpwd|--auth|-a)(?:=|\s*)[\"']?([^\s\"':$]{1,200}:[^\s\"']+)"
)
_PASSWORD_FLAGS = tuple(
    re.compile(
        rf"(?:^|[\s/;|&])(?:{row['programs']})\s(?:[^|;&]{{0,400}}?\s)?{row['flag']}[\"']?([^\s\"'`]+)"
    )
    for row in _FLAGS
    if row["before"] == "password"
)
"""Short flags with which programs accept a password."""
_USER_AND_PASSWORD = re.compile(r"[\"']?[^\s:/$\"'{<]+:(?!/)([^\s]+)\Z")
_FLAG = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]*)(?:=(.*))?\Z", re.DOTALL)
_ASSIGNED = re.compile(r"(?:\b([A-Z][A-Z0-9_]*)|[?&]([A-Za-z_]+))=(\S+)")
"""``NAME=value`` of a shell and ``?name=value`` of a URL; not ``token=f(x)`` of a program."""
_SAFE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
_REFERENCE = re.compile(
    rf"(secret|env|connection|variable):({_SAFE}|_[A-Za-z0-9_]{{0,252}})(?:/({_SAFE}))?\Z"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """The source of a secret, never its value.

    Attributes:
        kind: ``secret`` (Kubernetes), ``env`` (of the worker), ``connection`` or ``variable`` (Airflow).
        name: Name of the secret, variable or connection.
        key: Key within a secret, or field of a connection; None otherwise.
    """

    kind: ReferenceKind
    name: str
    key: str | None = None

    def __str__(self) -> str:
        """``secret:wandb/api-key``."""
        return f"{self.kind}:{self.name}" + (f"/{self.key}" if self.key else "")


def parse_reference(text: str, *, variable: str | None = None) -> Reference:
    """Read ``secret:NAME/key``, ``env:NAME``, ``connection:ID/field`` or ``variable:NAME``.

    ``secret:NAME`` without a key uses *variable* in lower kebab case, without the words that NAME also has:
    WANDB_API_KEY of wandb-secret is ``api-key``.

    Raises:
        ValueError: The text has another form; the message does not repeat it, because it may be a secret.
    """
    match = _REFERENCE.match(text)
    if match is None:
        raise ValueError(f"is not a valid reference; write {REFERENCE_FORMS}")
    kind, name, key = match[1], match[2], match[3]
    if kind == "connection" and key is None:
        raise ValueError(f"names a connection without a field; write connection:{name}/password")
    if kind in ("env", "variable") and key is not None:
        raise ValueError(f"has a key after {kind}:{name}; write {kind}:{name}")
    if kind == "secret" and key is None and variable is not None:
        key = secret_key(variable, name)
    return Reference(kind, name, key)  # type: ignore[arg-type]  # the pattern admits the four kinds only


def secret_key(variable: str, secret: str) -> str:
    """Default key of *secret* for *variable*: ``api-key`` of wandb for WANDB_API_KEY."""
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", variable) if word]
    shared = set(re.split(r"[^a-z0-9]+", secret.lower()))
    kept = list(words)
    while kept and kept[0] in shared:
        kept.pop(0)
    return "-".join(kept or words) or "value"


def check_secrets(root: Node, faults: Faults) -> None:
    """Record a fault for every literal that looks like a secret; messages never contain its text."""
    for node in root.walk():
        if isinstance(node.value, str):
            _check_text(node, faults)
        elif node.is_map:
            _check_map(node, faults)
        elif node.is_list:
            _check_arguments(node, faults)


def _assigns_secret(text: str) -> bool:
    return any(
        is_secret_name(upper or query) and is_literal(value)
        for upper, query, value in _ASSIGNED.findall(text)
    )


def _check_text(node: Node, faults: Faults) -> None:
    if has_secret_shape(node.value):
        node.fault(
            f"contains what looks like a secret; write a reference: value_from: {REFERENCE_FORMS}", faults
        )
    elif has_userinfo(node.value):
        fix = "leave user and password out and write credentials: or value_from: connection:ID/password"
        node.fault(f"is a URL with a user or password; {fix}", faults)
    elif _assigns_secret(node.value):
        node.fault(
            f"sets a secret by a literal; write an env entry with value_from: {REFERENCE_FORMS}", faults
        )


def _check_map(node: Node, faults: Faults) -> None:
    name, value = node.get("name"), node.get("value")
    if name is not None and value is not None and is_secret_name(str(name.value)) and is_literal(value.value):
        reference = f"secret:NAME/{secret_key(str(name.value), '')}"
        fix = f"value_from: {reference} (or env:NAME, connection:ID/field, variable:NAME)"
        value.fault(f"a literal under the secret's name {name.value!r:.60}; write {fix}", faults)
    for key, item in node.value.items():
        if key in ("credentials", "value_from") or item.is_map or item.is_list:
            continue
        if is_secret_name(key) and is_literal(item.value):
            item.fault(f"a literal under a secret's name; write value_from: {REFERENCE_FORMS}", faults)


def _check_arguments(node: Node, faults: Faults) -> None:
    """Check ``--api-key abc``, ``db.password=abc`` and ``-u user:abc`` in a list, and in its scripts."""
    words = [item.value for item in node.value]
    kinds = dict(scripts(words))
    is_for_users = any(isinstance(word, str) and _USER_PROGRAMS.search(word) for word in words)
    command = " ".join(word for word in words if isinstance(word, str) and not any(map(str.isspace, word)))
    if any(_is_given(value) for flag in _PASSWORD_FLAGS for value in flag.findall(command)):
        node.fault(f"gives a secret as an argument; {_AS_VARIABLE}", faults)
    for index, item in enumerate(node.value):
        if not isinstance(item.value, str):
            continue
        after = words[index + 1] if index + 1 < len(words) else None
        kind = kinds.get(index)
        if kind == "shell" or (kind is None and any(map(str.isspace, item.value.strip()))):
            is_secret = _gives_secret(item.value, is_shell=kind == "shell")
        else:
            is_secret = kind is None and _is_secret_argument(item.value, after, is_for_users=is_for_users)
        if is_secret:
            item.fault(f"gives a secret as an argument; {_AS_VARIABLE}", faults)


def _is_secret_argument(text: str, after: object, *, is_for_users: bool) -> bool:
    """True when *text*, followed by *after*, passes a secret to the program."""
    if override := _OVERRIDE.match(text):
        return is_secret_name(override[1].rpartition(".")[2]) and is_literal(override[2])
    flag, assigned, literal = text.partition("=")
    if flag in _USER_FLAGS and (is_for_users or flag.startswith("--")):
        return _is_user_and_password(literal if assigned else after, is_sure=is_for_users)
    if is_for_users and text[:2] == "-u" and text[2:]:
        return _is_user_and_password(text[2:], is_sure=True)
    match = _FLAG.match(text)
    if match is None or not is_secret_name(match[1]):
        return False
    given = match[2] if match[2] is not None else after
    if match[2] is None and isinstance(given, str) and given.startswith("-"):
        return False
    return is_literal(given) and not (match[1] == "pass" and str(given).isdigit())


def _is_user_and_password(value: object, *, is_sure: bool) -> bool:
    """True for ``user:pass``; unless *is_sure*, not for ``1000:1000`` and ``nobody:nogroup``."""
    match = _USER_AND_PASSWORD.match(value) if isinstance(value, str) else None
    if match is None or not is_literal(match[1]):
        return False
    is_group = match[1].isdigit() or match[1].replace("-", "").islower()
    return is_sure or not is_group


def _gives_secret(text: str, *, is_shell: bool) -> bool:
    """True when a text of several words passes a secret to a program."""
    if any(is_secret_name(flag) and _is_given(value) for flag, value in _FLAG_IN_SCRIPT.findall(text)):
        return True
    if any(_is_given(value) for flag in _PASSWORD_FLAGS for value in flag.findall(text)):
        return True
    is_sure = bool(_USER_PROGRAMS.search(text))
    if any(
        (is_sure or flag.startswith("--")) and _is_user_and_password(value, is_sure=is_sure)
        for flag, value in _USER_IN_SCRIPT.findall(text)
    ):
        return True
    assigned = _ASSIGNED_IN_SHELL.findall(text) if is_shell else ()
    return any(is_secret_name(name.rpartition(".")[2]) and is_literal(value) for name, value in assigned)


def _is_given(value: str) -> bool:
    return is_literal(value) and not value.startswith("-") and not value.isdigit()
