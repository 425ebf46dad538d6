"""`chorus usage`: the ledger, over the admin API."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.admin import AsJson, DataDir, Url, connect, given, show

usage = typer.Typer(help="What was used, and by whom.", no_args_is_help=True)

COLUMNS = ("num_requests", "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens")
Tenant = Annotated[str | None, typer.Option(help="of one tenant [all]", show_default=False)]


@usage.command("show")
def show_usage(
    tenant: Tenant = None,
    by: Annotated[str, typer.Option(help="day,tenant,key,model,adapter,status,user")] = "tenant",
    start: Annotated[str | None, typer.Option(help="from this time on, ISO 8601", show_default=False)] = None,
    end: Annotated[str | None, typer.Option(help="until before this time", show_default=False)] = None,
    url: Url = None, data_dir: DataDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show sums."""
    query = given(tenant=tenant, start=start, end=end, group_by=by)
    rows = connect(url, data_dir).call("GET", "usage", params=query)["data"]
    groups = tuple(name for name in re.split(r"\s*,\s*", by) if name)
    show(rows, as_json, (*groups, *COLUMNS))


@usage.command("export")
def export(
    month: Annotated[str, typer.Option(help="such as 2026-11, in UTC", show_default=False)],
    format: Annotated[str, typer.Option(help="csv or jsonl")] = "csv",
    tenant: Tenant = None,
    output: Annotated[Path | None, typer.Option(help="a file [standard output]", show_default=False)] = None,
    url: Url = None, data_dir: DataDir = None,
) -> None:  # fmt: skip
    """Write every entry of a month."""
    query = given(month=month, format=format, tenant=tenant)
    rest = connect(url, data_dir)
    if output is None:
        rest.download("usage/export", query, sys.stdout.buffer)
        return
    with output.open("wb") as file:
        rest.download("usage/export", query, file)
