"""AWS connections, read by the Amazon provider's hook: keys, roles, web identity, profiles, endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.hooks.servers import extra_of

if TYPE_CHECKING:
    from airflow.sdk import Connection

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
