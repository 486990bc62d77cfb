"""Read an Airflow connection: the address of an HTTP server in every form, an identity at AWS, a secret.

The Amazon provider's hook reads AWS connections: keys, roles, web identity, profiles, endpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from airflow.sdk import BaseHook, Variable
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException, AirflowRuntimeError
from airflow.sdk.log import mask_secret

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.clouds import Access
from envscaler_airflow.envspec.secrets import Reference, parse_reference
from envscaler_airflow.errors import BackendError, SpecError

if TYPE_CHECKING:
    from airflow.sdk import Connection


_SCHEMES = ("http", "https")
_TRUE = frozenset({"true", "yes", "on", "1", ""})
_FALSE = frozenset({"false", "no", "off", "0"})
_TENANT = "X-Scope-OrgID"
"""Header that names a tenant. Source: grafana.com/docs/mimir, "HTTP API", authentication."""


@dataclass(frozen=True, slots=True)
class HttpServer:
    """An HTTP server's address and how to send requests to it.

    Attributes:
        url: Scheme, host, port and path, without user and password.
        auth: User and password for basic authentication.
        headers: Sent with each request.
        verify: False trusts any certificate; text is the path of the certificates to trust.
    """

    url: str
    auth: tuple[str, str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    verify: bool | str = True


def http_server(connection: Any, what: str) -> HttpServer:
    """Return the server that *connection* names.

    The scheme is the host's own (``https://prom.example.org``), else the connection's schema, else its
    type (``https`` of an ``https://`` URI), else http. A schema other than http and https is a path, as
    Airflow reads ``https://host/prometheus``. The port comes after the host, before its path. A password
    without a login is a token. Extras: ``headers``, ``tenant``, ``token``, ``verify``; any other with a
    dash in its name is a header, as for Airflow's HTTP connections.

    Args:
        connection: An Airflow connection.
        what: The server, as named in messages: ``a Prometheus server``.

    Raises:
        SpecError: It names no host, or one that HTTP cannot reach; no message contains the password.
    """
    name = f"connection {connection.conn_id!r}"
    host, schema = str(connection.host or "").strip(), str(connection.schema or "").strip("/ ")
    if not host:
        raise SpecError(f"{name} names no host of {what}")
    if "://" not in host:
        host, schema = f"{_scheme(connection.conn_type, schema)}://{_bracketed(host)}", _path(schema)
    elif schema.lower() in _SCHEMES:
        schema = ""
    parts = _split(host, name, what)
    port = _port(parts, connection.port, name)
    path = "/".join(part for part in (parts.path.strip("/"), schema) if part)
    extra = extra_of(connection)
    auth, headers = _credentials(connection, parts, extra)
    url = f"{parts.scheme}://{_bracketed(parts.hostname or '')}{port}{'/' + path if path else ''}"
    return HttpServer(url, auth, {**headers, **_headers(extra, name)}, extra.get("verify", True))


def server_of_url(url: str, where: str, what: str) -> HttpServer:
    """Return the server of a *url* in a setting.

    Raises:
        SpecError: It is not an HTTP address.
    """
    text = url.strip()
    parts = _split(text if "://" in text else f"http://{text}", where, what)
    port = _port(parts, None, where)
    query = f"?{parts.query}" if parts.query else ""
    auth = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    path = parts.path.rstrip("/")
    return HttpServer(f"{parts.scheme}://{_bracketed(parts.hostname or '')}{port}{path}{query}", auth)


def verify_of(value: object) -> bool | str:
    """Parse ``verify`` of a connection's extra: a boolean, also as the text of a URI's query, or a path.

    Text such as ``false`` is not a path.
    """
    if value is None or isinstance(value, bool):
        return value is not False
    text = str(value).strip()
    if text.lower() in _FALSE:
        return False
    return True if text.lower() in _TRUE else text


def object_of(value: object) -> object:
    """Parse a map in an extra, also given as JSON text in a URI's query; return other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def extra_of(connection: Any) -> dict[str, Any]:
    """Return the extra of *connection* without empty fields, with the texts of a URI's query parsed.

    Raises:
        SpecError: It is not a JSON object.
    """
    name = f"connection {connection.conn_id!r}"
    try:
        extra: object = connection.extra_dejson
    except ValueError as err:
        raise SpecError(f"{name}: its extra is not valid JSON") from err
    if not isinstance(extra, Mapping):
        raise SpecError(f"{name}: its extra is not a JSON object")
    filled = {str(key): value for key, value in extra.items() if value not in (None, "")}
    return {key: verify_of(value) if key == "verify" else object_of(value) for key, value in filled.items()}


def access_of(connection: Any) -> Access:
    """Return the login, key and endpoint of *connection*; extras ``api_key``, ``token`` and ``verify`` too.

    Raises:
        SpecError: Its extra is not a JSON object.
    """
    extra = extra_of(connection)
    return Access(
        login=connection.login,
        secret=extra.get("api_key") or connection.password,
        token=extra.get("token"),
        endpoint_url=extra.get("endpoint_url"),
        verify=verify_of(extra.get("verify")),
    )


def _scheme(conn_type: object, schema: str) -> str:
    kind = str(conn_type or "").lower()
    if kind == "https" or schema.lower() == "https":
        return "https"  # never plain HTTP if one of the two requests TLS
    return "http"


def _path(schema: str) -> str:
    return "" if schema.lower() in _SCHEMES else schema


def _bracketed(host: str) -> str:
    """Return the host in URL form: ``[::1]`` for ``::1``."""
    bare = host.strip("[]")
    return f"[{bare}]" if bare.count(":") > 1 and "/" not in bare and "@" not in bare else host


def _split(url: str, name: str, what: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise SpecError(
            f"{name}: its host is not an address of {what}; write https://host:443/path"
        ) from None
    if parts.scheme.lower() not in _SCHEMES:
        raise SpecError(f"{name}: {parts.scheme!r:.20} is not http or https; write https://host:443/path")
    if not parts.hostname:
        raise SpecError(f"{name} names no host of {what}")
    return parts._replace(scheme=parts.scheme.lower())


def _port(parts: SplitResult, own: object, name: str) -> str:
    if own and parts.port and int(str(own)) != parts.port:
        raise SpecError(f"{name}: its port {own} is not the {parts.port} of its host; write one of them")
    port = parts.port or own
    return f":{port}" if port else ""


def _credentials(
    connection: Any, parts: SplitResult, extra: Mapping[str, Any]
) -> tuple[tuple[str, str] | None, dict[str, str]]:
    login = connection.login or unquote(parts.username or "")
    password = connection.password or unquote(parts.password or "")
    if login:
        return (str(login), str(password)), {}
    token = password or extra.get("token")
    return None, {"Authorization": f"Bearer {token}"} if token else {}


def _headers(extra: Mapping[str, Any], name: str) -> dict[str, str]:
    found = extra.get("headers", {})
    if not isinstance(found, Mapping):
        raise SpecError(f'{name}: headers: is not a map; write {{"{_TENANT}": "team"}}')
    own = {key: value for key, value in extra.items() if "-" in key}
    tenant = {_TENANT: extra["tenant"]} if "tenant" in extra else {}
    return {str(key): str(value) for key, value in {**tenant, **own, **found}.items()}


_UNUSABLE = (AirflowException, AttributeError, ImportError, NotImplementedError, TypeError, ValueError)
"""What the provider and boto3 raise for an extra that they cannot use."""


def aws_hook(connection: Connection | None) -> Any:
    """Return the provider's ``AwsBaseHook`` for *connection*; None uses the identity that boto3 finds here.

    Raises:
        SpecError: The provider is not installed, or it cannot use the connection.
    """
    try:
        from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook  # noqa: PLC0415  (an extra, slow)
        from airflow.providers.amazon.aws.utils.connection_wrapper import (  # noqa: PLC0415  (as above)
            AwsConnectionWrapper,
        )
    except ImportError as err:
        raise SpecError(f"AWS connections: {err}: pip install 'envscaler-airflow[amazon]'") from err
    hook = AwsBaseHook(aws_conn_id=None if connection is None else connection.conn_id)
    if connection is None:
        return hook
    name, keys = connection.conn_id, (connection.login, connection.password)
    if any(keys) and not all(keys):  # the provider would use another identity instead
        raise SpecError(f"connection {name!r} has an access key id without its secret, or the reverse")
    try:
        extra = extra_of(connection)
        hook.conn_config = AwsConnectionWrapper.from_connection_metadata(name, *keys, extra)
    except _UNUSABLE as err:
        raise SpecError(f"connection {name!r}: {err}") from err
    return hook


def aws_session(hook: Any) -> Any:
    """Return a boto3 session with the identity of *hook*; it renews the keys of a role by itself.

    Raises:
        SpecError: The connection requests something impossible.
        BackendError: AWS refuses the role, or does not answer.
    """
    from botocore import exceptions as refusals  # noqa: PLC0415  (an extra)

    where = f"connection {hook.aws_conn_id!r}"
    wrong = (refusals.NoRegionError, refusals.ParamValidationError, refusals.ProfileNotFound, *_UNUSABLE)
    try:
        session = hook.get_session()
        if hook.conn_config.role_arn:  # a web identity, else without keys until a request
            session.get_credentials().get_frozen_credentials()
    except wrong as err:
        raise SpecError(f"{where}: {err}") from err
    except (refusals.BotoCoreError, refusals.ClientError, OSError) as err:
        is_refused = isinstance(err, refusals.ClientError)
        raise BackendError(f"{where}: {err}", transient=not is_refused) from err
    return session


def store_login(hook: Any) -> StoreLogin:
    """Return those of the connection's credentials that a machine can use."""
    known, who = hook.conn_config, f"connection {hook.aws_conn_id!r}"
    if known.role_arn:
        return StoreLogin(refusal=f"{who} assumes {known.role_arn}, which a machine cannot renew")
    if known.aws_session_token:
        return StoreLogin(refusal=f"{who} has a session token, which expires and a machine cannot renew")
    found = {"ACCESS_KEY_ID": known.aws_access_key_id, "SECRET_ACCESS_KEY": known.aws_secret_access_key}
    keys = {f"AWS_{name}": key for name, key in found.items() if key}
    return StoreLogin(keys, profile=known.profile_name)


_FIELDS = {"login": "login", "username": "login", "password": "password", "host": "host", "schema": "schema"}


def resolve_secret(reference: str) -> str:
    """Return the value of ``secret:NAME/key``, ``connection:ID/field``, ``variable:NAME`` or ``env:NAME``.

    ``secret:NAME/key`` is what Kubernetes would mount. Without a cluster it is the Airflow
    connection NAME with that field or extra, else key ``key`` of the JSON variable NAME. The value is
    registered with Airflow's masker before it is returned.

    Raises:
        SpecError: The reference is not valid, or its target does not exist; no message contains the value.
    """
    try:
        parsed = parse_reference(reference)
    except ValueError as err:
        raise SpecError(f"value_from: {err}") from err
    value = _READERS[parsed.kind](parsed)
    if value is None:
        raise SpecError(f"{parsed}: {_MISSING[parsed.kind]}")
    mask_secret(value)
    return value


def _from_connection(reference: Reference) -> str | None:
    try:
        connection = BaseHook.get_connection(reference.name)
    except (AirflowNotFoundException, AirflowRuntimeError):
        return None
    key = reference.key or "password"
    if key in _FIELDS:
        return _text(getattr(connection, _FIELDS[key]))
    extra: object = connection.extra_dejson
    return _text(extra.get(key)) if isinstance(extra, Mapping) else None


def _from_secret(reference: Reference) -> str | None:
    found = _from_connection(reference)
    if found is not None:
        return found
    value = _variable(reference.name, as_json=True)
    return _text(value.get(reference.key)) if isinstance(value, dict) else None


def _variable(name: str, *, as_json: bool = False) -> Any:
    try:
        return Variable.get(name, default=None, deserialize_json=as_json)
    except (ValueError, AirflowRuntimeError):
        return None


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


_READERS: dict[str, Callable[[Reference], str | None]] = {
    "env": lambda reference: os.environ.get(reference.name),
    "variable": lambda reference: _text(_variable(reference.name)),
    "connection": _from_connection,
    "secret": _from_secret,
}
_MISSING = {
    "env": "the worker has no such environment variable",
    "variable": "Airflow has no such variable, or it is empty",
    "connection": "Airflow has no such connection, or that field of it is empty",
    "secret": "neither a connection of that name has such a field, nor a JSON variable such a key",
}
