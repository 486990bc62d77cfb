"""Pod security standards, from a namespace's label ``pod-security.kubernetes.io/enforce``.

Source: Kubernetes 1.34, pod security standards, every control of both profiles that is not of Windows nodes
alone; wording of the PodSecurity admission plugin.
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
_SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
}
_SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def violations(pod: Object, level: str) -> str:
    """What the standard *level* forbids of the pod, in one line; "" when nothing."""
    spec = pod["spec"]
    kinds = ("initContainers", "containers", "ephemeralContainers")
    containers = [one for kind in kinds for one in spec.get(kind) or ()]
    found = list(_baseline(pod, containers)) if level in {"baseline", "restricted"} else []
    if level == "restricted":
        found += _restricted(spec, containers)
    return ", ".join(found)


def _baseline(pod: Object, containers: list[Object]) -> Iterator[str]:
    spec = pod["spec"]
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"host namespaces ({name}=true)"
    for volume in spec.get("volumes") or ():
        if "hostPath" in volume:
            yield f'hostPath volumes (volume "{volume["name"]}")'
    for name, profile in ((pod.get("metadata") or {}).get("annotations") or {}).items():
        if name.startswith(_APPARMOR) and profile != "runtime/default" and "localhost/" not in profile:
            yield f'forbidden AppArmor profile (annotation "{name}={profile}")'
    shared = spec.get("securityContext") or {}
    yield from _context(shared, "pod")
    for sysctl in shared.get("sysctls") or ():
        if sysctl["name"] not in _SYSCTLS:
            yield f"forbidden sysctls ({sysctl['name']})"
    for one in containers:
        yield from _context(one.get("securityContext") or {}, f'container "{one["name"]}"')
        yield from _container(one)


def _context(context: Object, whose: str) -> Iterator[str]:
    """The controls of a security context that pods and containers share."""
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield f"hostProcess ({whose} must not set securityContext.windowsOptions.hostProcess=true)"
    if (context.get("appArmorProfile") or {}).get("type", "RuntimeDefault") == "Unconfined":
        yield f"forbidden AppArmor profile ({whose} must not be Unconfined)"
    if (context.get("seccompProfile") or {}).get("type") == "Unconfined":
        yield f"seccompProfile ({whose} must not set it to Unconfined)"
    selinux = context.get("seLinuxOptions") or {}
    if selinux.get("type", "") not in _SELINUX or selinux.get("user") or selinux.get("role"):
        yield f"seLinuxOptions ({whose} set forbidden securityContext.seLinuxOptions)"


def _container(one: Object) -> Iterator[str]:
    context, name = one.get("securityContext") or {}, one["name"]
    if context.get("privileged"):
        yield f'privileged (container "{name}" must not set securityContext.privileged=true)'
    added = set((context.get("capabilities") or {}).get("add") or ()) - _MAY_ADD
    if added:
        yield f'non-default capabilities (container "{name}" must not include {sorted(added)})'
    if context.get("procMount") not in (None, "Default"):
        yield f'procMount (container "{name}" must not set it)'
    if any(port.get("hostPort") for port in one.get("ports") or ()):
        yield f'hostPort (container "{name}" uses hostPort)'
    hooks = one.get("lifecycle") or {}
    acts = [one.get(probe) for probe in _PROBES] + [hooks.get("postStart"), hooks.get("preStop")]
    calls = [act[kind] for act in acts if act for kind in ("httpGet", "tcpSocket") if act.get(kind)]
    if any(call.get("host") for call in calls):
        yield f'probe or lifecycle host (container "{name}" uses host)'


def _restricted(spec: Object, containers: list[Object]) -> Iterator[str]:
    shared = spec.get("securityContext") or {}
    for volume in spec.get("volumes") or ():
        kinds = volume.keys() - {"name"} - _VOLUMES - {"hostPath"}
        if kinds:
            yield f'restricted volume types (volume "{volume["name"]}" uses {", ".join(sorted(kinds))})'
    if shared.get("runAsUser") == 0:
        yield "runAsUser=0 (pod must not set runAsUser=0)"
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
