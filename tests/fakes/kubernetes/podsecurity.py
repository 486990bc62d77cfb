"""Pod security standards, from a namespace's label ``pod-security.kubernetes.io/enforce``.

Source: Kubernetes, pod security standards; wording of the PodSecurity admission plugin.
"""

from __future__ import annotations

from collections.abc import Iterator

from fakes.kubernetes.objects import Object

ENFORCE = "pod-security.kubernetes.io/enforce"
_MAY_ADD = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"),
    "secret",
}


def violations(pod: Object, level: str) -> str:
    """What the standard *level* forbids of the pod's spec, in one line; "" when nothing."""
    spec = pod["spec"]
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    found = list(_baseline(spec, containers)) if level in {"baseline", "restricted"} else []
    if level == "restricted":
        found += _restricted(spec, containers)
    return ", ".join(found)


def _baseline(spec: Object, containers: list[Object]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"host namespaces ({name}=true)"
    for volume in spec.get("volumes") or ():
        if "hostPath" in volume:
            yield f'hostPath volumes (volume "{volume["name"]}")'
    for one in containers:
        context = one.get("securityContext") or {}
        if context.get("privileged"):
            yield f'privileged (container "{one["name"]}" must not set securityContext.privileged=true)'
        added = set((context.get("capabilities") or {}).get("add") or ()) - _MAY_ADD
        if added:
            yield f'non-default capabilities (container "{one["name"]}" must not include {sorted(added)})'


def _restricted(spec: Object, containers: list[Object]) -> Iterator[str]:
    shared = spec.get("securityContext") or {}
    for volume in spec.get("volumes") or ():
        kinds = volume.keys() - {"name"} - _VOLUMES - {"hostPath"}
        if kinds:
            yield f'restricted volume types (volume "{volume["name"]}" uses {", ".join(sorted(kinds))})'
    for one in containers:
        context, name = one.get("securityContext") or {}, one["name"]
        capabilities = context.get("capabilities") or {}
        if context.get("allowPrivilegeEscalation") is not False:
            yield f'allowPrivilegeEscalation != false (container "{name}" must set it to false)'
        if "ALL" not in (capabilities.get("drop") or ()) or set(capabilities.get("add") or ()) - {
            "NET_BIND_SERVICE"
        }:
            yield f'unrestricted capabilities (container "{name}" must drop "ALL")'
        if not context.get("runAsNonRoot", shared.get("runAsNonRoot")):
            yield f'runAsNonRoot != true (pod or container "{name}" must set it to true)'
        if context.get("runAsUser", shared.get("runAsUser")) == 0:
            yield f'runAsUser=0 (container "{name}" must not run as root)'
        profile = (context.get("seccompProfile") or shared.get("seccompProfile") or {}).get("type")
        if profile not in {"RuntimeDefault", "Localhost"}:
            yield f'seccompProfile (pod or container "{name}" must set it to "RuntimeDefault" or "Localhost")'
