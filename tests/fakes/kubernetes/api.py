"""The API server's handling of a request, before and after HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fakes.kubernetes import deletion, errors, schema
from fakes.kubernetes.admission import admit
from fakes.kubernetes.defaults import default_any, default_job, default_pod, named, node_defaults
from fakes.kubernetes.objects import Object, clone
from fakes.kubernetes.patches import patch
from fakes.kubernetes.resizing import resize
from fakes.kubernetes.resources import (
    ACCOUNTS,
    CONFIG_MAPS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    Resource,
)
from fakes.kubernetes.store import Store, born
from fakes.kubernetes.validation import validate, validate_job_update, validate_pod_update

WITH_STATUS = {"Pod", "Job", "Node", "Namespace", "ResourceQuota", "PersistentVolumeClaim", "Service"}


@dataclass(slots=True)
class Options:
    """Query parameters of the verbs that write."""

    dry_run: bool = False
    strict: bool = False
    field_manager: str = ""
    warnings: list[str] = field(default_factory=list)


class Api:
    """Create, update, patch and delete with defaults, validation and admission."""

    def __init__(self, store: Store) -> None:
        """Use *store*."""
        self.store = store
        self.denied = ""
        """Why a validating webhook denies every new pod; "" admits them."""

    def read(self, resource: Resource, namespace: str, name: str) -> Object:
        """The object; raises 404."""
        item = self.store.get(resource, namespace, name)
        if item is None:
            raise errors.not_found(resource, name)
        return item

    def create(
        self, resource: Resource, namespace: str, body: Object, options: Options | None = None
    ) -> Object:
        """Add an object; raises 4xx."""
        options = options or Options()
        item = clone(body)
        self._check_shape(resource, namespace, item, options)
        meta = item["metadata"]
        if resource.namespaced:
            meta["namespace"] = namespace
            if self.store.get(NAMESPACES, "", namespace) is None:
                raise errors.not_found(NAMESPACES, namespace)
        named(meta)
        if not meta.get("name"):
            missing = errors.cause("metadata.name", "FieldValueRequired", "name or generateName is required")
            raise errors.invalid(resource.full_kind, "", [missing])
        born(resource, item, self.store.clock.now())
        self._complete(resource, item)
        if self.store.get(resource, namespace if resource.namespaced else "", meta["name"]) is not None:
            raise errors.exists(resource, meta["name"])
        validate(resource, item)
        self._refuse_in_dying(resource, namespace, meta["name"])
        admit(self.store, resource, item, namespace)
        if self.denied and resource is PODS:
            raise errors.denied(self.denied)
        if options.dry_run:
            return item
        made = self.store.create(resource, item)
        if resource is NAMESPACES:
            self._furnish(meta["name"])
        return made

    def _refuse_in_dying(self, resource: Resource, namespace: str, name: str) -> None:
        home = self.store.get(NAMESPACES, "", namespace) if resource.namespaced else None
        if home is not None and home["status"].get("phase") == "Terminating":
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            text = f"namespace {namespace} is being terminated"
            causes = [{"reason": "NamespaceTerminating", "message": text, "field": "metadata.namespace"}]
            raise errors.forbidden(resource, name, why, causes)

    def _check_shape(self, resource: Resource, namespace: str, item: Object, options: Options) -> None:
        kind = item.get("kind") or resource.kind
        if kind != resource.kind:
            version = str(item.get("apiVersion", resource.api_version)).rpartition("/")[2]
            internal = f"{'core' if not resource.group else resource.group}.{resource.kind}"
            raise errors.bad_request(
                f'{kind} in version "{version}" cannot be handled as a {resource.kind}: '
                f"converting ({version}.{kind}) to ({internal}): unknown conversion"
            )
        if not isinstance(item.get("metadata"), dict):
            item["metadata"] = {}
        if resource.namespaced and item["metadata"].get("namespace") not in {None, "", namespace}:
            raise errors.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        unknown = schema.check(resource, item)
        if unknown and options.strict:
            listed = ", ".join(f'unknown field "{name}"' for name in unknown)
            raise errors.bad_request(
                f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
                f"strict decoding error: {listed}"
            )
        options.warnings += [f'299 - "unknown field \\"{name}\\""' for name in unknown]

    def _complete(self, resource: Resource, item: Object) -> None:
        now = self.store.clock.now()
        if "spec" not in item and resource in {PODS, JOBS}:
            item["spec"] = {}
        if resource is PODS:
            default_pod(item, now)
        elif resource is JOBS:
            default_job(item)
        elif resource is NODES:
            node_defaults(item)
        else:
            default_any(item, now)

    def _furnish(self, namespace: str) -> None:
        """The objects that controllers put into every new namespace."""
        account: Object = {"metadata": {"name": "default", "namespace": namespace}}
        self.store.create(ACCOUNTS, account)
        bundle: Object = {
            "metadata": {"name": "kube-root-ca.crt", "namespace": namespace},
            "data": {"ca.crt": ""},
        }
        self.store.create(CONFIG_MAPS, bundle)

    def update(
        self, resource: Resource, namespace: str, name: str, body: Object, subresource: str = "",
        options: Options | None = None,
    ) -> Object:  # fmt: skip
        """PUT; raises 409 for a stale resourceVersion."""
        old = self.read(resource, namespace, name)
        item = clone(body)
        self._check_shape(resource, namespace, item, options or Options())
        return self._replace(resource, old, item, subresource, options or Options())

    def patch(
        self, resource: Resource, namespace: str, name: str, media_type: str, body: Any,
        subresource: str = "", options: Options | None = None,
    ) -> Object:  # fmt: skip
        """PATCH; a resourceVersion in the patch is a precondition."""
        old = self.read(resource, namespace, name)
        fresh = patch(old, media_type, body)
        before, after = old["metadata"]["uid"], (fresh.get("metadata") or {}).get("uid")
        if after not in {None, "", before}:  # in a PUT it is a precondition, in a PATCH a field
            fault = errors.cause("metadata.uid", "FieldValueInvalid", "field is immutable", f'"{after}"')
            raise errors.invalid(resource.full_kind, name, [fault])
        return self._replace(resource, old, fresh, subresource, options or Options())

    def apply(self, resource: Resource, namespace: str, name: str, body: Object, options: Options) -> Object:
        """Server-side apply without tracking of field owners: creates, or merges."""
        if not options.field_manager:
            missing = errors.cause("fieldManager", "FieldValueRequired", "is required for apply patch")
            raise errors.invalid("PatchOptions.meta.k8s.io", "", [missing])
        if self.store.get(resource, namespace if resource.namespaced else "", name) is None:
            return self.create(resource, namespace, body, options)
        return self.patch(resource, namespace, name, "application/apply-patch+yaml", body, options=options)

    def _replace(
        self, resource: Resource, old: Object, fresh: Object, subresource: str, options: Options
    ) -> Object:
        name = old["metadata"]["name"]
        wanted = fresh.get("metadata", {}).get("name")
        if wanted not in {None, "", name}:
            raise errors.bad_request(
                f"the name of the object ({wanted}) does not match the name on the URL ({name})"
            )
        self._check_version(resource, old, fresh)
        item = _merged(resource, old, fresh, subresource)
        if subresource == "resize":
            resize(self.store, old, item)
        elif subresource != "status" and resource is JOBS:
            validate_job_update(old, item)
        elif subresource != "status" and resource is PODS:
            validate_pod_update(old, item)
        if options.dry_run:
            return item
        return self.store.write(resource, item)

    def _check_version(self, resource: Resource, old: Object, fresh: Object) -> None:
        before, after = old["metadata"], fresh.get("metadata", {})
        if after.get("resourceVersion") not in {None, "", before["resourceVersion"]}:
            raise errors.stale(resource, before["name"])
        if after.get("uid") not in {None, "", before["uid"]}:
            raise errors.precondition(resource, before["name"], "UID", after["uid"], before["uid"])

    def delete(self, resource: Resource, namespace: str, name: str, options: Object) -> Object:
        """DELETE; the answer is the object (if it stays for a while) or a Status."""
        item = self.read(resource, namespace, name)
        deletion.check_options(resource, item, options)
        if options.get("dryRun"):
            return deletion.success(resource, item)
        return deletion.delete(self.store, resource, item, options)


def _merged(resource: Resource, old: Object, fresh: Object, subresource: str) -> Object:
    """The fields that an update changes: status only through its subresource, the rest only without."""
    item = clone(old)
    if subresource == "status":
        item["status"] = clone(fresh.get("status", {}))
        _take_meta(item, fresh, ("labels", "annotations", "finalizers"))
        return item
    if subresource == "resize":
        item["spec"] = clone(fresh["spec"])
        return item
    kept = clone(old["metadata"])
    body = {key: clone(value) for key, value in fresh.items() if key not in {"metadata", "status"}}
    has_status = resource.kind in WITH_STATUS
    status = old.get("status") if has_status else fresh.get("status")
    item = {"kind": old["kind"], "apiVersion": old["apiVersion"], "metadata": kept, **body}
    item["kind"], item["apiVersion"] = old["kind"], old["apiVersion"]
    if status is not None:
        item["status"] = clone(status)
    _take_meta(item, fresh, ("labels", "annotations", "finalizers", "ownerReferences"))
    return item


def _take_meta(item: Object, fresh: Object, fields: tuple[str, ...]) -> None:
    for name in fields:
        value = fresh.get("metadata", {}).get(name)
        if value:
            item["metadata"][name] = clone(value)
        else:
            item["metadata"].pop(name, None)
