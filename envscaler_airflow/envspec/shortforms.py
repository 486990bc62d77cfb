"""Convert forms that users know from other tools to the spec's own form before documents are merged.

SkyPilot's ``accelerators``, ``cpus``, ``memory``, ``any_of``, ``ordered``, ``use_spot``, ``infra``,
``disk_size`` and ``disk_tier``, dstack's ``gpu`` and ranges, directly under ``resources``; a map for
``env``; text for ``entrypoint``. Nodes keep their places, so that later faults name what the user wrote.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from envscaler_airflow.envspec.documents import Faults, Node, node_of

_SHELL = re.compile(r"[|&;<>`]|\$\(")
_EXPRESSION = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_COUNT = re.compile(r"[0-9]{1,6}\Z")
_GPU_SIZE = re.compile(r"[0-9.]+ ?(GB|Gi|GiB|G)(\+|\.\.([0-9.]+ ?(GB|Gi|GiB|G))?)?\Z")
_HERE = ("cpus", "cpu", "memory", "gpu", "accelerators", "infra", "use_spot")


def normalise(document: Node, faults: Faults) -> Node:
    """Convert *document* and its target overlays to the spec's own form."""
    return _Normaliser(faults).document(document)


def split_commands(document: Node, faults: Faults) -> Node:
    """Split each ``entrypoint`` of *document* that is text into a list of words.

    This happens before templates are rendered, so a parameter's value always stays one word.
    """
    entries = dict(document.value)
    if "entrypoint" in entries and isinstance(entries["entrypoint"].value, str):
        entries["entrypoint"] = _split(entries["entrypoint"], faults)
    targets = entries.get("targets")
    if targets is not None and targets.is_map:
        overlays = {
            name: split_commands(item, faults) if item.is_map else item
            for name, item in targets.value.items()
        }
        entries["targets"] = targets.with_value(overlays)
    return document.with_value(entries)


def _split(node: Node, faults: Faults) -> Node:
    if node.is_broken:
        return node
    expressions = _EXPRESSION.findall(node.value)
    text = _EXPRESSION.sub("\ue000", node.value.replace("\ue000", ""))
    if _SHELL.search(text):
        problem = "uses a shell's operators; write [bash, -c, '...'] to run it by a shell"
    else:
        try:
            words = shlex.split(text)
        except ValueError as err:
            problem = f"cannot be split into words ({err}); write a list: [python, train.py]"
        else:
            left = iter(expressions)
            return node_of([re.sub("\ue000", lambda _: next(left), word) for word in words], node)
    node.fault(problem, faults)
    return replace(node, is_broken=True)


class _Normaliser:
    """One pass over one document; unreadable values are faults, and are dropped or marked broken."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def fault(self, node: Node, text: str) -> Node:
        node.fault(text, self.faults)
        return replace(node, is_broken=True)

    def document(self, document: Node) -> Node:
        entries = dict(document.value)
        steps: dict[str, Callable[[Node], Node]] = {
            "env": self.env,
            "entrypoint": self.entrypoint,
            "runtimes": self.runtimes,
            "targets": self.targets,
        }
        for name, step in steps.items():
            if name in entries and not entries[name].is_broken:
                entries[name] = step(entries[name])
        if "resources" in entries and entries["resources"].is_map:
            resources = self.resources(entries["resources"])
            capacity = resources.get("capacity")
            if capacity is not None:
                self.hoist_capacity(entries, capacity)
                resources = resources.without("capacity")
            entries["resources"] = resources
        return document.with_value(entries)

    def hoist_capacity(self, entries: dict[str, Node], capacity: Node) -> None:
        """Convert ``use_spot`` to the stage's ``capacity``."""
        said = entries.get("capacity")
        if said is not None and said.value not in (None, "auto", capacity.value):
            self.fault(
                capacity, f"says {capacity.value} where capacity says {said.value}; write capacity alone"
            )
            return
        entries["capacity"] = capacity

    def targets(self, node: Node) -> Node:
        if not node.is_map:
            return self.fault(node, "got no map; write targets: {local: {num_nodes: 1}}")
        return node.with_value({name: self.target(item) for name, item in node.value.items()})

    def target(self, node: Node) -> Node:
        if node.value is None:
            return node.with_value({})
        if not node.is_map:
            return self.fault(node, "got no map; write what differs on this target, such as {num_nodes: 1}")
        for name in ("extends", "modules", "targets", "version"):
            if name in node.value:
                self.fault(node.value[name], "cannot differ by target; write it once, outside targets")
        return self.document(node.without("extends", "modules", "targets", "version"))

    def env(self, node: Node) -> Node:
        """Convert a map of names to values to a list of entries; scalars keep their source text."""
        if node.is_map:
            items = [
                node_of({"name": key, "value": _text(item)}, item)
                for key, item in node.value.items()
                if item.value is not None
            ]
            return node.with_value(items)
        if not node.is_list:
            return node
        return node.with_value([self.env_entry(item) for item in node.value])

    def env_entry(self, node: Node) -> Node:
        value = node.get("value")
        return node if value is None else node.with_value({**node.value, "value": _text(value)})

    def entrypoint(self, node: Node) -> Node:
        if node.is_list:
            return node.with_value([_text(item) for item in node.value])
        return node

    def runtimes(self, node: Node) -> Node:
        items = node.value if node.is_list else [node] if node.is_map else None
        if items is None:
            return node
        return node.with_value([
            item.with_value({"type": node_of("python", item, "type"), **item.value}) if item.is_map else item
            for item in items
        ])  # fmt: skip

    def resources(self, node: Node, *, is_alternative: bool = False) -> Node:
        entries = {key: item for key, item in node.value.items() if key not in _HERE}
        requests = (
            dict(entries["requests"].value) if "requests" in entries and entries["requests"].is_map else {}
        )
        self.move_requests(node, requests)
        for name in ("infra", "use_spot", "accelerators"):
            item = node.get(name)
            if item is not None and not item.is_broken:
                getattr(self, f"take_{name}")(item, entries, requests)
        for name in ("cpu", "memory"):
            if name in requests:
                requests[name] = self.at_least(requests[name])
        if "gpu" in requests:
            requests["gpu"] = self.gpu(requests["gpu"])
        limits = entries.get("limits")
        if limits is not None and limits.get("gpu") is not None:
            entries["limits"] = limits.with_value({**limits.value, "gpu": self.gpu(limits.value["gpu"])})
        if requests and (entries.get("requests") is None or entries["requests"].is_map):
            at = entries.get("requests", node_of({}, node, "requests"))
            entries["requests"] = at.with_value(requests)
        self.disk(entries)
        for name in ("any_of", "ordered"):
            if name in entries:
                entries[name] = self.alternatives(entries[name], is_alternative=is_alternative)
        return node.with_value(entries)

    def move_requests(self, node: Node, requests: dict[str, Node]) -> None:
        """Move ``cpus``, ``memory`` and ``gpu`` from ``resources`` to ``requests``."""
        for said, name in (("cpus", "cpu"), ("cpu", "cpu"), ("memory", "memory"), ("gpu", "gpu")):
            item = node.get(said)
            if item is None:
                continue
            if name in requests and requests[name].plain() != item.plain():
                self.fault(item, f"is given twice, also as {requests[name].path}; write one of them")
                continue
            requests[name] = item

    def take_infra(self, node: Node, entries: dict[str, Node], _: dict[str, Node]) -> None:
        """Convert ``aws/us-east-1/us-east-1a``; ``*`` means any."""
        parts = node.value.split("/") if isinstance(node.value, str) else []
        if not 1 <= len(parts) <= 3 or not all(parts):
            self.fault(
                node,
                f"{node.value!r:.60} is not a valid place; write cloud, cloud/region or cloud/region/zone",
            )
            return
        for name, part in zip(("cloud", "region", "zone"), parts, strict=False):
            if part == "*":
                continue
            if name in entries and entries[name].value not in (None, part):
                self.fault(
                    node, f"says {part} where {name} says {entries[name].value!r:.40}; write one of them"
                )
                continue
            entries[name] = node.with_value(part)

    def take_use_spot(self, node: Node, entries: dict[str, Node], _: dict[str, Node]) -> None:
        if node.value is None:
            return
        if not isinstance(node.value, bool):
            self.fault(node, f"{node.value!r:.60} is not a boolean; write use_spot: true or false")
            return
        entries["capacity"] = node.with_value("spot" if node.value else "on-demand")

    def take_accelerators(self, node: Node, entries: dict[str, Node], requests: dict[str, Node]) -> None:
        """Convert ``A100:8``; a list is ordered, a map or set means any of them."""
        if "gpu" in requests:
            self.fault(node, f"is given twice, also as {requests['gpu'].path}; write one of them")
            return
        if node.is_map or node.is_list:
            self.several_accelerators(node, entries, requests)
        elif node.value is not None:
            requests["gpu"] = node

    def several_accelerators(self, node: Node, entries: dict[str, Node], requests: dict[str, Node]) -> None:
        if node.is_map:  # {A100: 8} and the set {A100:8: null}
            gpus = [
                replace(
                    item.with_value(
                        key if item.value is None else {"type": node_of(key, item), "count": item}
                    ),
                    resets=True,
                )
                for key, item in node.value.items()
            ]
        else:
            gpus = list(node.value)
        if len(gpus) == 1:
            requests["gpu"] = gpus[0]
            return
        if "any_of" in entries or "ordered" in entries:
            self.fault(node, "offers a choice beside any_of or ordered; write one of them")
            return
        choices = [node_of({"requests": {"gpu": gpu}}, gpu) for gpu in gpus]
        entries["ordered" if node.is_list else "any_of"] = node.with_value(choices)

    def alternatives(self, node: Node, *, is_alternative: bool) -> Node:
        if is_alternative:
            return self.fault(node, "is a choice within a choice; write all alternatives in one list")
        if not node.is_list:
            return node
        return node.with_value([
            self.resources(item, is_alternative=True) if item.is_map else item for item in node.value
        ])  # fmt: skip

    def at_least(self, node: Node) -> Node:
        """Convert ``4+`` and ``4..`` to 4, because every request is a minimum."""
        if not isinstance(node.value, str):
            return node
        text = node.value.strip()
        if text.endswith("+"):
            return node.with_value(text[:-1])
        low, dots, high = text.partition("..")
        if dots and high:
            return self.fault(
                node, f"{text!r:.60} has an upper bound, which requests have not; write {low:.20}+"
            )
        return node.with_value(low) if dots else node

    def gpu(self, node: Node) -> Node:
        """Convert a count, ``A100:8``, ``A100:80GB:2``, ``24GB`` or a map."""
        if isinstance(node.value, str):
            body = self.gpu_text(node)
        elif isinstance(node.value, int) and not isinstance(node.value, bool):
            body = {"count": node.with_value(node.value)}
        elif node.is_map:
            body = dict(node.value)
        else:
            return node
        if "name" in body and "type" not in body:
            body["type"] = body.pop("name")
        memory = body.get("memory")
        if memory is not None and isinstance(memory.value, str):
            self.split_memory(memory, body)
        if body.get("count") is not None and isinstance(body["count"].value, str):
            body["count"] = self.count(body["count"])
        # A complete GPU in one word replaces the lower value; a map is merged with it.
        return replace(node.with_value(body), resets=node.resets or isinstance(node.value, str))

    def gpu_text(self, node: Node) -> dict[str, Node]:
        body: dict[str, Node] = {}
        for part in node.value.split(":"):
            text = part.strip()
            name = "count" if _COUNT.match(text) else "memory" if _GPU_SIZE.match(text) else "type"
            if name in body or not text:
                self.fault(node, f"{node.value!r:.60} is not a GPU; write A100:8, A100:80GB:2 or 24GB")
                break
            body[name] = node.with_value(int(text) if name == "count" else text)
        return body

    def split_memory(self, node: Node, body: dict[str, Node]) -> None:
        """Split ``24GB..80GB`` into a minimum and a maximum."""
        low, dots, high = node.value.partition("..")
        body["memory"] = node.with_value(low.strip().removesuffix("+"))
        if dots and high.strip():
            body["memory_max"] = node.with_value(high.strip())

    def count(self, node: Node) -> Node:
        text = node.value.strip()
        if _COUNT.match(text):
            return node.with_value(int(text))
        if ".." in text or text.endswith("+"):
            return self.fault(
                node, f"{text!r:.60} is a range; write one count, and num_nodes: 1..4 for a range"
            )
        return node

    def disk(self, entries: dict[str, Node]) -> None:
        """Read a bare ``disk_size`` as GB, as SkyPilot does."""
        size = entries.get("disk_size")
        if size is None:
            return
        if isinstance(size.value, int) and not isinstance(size.value, bool):
            entries["disk_size"] = size.with_value(f"{size.value}Gi")
        elif isinstance(size.value, str):
            text = size.value.strip().removesuffix("+").removesuffix("..")
            entries["disk_size"] = size.with_value(re.sub(r"GB\Z", "Gi", text))


def _text(node: Node) -> Node:
    """The source text of a scalar, such as ``4`` and ``false``."""
    value: Any = node.value
    if value is None or isinstance(value, (str, dict, list)):
        return node
    if node.raw is not None:
        return node.with_value(node.raw.lower() if isinstance(value, bool) else node.raw)
    if isinstance(value, bool):
        return node.with_value("true" if value else "false")
    return node.with_value(str(value))
