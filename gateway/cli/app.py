"""The commands, put together: `chorus serve · engine · gateway · demo · pull · migrate · tenants · keys · adapters ·
usage`."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from engine.config import ConfigError
from gateway.child import EX_CONFIG
from gateway.cli import adapters, demo, health, serve, setup, tenants, usage
from gateway.cli.rest import RestError
from gateway.processes import ChildFailed

app = typer.Typer(
    name="chorus", help="One resident model, many voices: multi-LoRA, multi-tenant LLM serving.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
app.command("serve")(serve.serve)
app.command("engine")(serve.engine)
app.command("gateway")(serve.gateway)
app.command("demo")(demo.demo)
app.command("pull")(setup.pull)
app.command("migrate")(setup.migrate)
app.command("health")(health.health)
app.add_typer(tenants.tenants, name="tenants")
app.add_typer(tenants.keys, name="keys")
app.add_typer(adapters.adapters, name="adapters")
app.add_typer(usage.usage, name="usage")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"chorus {installed_version('chorus-serve')}")
        raise typer.Exit


@app.callback()
def chorus(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """One resident model, many voices: multi-LoRA, multi-tenant LLM serving."""


def run() -> None:
    """Faults that a person can mend are one line on stderr; the exit status says whose they were."""
    try:
        app()
    except ConfigError as error:
        sys.exit(_complain(error, EX_CONFIG))
    except ChildFailed as error:
        sys.exit(_complain(error, error.status))
    except RestError as error:
        sys.exit(_complain(error, 1))


def _complain(error: Exception, status: int) -> int:
    print(f"chorus: {error}", file=sys.stderr)
    return status
