"""`chorus tenants` and `chorus plans`: over the admin API."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gateway.cli.nouns import LIMITS, Door, Field, command

tenants = typer.Typer(help="Tenants: who may call what, and how much.", no_args_is_help=True)
plans = typer.Typer(help="Plans: named sets of limits that tenants refer to.", no_args_is_help=True)

TenantId = Annotated[str, typer.Argument(metavar="TENANT", show_default=False)]
PlanId = Annotated[str, typer.Argument(metavar="PLAN", show_default=False)]
FIELDS = (
    Field("name", str, "for people"),
    Field("weight", float, "share of the engine when it is full [1]"),
    Field("priority", str, "interactive, standard or batch [standard]"),
    Field("models", list[str], "name or glob it may call, repeatable [all]", "--model"),
    Field("plan", str, "named set of limits"),
    Field("unknown_fields", str, "reject or warn [reject]"),
    Field("retention", str, "none, or hours that texts are kept [as the server says]"),
    *LIMITS,
)
TENANT_COLUMNS = ("id", "name", "priority", "weight", "models", "plan", "limits", "suspended")
PLAN_COLUMNS = ("id", "limits", "model_limits")


@command(tenants, "create", FIELDS)
def create_tenant(door: Door, body: dict[str, Any], tenant: TenantId) -> None:
    """Create a tenant."""
    door.call("POST", "tenants", {"id": tenant} | _hours(body))


@command(tenants, "list")
def list_tenants(door: Door) -> None:
    """List all tenants."""
    door.list_all("tenants", TENANT_COLUMNS)


@command(tenants, "show")
def show_tenant(door: Door, tenant: TenantId) -> None:
    """Show one tenant."""
    door.call("GET", f"tenants/{tenant}")


@command(tenants, "update", FIELDS, can_unset=True)
def update_tenant(
    door: Door,
    body: dict[str, Any],
    tenant: TenantId,
    suspended: Annotated[bool | None, typer.Option("--suspend/--resume", show_default=False)] = None,
) -> None:
    """Change what is given; suspend or resume."""
    state = {} if suspended is None else {"suspended": suspended}
    door.call("PATCH", f"tenants/{tenant}", _hours(body) | state)


@command(tenants, "delete")
def delete_tenant(door: Door, tenant: TenantId) -> None:
    """Delete a tenant with its keys, adapters, responses and conversations."""
    door.call("DELETE", f"tenants/{tenant}")


def _hours(body: dict[str, Any]) -> dict[str, Any]:
    """A flag is text; the server wants hours as a number."""
    retention = body.get("retention")
    return body | {"retention": int(retention)} if retention is not None and retention.isdecimal() else body


@command(plans, "create", LIMITS)
def create_plan(door: Door, body: dict[str, Any], plan: PlanId) -> None:
    """Create a plan."""
    door.call("POST", "plans", {"id": plan} | body)


@command(plans, "list")
def list_plans(door: Door) -> None:
    """List all plans."""
    door.list_all("plans", PLAN_COLUMNS)


@command(plans, "show")
def show_plan(door: Door, plan: PlanId) -> None:
    """Show one plan."""
    door.call("GET", f"plans/{plan}")


@command(plans, "set", LIMITS)
def set_plan(door: Door, body: dict[str, Any], plan: PlanId) -> None:
    """Give a plan these limits instead of the ones it has; what it says of single models stays."""
    known = door.rest.call("GET", f"plans/{plan}")
    door.call("PUT", f"plans/{plan}", {"model_limits": known["model_limits"]} | body)


@command(plans, "delete")
def delete_plan(door: Door, plan: PlanId) -> None:
    """Delete a plan that no tenant refers to."""
    door.call("DELETE", f"plans/{plan}")
