"""GPU names: the catalog's canonical names, and the names that other tools and vendors use."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from envscaler_airflow.local_files import read_table

_ROWS = read_table(Path(__file__).with_name("gpu_names.csv"))
MEMORY_GB: dict[str, float] = {row["name"]: float(row["memory_gb"]) for row in _ROWS}
"""Nominal memory of one GPU in GB, by canonical name. Source: the first lines of the table."""

_SIZES: dict[str, tuple[str, ...]] = {
    "A100": ("A100", "A100-80GB"),
    "V100": ("V100", "V100-32GB"),
    "H100": ("H100", "H100-NVL"),
}
"""Models sold with several memory sizes, smallest first."""

_EITHER_SIZE = frozenset({"nvidia-a100"})
"""Aliases that name a model without its size."""

_ALIASES = {alias: row["name"] for row in _ROWS for alias in row["aliases"].split()}
_BY_LOWER = {name.lower(): name for name in MEMORY_GB} | _ALIASES
_BY_BARE = {re.sub(r"[^a-z0-9]", "", name): found for name, found in _BY_LOWER.items()}
"""The aliases without word separators: ``rtx4090`` for ``RTX 4090``."""
_PREFIX = re.compile(r"(nvidia-)?(tesla-|geforce-)?(amd-)?(instinct-)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}\Z")
_SHARE = re.compile(
    r"(?P<gpu>.+?)-(?P<share>(?:MIG-\d+g\.\d+gb(?:\.[a-z.]+)?|[SDTQC]PX)(?:-shared)?|shared)\Z", re.IGNORECASE
)
"""Names of parts of a GPU: ``T4-shared``, ``A100-MIG-1g.5gb``, ``MI300X-CPX``.

Source: NVIDIA Multi-Instance GPU user guide (profiles); AMD, compute partitioning of the MI300 series.
"""
_OF_AMD = re.compile(r"MI\d|Radeon|AMD\b", re.IGNORECASE)
_OF_INTEL = re.compile(r"Intel\b", re.IGNORECASE)
_SUFFIXED = re.compile(r"(s|d|x|g|e|ti|super|max-?q|laptop|nvl|sxm[0-9]?|pcie|hbm[0-9]e?)\Z")
"""Suffixes with which vendors name variants of a model. Source: NVIDIA's and AMD's product lists."""
_OTHER_MODELS = frozenset({"gb200", "gb300", "mi300a", "mi325a", "l40g"})
"""Models whose names differ from one in the catalog by a letter. Source: the vendors' datasheets."""


def canonical(name: str) -> str | None:
    """Canonical name of *name*, ignoring case and vendor; None when it is not in the catalog."""
    key = _key(name)
    return _BY_LOWER.get(key) or _BY_LOWER.get(_less_vendor(key)) or _BY_BARE.get(_bare(_less_vendor(key)))


def nearest(name: str) -> str | None:
    """The catalog's name with the most similar spelling; None when none is close."""
    near = difflib.get_close_matches(_less_vendor(_key(name)), _BY_LOWER, n=1, cutoff=0.8)
    return _BY_LOWER[near[0]] if near else None


def _key(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def _less_vendor(key: str) -> str:
    return _PREFIX.sub("", key, count=1).removesuffix("-generation")


def _bare(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key)


def vendor_of(name: str) -> str:
    """``nvidia``, ``amd`` or ``intel``, by a GPU's canonical name."""
    if _OF_AMD.match(name):
        return "amd"
    return "intel" if _OF_INTEL.match(name) else "nvidia"


def is_share(name: str) -> bool:
    """True for the name of a part of a GPU: a share or a partition."""
    return _SHARE.match(name) is not None


def resolve(name: str, memory_gb: float | None = None) -> tuple[str, ...]:
    """Canonical names that *name* can mean, each with at least *memory_gb*.

    ``nvidia-a100`` names a model with two sizes: both match, and planning assumes 40 GB unless *memory_gb* is
    larger. A name of one size with a larger *memory_gb* means the larger model. For a part of a GPU,
    *memory_gb* is the part's memory, which its name does not give.

    Raises:
        ValueError: The name is misspelt, or no size of the model has that much memory.
    """
    part = _SHARE.match(name.strip())
    if part is not None:
        return tuple(f"{gpu}-{part['share']}" for gpu in resolve(part["gpu"]))
    found = canonical(name)
    if found is None:
        return (_unknown(name),)
    sizes = _SIZES.get(found, (found,))
    if memory_gb is None:
        return sizes if name.strip().lower() in _EITHER_SIZE else (found,)
    if name.strip().lower() not in _EITHER_SIZE and MEMORY_GB[found] >= memory_gb:
        return (found,)
    fitting = tuple(size for size in sizes if MEMORY_GB[size] >= memory_gb)
    if not fitting:
        most = MEMORY_GB[sizes[-1]]
        raise ValueError(f"{name} has {most:g} GB at most; write memory: {most:g}GB, or another type")
    return fitting


def _unknown(name: str) -> str:
    """Keep a name that is not in the catalog, without vendor and spaces, unless it looks misspelt.

    A different number is another model (``RTX 4080``, ``H20``), and so is a vendor's suffix (``V100S``).
    Other letters around the same numbers are a misspelling (``A100-80G``).
    """
    key = _less_vendor(_key(name))
    begin = _PREFIX.match(_key(name))
    written = name.strip()[begin.end() if begin else 0 :][: len(key)]
    kept = written.replace(" ", "")
    if not _NAME.match(kept):
        raise ValueError(f"{name!r:.60} is not a GPU name; write one of the catalog, such as A100-80GB")
    near = nearest(name)
    if near is not None and _is_misspelt(_bare(key), near):
        raise ValueError(f"GPU {name!r:.60} is not known; write {near}")
    return kept


def _is_misspelt(bare: str, near: str) -> bool:
    known = _bare(near.lower())
    if re.findall(r"[0-9]+", bare) != re.findall(r"[0-9]+", known) or bare in _OTHER_MODELS:
        return False
    return not (bare.startswith(known) and _SUFFIXED.match(bare[len(known) :]))
