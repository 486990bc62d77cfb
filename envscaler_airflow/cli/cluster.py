"""Which cluster a command speaks to: options that every command on Kubernetes shares."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import yaml

from envscaler_airflow.backends.kubernetes import KubernetesBackend
from envscaler_airflow.errors import SpecError

_F = TypeVar("_F", bound=Callable[..., Any])

_ENVIRONMENT = {
    "agent_image": "ENVSCALER_AGENT_IMAGE",
    "image": "ENVSCALER_IMAGE",
    "image_repository": "ENVSCALER_IMAGE_REPOSITORY",
    "namespace": "ENVSCALER_NAMESPACE",
}


def cluster_options(command: _F) -> _F:
    """Add ``--cluster``, ``--kubeconfig``, ``--namespace`` and ``--config``; the command gets ``backend``."""

    @click.option("--cluster", "context", metavar="CONTEXT", help="Context of the kubeconfig.")
    @click.option("--kubeconfig", type=click.Path(path_type=Path), help="Another kubeconfig.")
    @click.option("-n", "--namespace", help="Namespace of everything that is made.")
    @click.option(
        "--config", type=click.Path(path_type=Path), help="YAML with more settings, such as cluster_prices."
    )
    @click.option("--agent-image", help="Image with the courier and the wrapper.")
    @click.option("--image", help="Image of the stage, in place of the spec's base image.")
    @functools.wraps(command)
    def connected(*args: Any, config: Path | None, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in ("namespace", "agent_image", "image")}
        where = {"context": kwargs.pop("context"), "kubeconfig": _text(kwargs.pop("kubeconfig"))}
        backend = KubernetesBackend(**where, **settings_of(config, given))
        return command(*args, backend=backend, **kwargs)

    return cast("_F", connected)


def settings_of(config: Path | None, given: dict[str, str | None]) -> dict[str, Any]:
    """Settings of a file, then of the environment, then as *given*: the later counts.

    Raises:
        SpecError: The file cannot be read.
    """
    found: dict[str, Any] = {}
    if config is not None:
        try:
            body = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
            raise SpecError(f"{config}: cannot be read: {err}") from err
        if not isinstance(body, dict):
            raise SpecError(f"{config}: is no mapping; write namespace: training")
        found |= body
    found |= {name: os.environ[key] for name, key in _ENVIRONMENT.items() if os.environ.get(key)}
    return found | {name: value for name, value in given.items() if value is not None}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
