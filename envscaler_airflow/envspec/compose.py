"""Composition: merge a spec with the documents that it extends and the modules that it uses.

Order, lowest precedence first: the documents in ``extends`` from left to right, each above its own bases;
``modules`` from left to right; the document itself; the overlay of the selected target.

Rules, by the kind of the two values:

====================  =========================================================================
map over map          entries merge
list over list        ``system_packages``, ``packages``, ``extra_index_urls``, ``channels``:
                      union, first appearance first. ``env``, ``volumes``, ``runtimes``: by name
                      (runtimes by type); of the same name, env entries replace and others merge.
                      Every other list replaces.
scalar over anything  replaces
``null``              removes
====================  =========================================================================

The rules are associative: grouping does not matter, order does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from envscaler_airflow.envspec.documents import Faults, Node, read_file
from envscaler_airflow.errors import SpecError

Registry = Callable[[str], "str | os.PathLike[str]"]
"""Turns ``registry://team/name@1.2`` into the path of a local file; raises SpecError if there is none."""

MAX_FILES = 64
"""Largest number of documents in one spec. Chosen: more is a loop that changes its name."""
UNION_LISTS = frozenset({"system_packages", "packages", "extra_index_urls", "channels"})
NAMED_LISTS = {"env": "name", "volumes": "name", "runtimes": "type"}
"""Lists that are merged by this field of their items."""

_REGISTRY = re.compile(
    r"registry://[a-z0-9][a-z0-9_-]*(/[a-z0-9][a-z0-9._-]*){1,3}"
    r"(@[0-9A-Za-z^~><=*][0-9A-Za-z.,^~><=*+ -]{0,60})?\Z"
)


@dataclass(slots=True)
class Composition:
    """The documents of one spec, lowest first.

    Attributes:
        documents: Each without ``extends`` and ``modules``.
        folders: Displayed file name to the folder that contains the file.
    """

    documents: list[Node] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)


def gather(path: str | os.PathLike[str], faults: Faults, *, registry: Registry | None = None) -> Composition:
    """Read *path* and every document that it builds on."""
    found = Composition()
    gatherer = _Gatherer(found, faults, registry)
    if str(path).startswith("registry:"):
        gatherer.follow_registry(Node(str(path), file=str(path)), ())
    else:
        gatherer.take(Path(path), str(path), root=None, above=())
    return found


@dataclass(slots=True)
class _Gatherer:
    found: Composition
    faults: Faults
    registry: Registry | None
    files: int = 0

    def take(self, path: Path, shown: str, *, root: Path | None, above: tuple[Path, ...]) -> None:
        """Add *path* above its own bases. Its files may not leave the folder *root*."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as err:
            self.faults.add(shown, 0, "", f"cannot be read ({err}); write the path of a spec file")
            return
        document = read_file(real, self.faults, shown_as=shown)
        if document is None:
            return
        folder = real.parent
        self.found.folders[shown] = folder
        for name in ("extends", "modules"):
            for reference in self.references(document, name):
                self.follow(reference, folder, root or folder, (*above, real))
        self.found.documents.append(document.without("extends", "modules"))

    def references(self, document: Node, name: str) -> list[Node]:
        node = document.get(name)
        if node is None or node.value is None:
            return []
        items = node.value if node.is_list else [node]
        kept = []
        for item in items:
            if isinstance(item.value, str) and not item.is_broken:
                kept.append(item)
            else:
                self.fault(
                    item, "is not a valid reference; write ./modules/name.yaml or registry://team/name@1.2"
                )
        return kept

    def fault(self, node: Node, text: str) -> None:
        node.fault(text, self.faults)

    def follow(self, node: Node, folder: Path, root: Path, above: tuple[Path, ...]) -> None:
        self.files += 1
        if self.files > MAX_FILES:
            if self.files == MAX_FILES + 1:
                self.fault(node, f"more than {MAX_FILES} documents; write fewer, larger modules")
            return
        reference: str = node.value
        if reference.startswith("registry:"):
            self.follow_registry(node, above)
            return
        if not _is_plain_file_reference(reference):
            fix = "write a path beside or below this file, such as ./modules/name.yaml, or registry://team/name@1.2"
            self.fault(node, f"{reference!r:.100} is not a valid reference; {fix}")
            return
        path = folder / reference
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as err:
            self.fault(node, f"{reference!r:.100} cannot be read ({err}); write the path of a file")
            return
        if not real.is_relative_to(root):
            self.fault(
                node, f"{reference!r:.100} leads out of the spec's folder; keep modules beside or below it"
            )
            return
        self.descend(node, real, str(Path(node.file).parent / reference), root, above)

    def follow_registry(self, node: Node, above: tuple[Path, ...]) -> None:
        if not _REGISTRY.match(node.value):
            self.fault(
                node, f"{node.value!r:.100} is not a registry reference; write registry://team/name@1.2"
            )
            return
        if self.registry is None:
            fix = "configure one, or name a file such as ./modules/name.yaml"
            self.fault(node, f"{node.value} cannot be found: no registry is configured; {fix}")
            return
        try:
            real = Path(self.registry(node.value)).resolve()
        except SpecError as err:
            self.fault(node, str(err))
            return
        self.descend(node, real, node.value, real.parent, above)

    def descend(self, node: Node, real: Path, shown: str, root: Path, above: tuple[Path, ...]) -> None:
        if real in above:
            chain = " -> ".join(item.name for item in (*above[above.index(real) :], real))
            self.fault(node, f"goes in a circle: {chain}; leave one of them out")
            return
        if not real.is_file():
            self.fault(node, f"{node.value!r:.100} is not a file; write the path of a spec or module")
            return
        self.take(real, shown, root=root, above=above)


def _is_plain_file_reference(reference: str) -> bool:
    if not reference or not reference.isprintable() or len(reference) > 500 or "://" in reference:
        return False
    if "{{" in reference or "\\" in reference or reference.startswith(("/", "~")):
        return False
    return ".." not in reference.split("/")


def merge(below: Node, above: Node, name: str = "") -> Node:
    """Merge *above* over *below*, by the rules at the top of this file. *name* is the field of both."""
    if above.resets:
        return above
    if below.is_map and above.is_map:
        entries = dict(below.value)
        for key, item in above.value.items():
            entries[key] = merge(entries[key], item, key) if key in entries else item
        return replace(above, value=entries, resets=below.resets)
    if below.is_list and above.is_list and name in UNION_LISTS:
        return replace(above, value=_union(below.value, above.value), resets=below.resets)
    if below.is_list and above.is_list and name in NAMED_LISTS:
        return replace(above, value=_merge_named(below.value, above.value, name), resets=below.resets)
    return replace(above, resets=True)


def _union(below: list[Node], above: list[Node]) -> list[Node]:
    seen = [item.plain() for item in below]
    return [*below, *(item for item in above if item.plain() not in seen)]


def _merge_named(below: list[Node], above: list[Node], name: str) -> list[Node]:
    field_name = NAMED_LISTS[name]
    items = list(below)
    places = {_key(item, field_name): index for index, item in enumerate(items)}
    for item in above:
        key = _key(item, field_name)
        place = None if key is None else places.get(key)
        if place is None:
            items.append(item)
        else:
            items[place] = item if name == "env" else merge(items[place], item)
    return items


def _key(item: Node, field_name: str) -> str | None:
    node = item.get(field_name)
    return node.value if node is not None and isinstance(node.value, str) else None


def prune(node: Node) -> Node:
    """Remove the entries of *node* that ``null`` deletes."""
    if node.is_map:
        kept = {
            key: prune(item) for key, item in node.value.items() if item.value is not None or item.is_broken
        }
        return replace(node, value=kept)
    if node.is_list:
        return replace(node, value=[prune(item) for item in node.value])
    return node
