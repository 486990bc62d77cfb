"""Which container runs which program, and which pods a kubelet refuses."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, replace

from fakes.kubernetes.clock import Clock
from fakes.kubernetes.environment import expand
from fakes.kubernetes.objects import Object
from fakes.kubernetes.programs import Execution, Program, Scripted, infer

Chooser = Callable[[Object, Object], Program | None]


@dataclass(slots=True)
class _Rule:
    program: Program | Chooser
    pod: str
    container: str
    times: int | None


class Scripts:
    """Rules in order; without a matching rule the program is guessed from the command (`programs.infer`)."""

    def __init__(self, clock: Clock) -> None:
        """Start without rules."""
        self._clock = clock
        self._rules: list[_Rule] = []

    def add(self, program: Program | Chooser, pod: str, container: str, times: int | None) -> None:
        """Add a rule before all others."""
        self._rules.insert(0, _Rule(program, pod, container, times))

    def _find(self, pod: Object, container: Object) -> tuple[_Rule, Program] | None:
        for rule in self._rules:
            fits = fnmatch.fnmatchcase(pod["metadata"]["name"], rule.pod)
            if not fits or not fnmatch.fnmatchcase(container["name"], rule.container):
                continue
            program = rule.program if isinstance(rule.program, Program) else rule.program(pod, container)
            if program is not None:
                return rule, program
        return None

    def has(self, pod: Object, container: Object) -> bool:
        """Return whether a rule matches this container."""
        return self._find(pod, container) is not None

    def execution(self, pod: Object, container: Object, role: str, env: dict[str, str]) -> Execution | str:
        """The program of a container, ready to start; a text if it cannot be started."""
        found = self._find(pod, container)
        if found is not None:
            rule, program = found
            if rule.times is not None:
                rule.times -= 1
                if rule.times <= 0:
                    self._rules.remove(rule)
        else:
            argv = [
                expand(part, env)
                for part in [*(container.get("command") or []), *(container.get("args") or [])]
            ]
            program = infer(argv, env)
            if pod["spec"].get("shareProcessNamespace") and program.term == "ignore":
                program = replace(program, term="exit")
            if not argv and role == "init":
                program = Program(seconds=0)
        return program.start_error or Scripted(program, self._clock)


class Rejections:
    """Refusals that a test orders from a kubelet (UnexpectedAdmissionError, for example)."""

    def __init__(self) -> None:
        """Start without refusals."""
        self._ordered: list[tuple[str, str, str, str]] = []

    def add(self, node: str, pod: str, reason: str, message: str) -> None:
        """Refuse the next pod named like *pod* on *node*."""
        self._ordered.append((node, pod, reason, message))

    def take(self, node: str, pod: Object) -> tuple[str, str] | None:
        """Reason and message for this pod, once."""
        for one in self._ordered:
            if fnmatch.fnmatchcase(node, one[0]) and fnmatch.fnmatchcase(pod["metadata"]["name"], one[1]):
                self._ordered.remove(one)
                return one[2], one[3]
        return None
