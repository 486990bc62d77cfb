"""Field types of the models: each parses one text and reports what to write if it is invalid."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from envscaler_agent.protocol import is_safe_name
from envscaler_airflow.envspec.quantities import (
    cpu_cores,
    duration_s,
    duration_text,
    gpu_memory_gb,
    memory_bytes,
)

MAX_LINE = 2048
"""Longest one-line text, characters. Chosen: the longest URL that browsers agree on."""
MAX_TEXT = 65536
"""Longest text of several lines. Chosen: half of Linux' bound on one argument."""


def fault(text: str, *, at: str = "") -> PydanticCustomError:
    """Create a fault for a model's validator, at its field *at* (``requests.cpu``)."""
    return PydanticCustomError("spec", "{text}", {"text": text, "at": at})


def _line(text: str) -> str:
    _utf8(text)
    if any(unicodedata.category(char) in ("Cc", "Zl", "Zp") for char in text):
        raise ValueError(
            f"{ascii(text)[:60]} has a line break or control character; write one line of plain text"
        )
    return text


def _text(text: str) -> str:
    _utf8(text)
    if any(unicodedata.category(char) == "Cc" and char not in "\n\t" for char in text):
        raise ValueError("has a control character; write plain text")
    return text


def _utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has a lone surrogate, which is not a character; write plain text") from None


def _matching(pattern: str, what: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"{text!r:.80} is not {what}")
        return text

    return check


def _matched(pattern: str, what: str, *, example: str, max_length: int = 253) -> Any:
    """A text that *pattern* must match completely."""
    bound = StringConstraints(min_length=1, max_length=max_length)
    return Annotated[str, bound, AfterValidator(_matching(pattern, what)), Field(examples=[example])]


def _safe_name(text: str) -> str:
    if not is_safe_name(text):
        raise ValueError(
            f"{text!r:.80} is not a valid name; write letters, digits, '-', '_' and '.', such as model"
        )
    return text


def _scalar_text(value: Any) -> Any:
    """``4`` and ``false`` as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else value


def _quantity(read: Callable[[Any], Any]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        read(value)
        return value.strip() if isinstance(value, str) else f"{value:.9f}".rstrip("0").rstrip(".")

    return check


def _duration(value: Any) -> str:
    return duration_text(duration_s(value))


def _absolute(text: str) -> str:
    if not text.startswith("/") or text == "/":
        raise ValueError(f"{text!r:.80} is not an absolute path; write one such as /output/model")
    if any(part in ("", ".", "..") for part in text.rstrip("/").split("/")[1:]):
        raise ValueError(f"{text!r:.80} has an empty, '.' or '..' part; write the plain absolute path")
    if ":" in text:
        raise ValueError(
            f"{text!r:.80} has a ':', which container programs take for a separator; leave it out"
        )
    if text.split("/")[1] in ("proc", "sys", "dev"):
        raise ValueError(f"{text!r:.80} belongs to the system; write a path such as /data")
    return text.rstrip("/")


def _local(text: str) -> str:
    if text.startswith("~") or "://" in text or "\\" in text:
        raise ValueError(f"{text!r:.80} is not a local path; write one relative to this file, such as .")
    return text


Line = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LINE), AfterValidator(_line)]
"""One line of text."""
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT), AfterValidator(_text)]
"""Text of several lines."""
SafeName = Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(_safe_name)]
"""A name that is safe as a file and resource name."""
Argument = Annotated[
    str, BeforeValidator(_scalar_text, json_schema_input_type=str | int | float | bool),
    StringConstraints(max_length=MAX_TEXT), AfterValidator(_text),
]  # fmt: skip
"""An argument or a variable's value; scalars keep their source text."""
Cpu = Annotated[
    str,
    BeforeValidator(_quantity(cpu_cores), json_schema_input_type=str | int | float),
    Field(examples=["8", "500m"]),
]
Memory = Annotated[str, BeforeValidator(_quantity(memory_bytes)), Field(examples=["32Gi", "512Mi"])]
GpuMemory = Annotated[
    str,
    BeforeValidator(_quantity(gpu_memory_gb), json_schema_input_type=str | int | float),
    Field(examples=["80GB"]),
]
Duration = Annotated[str, BeforeValidator(_duration), Field(examples=["10m", "1h30m"])]
AbsolutePath = Annotated[Line, AfterValidator(_absolute), Field(examples=["/output/model"])]
LocalPath = Annotated[Line, AfterValidator(_local), Field(examples=["."])]
Count = Annotated[int, Field(strict=True, ge=1, le=100_000)]
"""An integer, at least 1."""
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e12, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, le=1e12, allow_inf_nan=False)]
Word = _matched(
    r"[A-Za-z0-9][A-Za-z0-9._-]*", "a plain word; write letters, digits, '.', '_' and '-'", example="aws"
)
PolicyName = _matched(
    r"[a-z][a-z0-9]*(-[a-z0-9]+)*",
    "a policy name; write one such as cost-to-finish",
    example="cost-to-finish",
)
MetricName = _matched(
    r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*",
    "a metric; write one such as gpu_utilization",
    example="gpu_utilization",
)
VariableName = _matched(
    r"[A-Za-z_][A-Za-z0-9_]*",
    "a variable name; write letters, digits and '_', such as HF_HOME",
    example="HF_HOME",
)
ImageName = _matched(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*)*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?",
    "an image name; write one such as nvidia/cuda:11.8.0-runtime-ubuntu22.04",
    example="python:3.11-slim",
    max_length=512,
)
PackageName = _matched(
    r"[A-Za-z0-9][A-Za-z0-9.+:~_-]*(=[A-Za-z0-9.+:~_*-]+)?",
    "a package name; write one such as git-lfs",
    example="git",
)
RequirementText = _matched(
    r"[A-Za-z0-9][ -~]*",
    "a requirement; write one such as torch==2.1.0",
    example="torch==2.1.0",
    max_length=1024,
)
PythonVersion = _matched(
    r"3\.[0-9]{1,2}(\.[0-9]{1,2})?", 'a Python version; write "3.10" in quotes', example="3.10"
)
WebUrl = _matched(
    r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~!$&()*+,;=:@%/-]*)?(\?[A-Za-z0-9._~!$&()*+,;=:@%/?-]*)?",
    "a web address; write one such as https://wheels.example.com/simple",
    example="https://wheels.example.com/simple",
    max_length=MAX_LINE,
)
