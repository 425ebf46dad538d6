"""`chorus pull` and `chorus migrate`: what has to be there before a server starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from engine.config import ConfigError
from gateway.claims import make_run_dir
from gateway.cli.options import PLACE, STATE, with_settings
from gateway.settings import Settings, with_secrets


def ensure_model(settings: Settings) -> Settings:
    """The model is in settings.model_dir: fetched if it has to be. Raises ConfigError."""
    if (settings.model_dir / "config.json").is_file():
        return settings
    if Path(settings.model).expanduser().is_dir():
        raise ConfigError(f"{settings.model} has no config.json: it is not a checkpoint directory")
    return settings.model_copy(update={"model": str(fetch(settings.model, settings.models_dir))})


def fetch(name: str, models_dir: Path) -> Path:
    """Downloads a model, showing how far it is. → its directory. Raises ConfigError."""
    from gateway.pull import pull as pull_model

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"fetching {name}", total=None)

        def report(what: str, part: float | None) -> None:
            if not progress.console.is_terminal and progress.tasks[task].description != what:
                progress.console.print(what)
            progress.update(task, description=what, total=None if part is None else 1.0, completed=part or 0.0)

        return pull_model(name, models_dir, report)


@with_settings(PLACE)
def pull(settings: Settings, name: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)]) -> None:
    """Fetch a model into the data directory: a name that Chorus knows, or a hub id."""
    print(fetch(name, settings.models_dir))


@with_settings((*STATE, *PLACE))
def migrate(
    settings: Settings,
    revision: Annotated[str, typer.Option(help="Migrate up or down to this revision.")] = "head",
) -> None:
    """Bring the database to the newest schema, and make the secrets of a first start."""
    make_run_dir(settings)
    settings, is_new = with_secrets(settings)
    if is_new:
        print(f"admin key (shown this once, kept in {settings.data_dir / 'admin.key'}): {settings.admin_key}")
    migrate_database(settings, revision)


def migrate_database(settings: Settings, revision: str = "head") -> None:
    """Up to the newest schema, or to the revision given, up or down. Raises ConfigError."""
    from alembic.util import CommandError
    from sqlalchemy.exc import SQLAlchemyError

    import migrations
    from tenants.db import StateUnavailable

    move = migrations.downgrade if revision.startswith("-") or revision == "base" else migrations.upgrade
    try:
        move(settings.database_url, revision)
        print(f"database is at revision {migrations.current(settings.database_url) or 'none'}", flush=True)
    except (OSError, SQLAlchemyError, StateUnavailable, CommandError, ValueError) as error:
        raise ConfigError(f"database {without_password(settings.database_url)}: {error}") from error


def without_password(url: str) -> str:
    from sqlalchemy import make_url
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except (SQLAlchemyError, ValueError):
        return "(malformed URL)"
