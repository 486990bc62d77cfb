"""Attempts as Indexed Jobs of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends import BackendType, ShellOption

if TYPE_CHECKING:
    from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
    from envscaler_airflow.clouds import Access
    from envscaler_airflow.envspec.models import EnvSpec


def _create(settings: Mapping[str, Any], access: Access | None) -> KubernetesBackend:
    """The session of *access* is an ``ApiClient``, as the hook of the cncf.kubernetes provider makes it."""
    from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend  # noqa: PLC0415  # only to open it

    return KubernetesBackend(api_client=None if access is None else access.session, **settings)


def _warnings(spec: EnvSpec) -> list[str]:
    from envscaler_airflow.backends.kubernetes.missing import speedup_warnings  # noqa: PLC0415  # only to check

    return speedup_warnings(spec)


def _missing(spec: EnvSpec, _store_url: str | None) -> list[str]:
    from envscaler_airflow.backends.kubernetes.missing import missing_on_cluster  # noqa: PLC0415  # only to check

    return missing_on_cluster(spec)


BACKEND = BackendType(
    name="kubernetes",
    create=_create,
    conn_type="kubernetes",
    shell_options=(
        ShellOption(("--cluster",), "context", "Context of the kubeconfig.", "CONTEXT"),
        ShellOption(("--kubeconfig",), "kubeconfig", "Path of another kubeconfig.", "PATH"),
        ShellOption(
            ("-n", "--namespace"),
            "namespace",
            "Namespace for all created objects.",
            variable="ENVSCALER_NAMESPACE",
        ),
        ShellOption(
            ("--sidecar-image",),
            "sidecar_image",
            "The sidecar image, of `envscaler images build-sidecar`.",
            variable="ENVSCALER_SIDECAR_IMAGE",
        ),
        ShellOption(
            ("--image",),
            "image",
            "Image of the stage, instead of the spec's base image.",
            variable="ENVSCALER_IMAGE",
        ),
        ShellOption((), "image_repository", variable="ENVSCALER_IMAGE_REPOSITORY"),
    ),
    mounted_secrets=frozenset({"secret"}),
    shares_nodes=True,
    warnings=_warnings,
    missing=_missing,
)
