"""`chorus sources`: what is watched and what came of it, over the admin API. The server's settings name them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from gateway.cli.nouns import Door, command
from gateway.cli.rest import RestError

sources = typer.Typer(help="Watched sources of adapters (--adapter-sources).", no_args_is_help=True)

Source = Annotated[str, typer.Argument(metavar="ID|PLACE", help="as `ls` shows it", show_default=False)]
COLUMNS = ("id", "place", "status", "ready", "failed", "waiting", "error")
ADAPTER_COLUMNS = ("id", "status", "digest", "code", "message")
EVERY_S = 0.3


@command(sources, "ls")
def list_sources(door: Door) -> None:
    """List the sources, and what the last look at each came to."""
    door.list_all("sources", COLUMNS)


@command(sources, "show")
def show(
    door: Door, source: Source,
    failed: Annotated[bool, typer.Option("--failed", help="Only what was refused.")] = False,
) -> None:  # fmt: skip
    """List the adapters in a source, and what came of each."""
    rows = door.rest.list_all(f"sources/{_found(door, source)['id']}/adapters")
    door.show([row for row in rows if not failed or row["status"] == "failed"], ADAPTER_COLUMNS)


@command(sources, "sync")
def sync(
    door: Door, source: Source,
    wait: Annotated[float, typer.Option(help="seconds until it gives up waiting for the end", min=0)] = 600.0,
) -> None:  # fmt: skip
    """Look at a source now, and wait until what is new or changed in it is taken. Exit status 1: it can't be read."""
    found = door.rest.call("POST", f"sources/{_found(door, source)['id']}/sync")
    asked, end = found["asked"], time.monotonic() + wait
    while found["synced"] < asked:
        if time.monotonic() > end:
            raise RestError(f"{found['place']} was not synced within {wait:g} s", code="sync_unfinished")
        time.sleep(EVERY_S)
        found = _found(door, source)
    door.show(found)
    if found["status"] == "failed":
        raise typer.Exit(1)


def _found(door: Door, source: str) -> dict[str, Any]:
    for one in door.rest.list_all("sources"):
        if source in (one["id"], one["place"]):
            return one
    raise RestError(f"the server watches no {source}", code="source_not_found", param="source")
