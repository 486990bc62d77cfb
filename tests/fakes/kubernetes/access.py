"""Access: tokens, RBAC rules, access reviews."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fakes.kubernetes.errors import ApiError, forbidden, status, unauthorized
from fakes.kubernetes.objects import Object
from fakes.kubernetes.resources import BINDINGS, CLUSTER_BINDINGS, CLUSTER_ROLES, ROLES, Resource
from fakes.kubernetes.store import Store

PUBLIC = ("/version", "/healthz", "/livez", "/readyz")


@dataclass(frozen=True, slots=True)
class User:
    """A caller. `rules` are PolicyRules for all namespaces, in addition to those of roles."""

    name: str
    groups: tuple[str, ...] = ("system:authenticated",)
    rules: tuple[Object, ...] = ()

    @property
    def is_master(self) -> bool:
        """Members of this group may do everything, as in a real cluster."""
        return "system:masters" in self.groups


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))
ADMIN = User("kubernetes-admin", ("system:masters", "system:authenticated"))


@dataclass(frozen=True, slots=True)
class Question:
    """The question whether a user may *verb* this."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


@dataclass(slots=True)
class Access:
    """Tokens and their users."""

    store: Store
    admin_token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    users: dict[str, tuple[User, float | None]] = field(default_factory=dict)
    unready_until: float = 0.0
    is_partly_ready: bool = False

    def __post_init__(self) -> None:
        """Start with the administrator."""
        self.users[self.admin_token] = (ADMIN, None)

    def start(self, unready_s: float, *, partly: bool = False) -> None:
        """Know no roles and bindings for *unready_s*; with *partly* only those of namespaces are missing."""
        self.unready_until = self.store.clock.now() + unready_s
        self.is_partly_ready = partly

    @property
    def is_ready(self) -> bool:
        """Return whether all roles and bindings are known."""
        return self.store.clock.now() >= self.unready_until

    def readiness(self, user: User) -> None:
        """Raise the answer of ``/readyz`` while the server starts."""
        if self.is_ready or (user.is_master and not self.is_partly_ready):
            return
        if self.is_partly_ready:
            message = "[-]informer-sync failed: reason withheld\nreadyz check failed"
            raise ApiError(500, status(500, "InternalError", message, {}))
        why = f'forbidden: User "{user.name}" cannot get path "/readyz"'
        raise ApiError(403, status(403, "Forbidden", why, {}))

    def issue(self, user: User, lifetime_s: float | None = None) -> str:
        """A new token for *user*, valid for *lifetime_s* seconds of the cluster."""
        token = secrets.token_urlsafe(16)
        until = None if lifetime_s is None else self.store.clock.now() + lifetime_s
        self.users[token] = (user, until)
        return token

    def expire(self, token: str) -> None:
        """Refuse *token* (401) from now on."""
        self.users.pop(token, None)

    def who(self, authorization: str | None) -> User:
        """The caller from its Authorization header; raises 401."""
        if not authorization:
            return ANONYMOUS
        scheme, _, token = authorization.partition(" ")
        found = self.users.get(token.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            raise unauthorized()
        user, until = found
        if until is not None and until <= self.store.clock.now():
            raise unauthorized()
        return user

    def allows(self, user: User, question: Question) -> bool:
        """Decide from the group, the user's own rules, and the roles bound to the user."""
        own = question.group == "authorization.k8s.io" and question.resource.startswith("selfsubject")
        if user.is_master:
            return True
        if not self.is_ready and not (self.is_partly_ready and own):
            return False
        if own:
            return True
        return any(_matches(rule, question) for rule in self._rules(user, question.namespace))

    def check(self, user: User, resource: Resource, question: Question) -> None:
        """Raise 403 with the real message if *user* is not allowed to."""
        if self.allows(user, question):
            return
        where = f'in the namespace "{question.namespace}"' if question.namespace else "at the cluster scope"
        why = (
            f'User "{user.name}" cannot {question.verb} resource "{question.resource}" in API group '
            f'"{question.group}" {where}'
        )
        raise forbidden(resource, question.name, why)

    def review(self, user: User, body: Object) -> Object:
        """Answer a SelfSubjectAccessReview."""
        asked = (body.get("spec") or {}).get("resourceAttributes") or {}
        resource = asked.get("resource", "")
        if asked.get("subresource"):
            resource += f"/{asked['subresource']}"
        question = Question(
            asked.get("verb", ""),
            asked.get("group", ""),
            resource,
            asked.get("namespace", ""),
            asked.get("name", ""),
        )
        return {**body, "status": {"allowed": self.allows(user, question)}}

    def rules_review(self, user: User, body: Object) -> Object:
        """Answer a SelfSubjectRulesReview."""
        namespace = (body.get("spec") or {}).get("namespace", "default")
        every: list[Object] = (
            [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}] if user.is_master else []
        )
        rules = every + list(self._rules(user, namespace))
        status = {"resourceRules": rules, "nonResourceRules": [], "incomplete": False}
        return {**body, "status": status}

    def _rules(self, user: User, namespace: str) -> Iterator[Object]:
        yield from user.rules
        for binding in self.store.all(CLUSTER_BINDINGS):
            if _binds(binding, user):
                yield from self._role(binding["roleRef"], "")
        for binding in self.store.all(BINDINGS, namespace) if namespace else ():
            if _binds(binding, user):
                yield from self._role(binding["roleRef"], namespace)

    def _role(self, reference: Object, namespace: str) -> Iterable[Object]:
        clusterwide = reference["kind"] == "ClusterRole"
        resource = CLUSTER_ROLES if clusterwide else ROLES
        role = self.store.get(resource, "" if clusterwide else namespace, reference["name"])
        return (role or {}).get("rules") or ()


def account_user(namespace: str, name: str) -> User:
    """The user of a ServiceAccount's token."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated")
    return User(f"system:serviceaccount:{namespace}:{name}", groups)


def _binds(binding: Object, user: User) -> bool:
    return any(_is(subject, user, binding) for subject in binding.get("subjects") or ())


def _is(subject: Object, user: User, binding: Object) -> bool:
    if subject["kind"] == "ServiceAccount":
        namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
        return user.name == f"system:serviceaccount:{namespace}:{subject['name']}"
    if subject["kind"] == "Group":
        return subject["name"] in user.groups
    return subject["name"] == user.name


def _matches(rule: Object, question: Question) -> bool:
    def has(field_name: str, value: str) -> bool:
        allowed: list[Any] = rule.get(field_name) or []
        return "*" in allowed or value in allowed

    if not (has("verbs", question.verb) and has("apiGroups", question.group)):
        return False
    if not has("resources", question.resource):
        return False
    names = rule.get("resourceNames")
    return not names or question.name in names
