"""The commands `producer keys …`: the API keys of the gateway."""

import re
from typing import TYPE_CHECKING, cast

import click

from sluice.producer import config
from sluice.producer.cli.common import (
    Values,
    database_option,
    json_option,
    note,
    show_json,
    show_table,
    when,
)
from sluice.producer.cli.durations import duration_with_unit_s
from sluice.producer.errors import InvalidSetting, ProducerError
from sluice.protocol.clock import wall_ms
from sluice.protocol.host.terminal import say

if TYPE_CHECKING:
    from sluice.gateway.api_keys.key import ApiKey
    from sluice.gateway.api_keys.store import KeyStore

HEADERS = ("id", "tenant", "scopes", "rpm", "tpm", "state", "created", "expires", "last_used")


class KeyNotFound(ProducerError):
    """No key has this id."""


@click.group()
def keys() -> None:
    """Create, list and revoke API keys of the HTTP gateway."""


@keys.command()
@click.option("--tenant", metavar="NAME", required=True, help="Tenant of the key's jobs.")
@click.option("--scopes", metavar="LIST", default="submit,read", show_default=True,
              help="Scopes of the key, separated by commas: submit, read, control, admin, metrics.")  # fmt: skip
@click.option("--rpm", metavar="COUNT", type=int, help="Refuse more requests a minute. Default: no limit.")
@click.option("--tpm", metavar="TOKENS", type=int, help="Refuse more tokens a minute. Default: no limit.")
@click.option("--expires", "expires_s", metavar="TIME", type=duration_with_unit_s,
              help="Refuse the key after this time: 90d, 12h, 30m. Default: never.")  # fmt: skip
@click.option("--if-none", is_flag=True, help="Do nothing if any key exists, of any tenant, even a revoked one.")
@json_option
@database_option
def create(
    *, scopes: str, expires_s: float | None, if_none: bool, as_json: bool, database_url: str | None, **values: object
) -> None:
    """Create a key and print it. It is shown only this once: the database keeps its hash.

    \b
    Example:
        producer keys create --tenant acme --rpm 600 --tpm 200000 --expires 90d
    """
    from sluice.gateway.api_keys.key import ApiKey, new_secret

    text, key_id, digest = new_secret()
    now_ms = wall_ms()
    key = ApiKey(
        id=key_id,
        digest=digest,
        scopes=tuple(scope.strip() for scope in scopes.split(",") if scope.strip()),
        created_ms=now_ms,
        expires_ms=None if expires_s is None else now_ms + round(expires_s * 1000),
        **cast("Values", values),
    )
    if not key.scopes:
        raise InvalidSetting("--scopes names no scope, and a key without one is useless")
    with _store(database_url) as store:
        if if_none and store.keys():
            note("a key already exists; none was created")
            return
        store.add(key)
    if as_json:
        show_json({**_facts(key, now_ms), "key": text})
    else:
        say(text)
        note(f"key {key_id} of tenant {key.tenant}; it is not shown again")


@keys.command("list")
@click.option("--tenant", metavar="NAME", help="Include only keys of this tenant.")
@json_option
@database_option
def list_keys(*, tenant: str | None, as_json: bool, database_url: str | None) -> None:
    """List the keys, including revoked and expired ones, without their secrets, which are not stored.

    \b
    Example:
        producer keys list --tenant acme
    """
    now_ms = wall_ms()
    with _store(database_url) as store:
        facts = [_facts(key, now_ms) for key in store.keys(tenant=tenant)]
    if as_json:
        show_json(facts)
    else:
        show_table(HEADERS, [[row[header] for header in HEADERS] for row in facts])


@keys.command()
@click.argument("key_ids", metavar="ID...", nargs=-1, required=True)
@database_option
def revoke(*, key_ids: tuple[str, ...], database_url: str | None) -> None:
    """Revoke keys by id. Gateways refuse them within a second; open streams continue.

    A revoked key still counts as a key: while none is active, gateways refuse every request, even on loopback.

    \b
    Example:
        producer keys revoke 3f9a1c2b7d4e
    """
    with _store(database_url) as store:
        existing = store.revoke(key_ids, wall_ms())
    for key_id in key_ids:
        if key_id in existing:
            say(f"{key_id}\trevoked")
    if unknown := [key_id for key_id in key_ids if key_id not in existing]:
        # Not as given: it may be a whole key, which must not be printed.
        shown = ", ".join(key_id if re.fullmatch("[0-9a-f]{1,12}", key_id) else "(not an id)" for key_id in unknown)
        raise KeyNotFound(f"no such key: {shown}. See: producer keys list")


def _store(url: str | None) -> "KeyStore":
    from sluice.gateway.api_keys.store import KeyStore

    return KeyStore(config.database_url(url), is_writer=True)


def _facts(key: "ApiKey", now_ms: int) -> Values:
    state = "active" if key.is_active(now_ms) else "expired" if key.revoked_ms is None else "revoked"
    return {
        "id": key.id, "tenant": key.tenant, "scopes": ",".join(key.scopes), "rpm": key.rpm, "tpm": key.tpm,
        "state": state, "created": when(key.created_ms), "expires": when(key.expires_ms),
        "revoked": when(key.revoked_ms), "last_used": when(key.last_used_ms),
    }  # fmt: skip
