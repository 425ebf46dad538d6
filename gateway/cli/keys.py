"""`chorus keys` and `chorus admin-keys`: over the admin API."""

from __future__ import annotations

import hashlib
import sys
from typing import Annotated, Any

import typer

from engine.config import ConfigError
from gateway.cli.nouns import LIMITS, Door, Field, command
from gateway.cli.tenants import TenantId

keys = typer.Typer(help="API keys of a tenant.", no_args_is_help=True)
admin_keys = typer.Typer(help="Keys of administrators, with a role each.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="for people", show_default=False)]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", show_default=False)]
RIGHTS = (
    Field("scopes", list[str], "inference, adapters:write or act_as, repeatable [inference]", "--scope"),
    Field("models", list[str], "name or glob it may call, repeatable [all]", "--model"),
    Field("expires_at", str, "ISO 8601 with a time zone [never]"),
    Field("allowed_ips", list[str], "address or network it may be used from, repeatable [any]", "--allow-ip"),
    *LIMITS,
)
COLUMNS = ("id", "name", "scopes", "limits", "created_at", "last_used_at", "expires_at", "revoked_at")
ADMIN_COLUMNS = ("id", "name", "role", "created_at", "expires_at", "revoked_at")


@command(keys, "create", RIGHTS)
def create_key(door: Door, body: dict[str, Any], tenant: TenantId, name: Name) -> None:
    """Create a key. It is shown now and never again."""
    door.call("POST", f"tenants/{tenant}/keys", {"name": name} | body)


@command(keys, "import", RIGHTS)
def import_key(
    door: Door, body: dict[str, Any], tenant: TenantId, name: Name,
    sha256: Annotated[str | None, typer.Option(help="of the whole key, in hex", show_default=False)] = None,
) -> None:  # fmt: skip
    """Let a key that another gateway made go on working: give its SHA-256, or the key itself on standard input. The key
    is hashed here; it is not sent."""
    hint = ""
    if sha256 is None:
        key = sys.stdin.readline().strip()
        if not key:
            raise ConfigError("give --sha256, or the key on standard input")
        sha256, hint = hashlib.sha256(key.encode()).hexdigest(), key[-4:]
    door.call("POST", f"tenants/{tenant}/keys/import", {"name": name, "sha256": sha256, "hint": hint} | body)


@command(keys, "list")
def list_keys(door: Door, tenant: TenantId) -> None:
    """List a tenant's keys, without the secret part."""
    door.list_all(f"tenants/{tenant}/keys", COLUMNS)


@command(keys, "show")
def show_key(door: Door, tenant: TenantId, key: KeyId) -> None:
    """Show one key, without the secret part."""
    door.call("GET", f"tenants/{tenant}/keys/{key}")


@command(keys, "update", (Field("name", str, "for people"), *RIGHTS), can_unset=True)
def update_key(door: Door, body: dict[str, Any], tenant: TenantId, key: KeyId) -> None:
    """Change what is given; it acts at the key's next request."""
    door.call("PATCH", f"tenants/{tenant}/keys/{key}", body)


@command(keys, "rotate")
def rotate_key(
    door: Door, tenant: TenantId, key: KeyId,
    overlap_s: Annotated[float, typer.Option(help="how long the old one goes on")] = 86400.0,
) -> None:  # fmt: skip
    """Make a new key with the same rights, shown now and never again; the old one ends after a while."""
    door.call("POST", f"tenants/{tenant}/keys/{key}/rotate", {"overlap_s": overlap_s})


@command(keys, "revoke")
def revoke_key(door: Door, tenant: TenantId, key: KeyId) -> None:
    """Revoke a key at once."""
    door.call("DELETE", f"tenants/{tenant}/keys/{key}")


@command(admin_keys, "create", (Field("expires_at", str, "ISO 8601 with a time zone [never]"),))
def create_admin_key(
    door: Door, body: dict[str, Any], name: Name,
    role: Annotated[str, typer.Option(help="viewer, operator or admin", show_default=False)],
) -> None:  # fmt: skip
    """Create an admin key. It is shown now and never again."""
    door.call("POST", "admin-keys", {"name": name, "role": role} | body)


@command(admin_keys, "list")
def list_admin_keys(door: Door) -> None:
    """List the admin keys, without the secret part."""
    door.list_all("admin-keys", ADMIN_COLUMNS)


@command(admin_keys, "revoke")
def revoke_admin_key(door: Door, key: KeyId) -> None:
    """Revoke an admin key at once; `settings` is that of the settings, CHORUS_ADMIN_KEY."""
    door.call("DELETE", f"admin-keys/{key}")


@command(admin_keys, "restore")
def restore_settings_key(door: Door) -> None:
    """Let the key of the settings count again."""
    door.call("POST", "admin-keys/settings/restore")
