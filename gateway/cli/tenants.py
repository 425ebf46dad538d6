"""`chorus tenants` and `chorus keys`: over the admin API."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.admin import (
    AsJson,
    Concurrency,
    DataDir,
    PerDay,
    PerMonth,
    Rpm,
    Tpm,
    Url,
    connect,
    given,
    limits,
    show,
)

tenants = typer.Typer(help="Tenants: who may call what, and how much.", no_args_is_help=True)
keys = typer.Typer(help="API keys of a tenant.", no_args_is_help=True)

TenantId = Annotated[str, typer.Argument(metavar="TENANT", show_default=False)]
Name = Annotated[str | None, typer.Option(help="for people", show_default=False)]
Weight = Annotated[float | None, typer.Option(help="share of the engine when it is full [1]", show_default=False)]
Priority = Annotated[str | None, typer.Option(help="interactive, standard or batch [standard]", show_default=False)]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="name or glob it may call, repeatable [all]", show_default=False)
]
Plan = Annotated[str | None, typer.Option(help="named set of limits, made over the admin API", show_default=False)]
TENANT_COLUMNS = ("id", "name", "priority", "weight", "models", "limits", "suspended")
KEY_COLUMNS = ("id", "name", "scopes", "limits", "created_at", "last_used_at")


@tenants.command("create")
def create_tenant(
    tenant: TenantId, name: Name = None, weight: Weight = None, priority: Priority = None, model: Models = None,
    plan: Plan = None,
    rpm: Rpm = None, tpm: Tpm = None, concurrency: Concurrency = None, tpd: PerDay = None, tpmo: PerMonth = None,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Create a tenant."""
    body = given(id=tenant, name=name, weight=weight, priority=priority, models=model or None, plan=plan,
                 limits=limits(rpm, tpm, concurrency, tpd, tpmo))  # fmt: skip
    show(connect(url, data_dir).call("POST", "tenants", json=body), as_json)


@tenants.command("list")
def list_tenants(url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List all tenants."""
    show(connect(url, data_dir).list_all("tenants"), as_json, TENANT_COLUMNS)


@tenants.command("show")
def show_tenant(tenant: TenantId, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show one tenant."""
    show(connect(url, data_dir).call("GET", f"tenants/{tenant}"), as_json)


@tenants.command("update")
def update_tenant(
    tenant: TenantId, name: Name = None, weight: Weight = None, priority: Priority = None, model: Models = None,
    plan: Plan = None,
    rpm: Rpm = None, tpm: Tpm = None, concurrency: Concurrency = None, tpd: PerDay = None, tpmo: PerMonth = None,
    suspended: Annotated[bool | None, typer.Option("--suspend/--resume", show_default=False)] = None,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Change what is given; suspend or resume."""
    body = given(name=name, weight=weight, priority=priority, models=model or None, plan=plan,
                 limits=limits(rpm, tpm, concurrency, tpd, tpmo), suspended=suspended)  # fmt: skip
    show(connect(url, data_dir).call("PATCH", f"tenants/{tenant}", json=body), as_json)


@tenants.command("delete")
def delete_tenant(tenant: TenantId, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Delete a tenant with its keys and adapters."""
    show(connect(url, data_dir).call("DELETE", f"tenants/{tenant}"), as_json)


@keys.command("create")
def create_key(
    tenant: TenantId, name: Annotated[str, typer.Argument(help="for people", show_default=False)],
    scope: Annotated[
        list[str] | None, typer.Option(help="inference or adapters:write, repeatable [inference]", show_default=False)
    ] = None,
    rpm: Rpm = None, tpm: Tpm = None, concurrency: Concurrency = None, tpd: PerDay = None, tpmo: PerMonth = None,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Create a key. It is shown now and never again."""
    body = given(name=name, scopes=scope or None, limits=limits(rpm, tpm, concurrency, tpd, tpmo))
    show(connect(url, data_dir).call("POST", f"tenants/{tenant}/keys", json=body), as_json)


@keys.command("list")
def list_keys(tenant: TenantId, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List a tenant's keys, without the secret part."""
    show(connect(url, data_dir).list_all(f"tenants/{tenant}/keys"), as_json, KEY_COLUMNS)


@keys.command("revoke")
def revoke_key(
    tenant: TenantId, key: Annotated[str, typer.Argument(metavar="KEY_ID", show_default=False)],
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Revoke a key at once."""
    show(connect(url, data_dir).call("DELETE", f"tenants/{tenant}/keys/{key}"), as_json)
