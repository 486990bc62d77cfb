"""Words of a command that are themselves programs, as those of ``bash -c`` and ``python -c``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

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
_CODE_FLAGS = {
    "python": r"-[A-Za-z]*c",
    "pypy": r"-[A-Za-z]*c",
    "ipython": r"-c",
    "expect": r"-c",
    "gdb": r"-ex|--eval-command",
    "sed": r"-[nErsz]*e|--expression",
    "gawk": r"-e|--source",
    "pwsh": r"-[cC](ommand)?",
    "bun": r"-[ep]|--eval|--print",
    "ts-node": r"-[ep]|--eval|--print",
    "tsx": r"-[ep]|--eval|--print",
    "perl": r"-[A-Za-z0-9]*[eE]",
    "ruby": r"-[A-Za-z]*e",
    "node": r"-[a-z]*[ep]|--eval|--print",
    "Rscript": r"-e",
    "R": r"-e",
    "julia": r"-[eE]|--eval",
    "php": r"-r",
    "lua": r"-e",
    "deno": r"eval",
}
"""Flag after which each interpreter expects code, from its manual page."""
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
