"""`chorus adapters`: over the admin API; `check` alone needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from gateway.cli.admin import AsJson, DataDir, Url, connect, given, show
from gateway.cli.check import checked
from gateway.cli.options import with_settings
from gateway.cli.package import packed
from gateway.cli.push import adapter_path, push
from gateway.settings import Settings

adapters = typer.Typer(help="Adapters: of one tenant, or shared by all.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="as PEFT saves an adapter", show_default=False)]
Tenant = Annotated[str | None, typer.Option(help="whose it is [shared by all]", show_default=False)]
Version = Annotated[int, typer.Argument(min=1, show_default=False)]
IfCurrent = Annotated[int | None, typer.Option(help="only if this version is the current one", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Don't ask it its probes; noted in the audit log.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="of the base: a directory with config.json  [env var: CHORUS_MODEL]", metavar="MODEL|DIR",
        show_default=False,
    ),
]  # fmt: skip
COLUMNS = (
    "id", "current_version", "rank", "size_bytes", "status", "tier", "last_used_on", "canary", "aliases"
)  # fmt: skip
VERSION_COLUMNS = ("version", "is_current", "rank", "num_modules", "num_tensors", "size_bytes", "resident", "digest")


@adapters.command("push")
def push_adapter(
    directory: Directory, tenant: Tenant = None,
    name: Annotated[str | None, typer.Option("--as", help="[the directory's name]", show_default=False)] = None,
    activate: Annotated[bool, typer.Option(help="Make it the current version at once.")] = True,
    bare: Annotated[bool, typer.Option("--bare", help="Without chat template, defaults, probes.")] = False,
    force: Force = False,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Upload an adapter: under a new name, or as the next version of one. What is there already is not sent again."""
    with packed(directory, bare) as files:
        options = given(activate=None if activate else "false", force="true" if force else None)
        done = push(connect(url, data_dir), tenant, name or directory.resolve().name, files, options)
    show({"outcome": done.outcome} | done.adapter, as_json)


@adapters.command("check")
@with_settings(("max_lora_rank", "max_upload", "data_dir"))
def check(
    settings: Settings,
    directory: Directory,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Check an adapter as the server would, offline."""
    show(checked(settings, directory), as_json)


@adapters.command("ls")
def list_adapters(tenant: Tenant = None, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the adapters of a tenant, or the shared ones: where each lies now, and the day of its last use."""
    show(connect(url, data_dir).list_all(adapter_path(tenant)), as_json, COLUMNS)


@adapters.command("show")
def show_adapter(
    name: Name, tenant: Tenant = None, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Show an adapter: versions, what is applied of it, scale, size, warnings, where it is loaded."""
    found = connect(url, data_dir).call("GET", adapter_path(tenant, name))
    if as_json:
        show(found, as_json)
        return
    versions = found.pop("versions")
    show(found, as_json)
    show(versions, as_json, VERSION_COLUMNS)


@adapters.command("activate")
def activate_version(
    name: Name, version: Version, tenant: Tenant = None,
    percent: Annotated[
        int | None, typer.Option(min=0, max=100, help="of the conversations: a canary; 0 ends it [100]",
                                 show_default=False)
    ] = None,
    if_current: IfCurrent = None, force: Force = False,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Make another version the current one, or give it a share of the conversations."""
    body = given(version=version, percent=percent, if_current=if_current, force=force or None)
    show(connect(url, data_dir).call("POST", adapter_path(tenant, name, "activate"), json=body), as_json)


@adapters.command("rollback")
def roll_back(
    name: Name, tenant: Tenant = None, if_current: IfCurrent = None,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """End a canary, or make the version current that was current before."""
    body = given(if_current=if_current)
    show(connect(url, data_dir).call("POST", adapter_path(tenant, name, "rollback"), json=body), as_json)


@adapters.command("alias")
def set_alias(
    name: Name,
    alias: Annotated[str | None, typer.Argument(show_default=False)] = None,
    version: Annotated[int | None, typer.Argument(min=1, show_default=False)] = None,
    tenant: Tenant = None,
    if_current: Annotated[
        int | None, typer.Option(help="only if it stands for this version now; 0 = if it is new", show_default=False)
    ] = None,
    remove: Annotated[bool, typer.Option("--rm", help="Remove the alias.")] = False,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Make NAME:ALIAS stand for a version, or remove it; with the name alone, list its aliases."""
    rest, path = connect(url, data_dir), adapter_path(tenant, name, "aliases")
    if alias is None:
        show(rest.call("GET", path)["data"], as_json, ("id", "version"))
        return
    path = f"{path}/{quote(alias, safe='')}"
    if remove == (version is not None):
        raise typer.BadParameter("give a version, or --rm")
    if remove:
        show(rest.call("DELETE", path), as_json)
    else:
        show(rest.call("PUT", path, json=given(version=version, if_current=if_current)), as_json)


@adapters.command("rm")
def delete(
    name: Name, tenant: Tenant = None,
    version: Annotated[int | None, typer.Option(min=1, help="only this one", show_default=False)] = None,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Delete an adapter: new requests get 404 at once, running ones finish."""
    path = adapter_path(tenant, name, "" if version is None else f"versions/{version}")
    show(connect(url, data_dir).call("DELETE", path), as_json)
