"""What the commands over the admin API share: where the server is, and how answers are shown."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from engine.config import ConfigError
from gateway.cli.rest import Rest
from gateway.settings import Settings

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="CHORUS_URL", help="of the server [http://127.0.0.1:8000]", show_default=False),
]
DataDir = Annotated[
    str | None,
    typer.Option("--data-dir", envvar="CHORUS_DATA_DIR", help="where its admin key lies [data]", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]


def connect(url: str | None, data_dir: str | None) -> Rest:
    """The server at `url`; the admin key from CHORUS_ADMIN_KEY, else from the data directory. Raises ConfigError."""
    settings = Settings.load({"data_dir": data_dir})
    key = settings.admin_key
    if not key:
        try:
            key = (settings.data_dir / "admin.key").read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"no admin key: set CHORUS_ADMIN_KEY, or --data-dir to the server's data directory ({error})"
            ) from error
    return Rest(url or f"http://127.0.0.1:{settings.admin_port or settings.port or 8000}", key)


def given(**fields: Any) -> dict[str, Any]:
    """The fields that were given at all."""
    return {name: value for name, value in fields.items() if value not in (None, {})}


def show(answer: dict[str, Any] | list[dict[str, Any]], as_json: bool, columns: tuple[str, ...] = ()) -> None:
    """As JSON, or as a table of the columns (for a list) or of all fields (for one object)."""
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    console = Console()
    if isinstance(answer, list):
        table = Table(*columns)
        for row in answer:
            table.add_row(*(_text(row.get(column)) for column in columns))
        console.print(table if answer else "none")
        return
    for name, value in answer.items():
        if name != "object":
            console.print(f"{name}: {_text(value)}", soft_wrap=True, highlight=False, markup=False)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(inner)}" for name, inner in value.items() if inner is not None) or "-"
    if isinstance(value, list):
        return ", ".join(_text(inner) for inner in value) or "-"
    return "-" if value is None else str(value)
