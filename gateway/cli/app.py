"""The commands, put together: `chorus serve · engine · gateway · demo · pull · migrate · tenants · plans · keys ·
admin-keys · adapters · sources · import · usage`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from adapters.spec import AdapterError
from engine.config import ConfigError
from gateway.child import EX_CONFIG
from gateway.cli import adapters, demo, health, imports, keys, serve, setup, sources, tenants, usage
from gateway.cli.cures import CURES
from gateway.cli.rest import NoAnswer, RestError
from gateway.processes import ChildFailed

EX_UNAVAILABLE = 69

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
app.add_typer(tenants.plans, name="plans")
app.add_typer(keys.keys, name="keys")
app.add_typer(keys.admin_keys, name="admin-keys")
app.add_typer(adapters.adapters, name="adapters")
app.add_typer(sources.sources, name="sources")
app.add_typer(imports.imports, name="import")
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
    """Faults that a person can mend are one line on stderr, with --json also an object on stdout. Exit status: 1
    refused (by the server or by a check), 2 wrong usage, 69 nobody answers, 78 settings."""
    try:
        app()
    except ConfigError as error:
        sys.exit(_complain(error, EX_CONFIG))
    except ChildFailed as error:
        sys.exit(_complain(error, error.status))
    except NoAnswer as error:
        sys.exit(_complain(error, EX_UNAVAILABLE))
    except AdapterError as error:
        sys.exit(_complain(error, 1, error.code, error.param))
    except RestError as error:
        sys.exit(_complain(error, 1, error.code, error.param))


def _complain(error: Exception, status: int, code: str | None = None, param: str | None = None) -> int:
    cure = CURES.get(code or "")
    if "--json" in sys.argv:
        print(json.dumps({"error": {"message": str(error), "code": code, "param": param, "cure": cure}}))
    named = f" ({code})" if isinstance(error, AdapterError) else ""
    print(f"chorus: {error}{named}" + (f" Cure: {cure}" if cure else ""), file=sys.stderr)
    return status
