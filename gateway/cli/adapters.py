"""`chorus adapters`: over the admin API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.admin import AsJson, DataDir, Url, connect, given, show

adapters = typer.Typer(help="Adapters: of one tenant, or shared by all.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Directory = Annotated[
    Path, typer.Argument(help="with adapter_config.json and adapter_model.safetensors", show_default=False)
]
Tenant = Annotated[str | None, typer.Option(help="whose it is [shared by all]", show_default=False)]
COLUMNS = ("id", "version", "rank", "target_modules", "size_bytes", "status", "digest")


def path(tenant: str | None, name: str = "", act: str = "") -> str:
    parts = [f"tenants/{tenant}" if tenant else "", "adapters", name, act]
    return "/".join(part for part in parts if part)


@adapters.command("add")
def add(
    name: Name, directory: Directory, tenant: Tenant = None,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Upload an adapter under a new name."""
    show(connect(url, data_dir).upload("POST", path(tenant), directory, data={"name": name}), as_json)


@adapters.command("replace")
def replace(
    name: Name, directory: Directory, tenant: Tenant = None,
    activate: Annotated[bool, typer.Option(help="Make it the current version at once.")] = True,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Upload a new version of an adapter; running requests finish on the old one."""
    query = {} if activate else {"activate": "false"}
    show(connect(url, data_dir).upload("PUT", path(tenant, name), directory, params=query), as_json)


@adapters.command("activate")
def activate_version(
    name: Name, version: Annotated[int, typer.Argument(min=1, show_default=False)], tenant: Tenant = None,
    if_current: Annotated[
        int | None, typer.Option(help="only if this version is the current one", show_default=False)
    ] = None,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Make another version the current one: roll back or forward."""
    body = given(version=version, if_current=if_current)
    show(connect(url, data_dir).call("POST", path(tenant, name, "activate"), json=body), as_json)


@adapters.command("list")
def list_adapters(tenant: Tenant = None, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the adapters of a tenant, or the shared ones."""
    show(connect(url, data_dir).list_all(path(tenant)), as_json, COLUMNS)


@adapters.command("show")
def show_adapter(
    name: Name, tenant: Tenant = None, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Show an adapter: versions, digest, size, where it is loaded."""
    show(connect(url, data_dir).call("GET", path(tenant, name)), as_json)


@adapters.command("delete")
def delete(
    name: Name, tenant: Tenant = None, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Delete an adapter: new requests get 404 at once, running ones finish."""
    show(connect(url, data_dir).call("DELETE", path(tenant, name)), as_json)
