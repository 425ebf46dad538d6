"""`chorus usage`: the ledger, over the admin API."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.admin import DataDir, Url, connect, given
from gateway.cli.nouns import Door, Field, command

usage = typer.Typer(help="What was used, and by whom.", no_args_is_help=True)

COLUMNS = ("num_requests", "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens")
QUERY = (
    Field("tenant", str, "of one tenant [all]"),
    Field("key", str, "of one key, by its id [all]"),
    Field("start", str, "from this time on, ISO 8601"),
    Field("end", str, "until before this time"),
)
Tenant = Annotated[str | None, typer.Option(help="of one tenant [all]", show_default=False)]


@command(usage, "show", QUERY)
def show_usage(
    door: Door, body: dict[str, Any],
    by: Annotated[str, typer.Option(help="day,tenant,key,model,adapter,version,status,user")] = "tenant",
) -> None:  # fmt: skip
    """Show sums."""
    rows = door.rest.call("GET", "usage", params=body | {"group_by": by})["data"]
    groups = tuple(name for name in re.split(r"\s*,\s*", by) if name)
    door.show(rows, (*groups, *COLUMNS))


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
