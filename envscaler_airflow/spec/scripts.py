"""Words of a command that are programs of their own, as those of ``bash -c`` and ``python -c``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

ScriptKind = Literal["shell", "code"]

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "fish", "rbash"})
_BY_COMMAND = frozenset({"su", "runuser", "flock", "script", "sg"})
"""Programs that hand the text after ``-c`` to a shell."""
_REST_IS_SCRIPT = frozenset({"eval", "ssh", "watch", "parallel"})
"""Programs that join all that follows and hand it to a shell."""
_CODE_FLAGS = {
    "python": r"-[A-Za-z]*c",
    "pypy": r"-[A-Za-z]*c",
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
"""Flag after which each interpreter takes code, from its manual page."""
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
        elif flag := _CODE_FLAGS.get(_VERSION.sub("", program)):
            yield from ((at, "code") for at in _after(texts, index + 1, flag))


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
    """Words that follow *flag*, and such as begin with it (``-cprint(1)``)."""
    for at in range(start, len(texts)):
        if re.fullmatch(flag, texts[at]) and at + 1 < len(texts):
            yield at + 1
            return
        if texts[at][:2] == "-c" and re.fullmatch(flag, "-c") and len(texts[at]) > 2:
            yield at
            return
        if texts[at][:1] != "-" and flag != _COMMAND:
            return  # the program's own file: what follows are its arguments
