"""`chorus serve`, and its two halves alone: `chorus engine`, `chorus gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

from engine.client import check_endpoint
from engine.config import ConfigError
from gateway.child import run_engine, set_up_logging
from gateway.claims import make_run_dir, only_one
from gateway.cli.options import GATEWAY, LINK, MODEL, PLACE, STORE, with_settings
from gateway.cli.setup import ensure_model, migrate_database
from gateway.settings import Settings, with_secrets

if TYPE_CHECKING:
    from gateway.supervisor import Supervisor

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL|DIR", help="name or checkpoint directory", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="the same as the argument  [env var: CHORUS_MODEL]", metavar="MODEL|DIR", show_default=False
    ),
]


def chosen_model(settings: Settings, argument: str | None, option: str | None) -> Settings:
    """The argument or the option, which win over environment and file. Raises ConfigError."""
    if argument and option and argument != option:
        raise ConfigError(f"two models given: {argument} and --model {option}")
    return settings.model_copy(update={"model": argument}) if argument else settings


@with_settings((*MODEL, *GATEWAY))
def serve(settings: Settings, name: ModelArgument = None, model: ModelOption = None) -> None:
    """Run everything: engine, gateway and, unless --redis-url is given, a private Redis; supervised."""
    settings = prepare(chosen_model(settings, name, model))
    asyncio.run(run(settings, forever))


@with_settings((*MODEL, *LINK, *STORE, *PLACE))
def engine(settings: Settings, name: ModelArgument = None, model: ModelOption = None) -> None:
    """Run an engine alone, for gateways that reach it at its endpoint."""
    settings = chosen_model(settings, name, model)
    set_up_logging(settings)
    make_run_dir(settings)
    settings = ensure_model(settings)
    with contextlib.ExitStack() as stack:
        if settings.engine_endpoints[0].startswith("ipc:"):
            stack.enter_context(only_one(settings.run_dir / "engine.lock", "engine of this data directory"))
        run_engine(settings)


@with_settings(("served_name", "max_lora_rank", *LINK, *GATEWAY))
def gateway(settings: Settings, name: ModelArgument = None, model: ModelOption = None) -> None:
    """Run the gateway alone, for an engine that runs elsewhere. Apply `chorus migrate` before."""
    settings = chosen_model(settings, name, model)
    set_up_logging(settings)
    if settings.database_url.startswith("sqlite"):
        make_run_dir(settings)
        migrate_database(settings)
    settings, is_new = with_secrets(settings)
    show_admin_key(settings, is_new)
    asyncio.run(run(ensure_model(settings), forever, with_engine=False))


def prepare(settings: Settings) -> Settings:
    """What comes before the first process: model, secrets, tables. Raises ConfigError."""
    print(f"chorus {version('chorus-serve')} · data in {settings.data_dir}", flush=True)
    set_up_logging(settings)
    make_run_dir(settings)
    settings = ensure_model(settings)
    settings, is_new = with_secrets(settings)
    show_admin_key(settings, is_new)
    migrate_database(settings)
    return settings


def show_admin_key(settings: Settings, is_new: bool) -> None:
    if is_new:
        where = settings.data_dir / "admin.key"
        print(f"admin key (shown this once, kept in {where}): {settings.admin_key}", flush=True)


async def forever(supervisor: Supervisor) -> None:
    await asyncio.Event().wait()


async def run(settings: Settings, use: Callable[[Supervisor], Awaitable[None]], *, with_engine: bool = True) -> None:
    """Start, say that it is ready, `use` it; stop in order at the end of `use`, on SIGTERM or on Ctrl-C, and at once on
    the second of these. Raises ConfigError, ChildFailed."""
    from gateway.supervisor import Supervisor

    for endpoint in settings.engine_endpoints:
        check_endpoint(endpoint, settings.engine_key or None)
    supervisor = Supervisor(settings, with_engine=with_engine)
    with _stopping_on_signals(supervisor) as signals:
        try:
            async with supervisor:
                await supervisor.wait_ready()
                if settings.admin_port is not None:
                    print(f"admin: {supervisor.admin_url}/admin/v1", flush=True)
                print(f"ready: {supervisor.base_url}/v1 · model {settings.base_name}", flush=True)
                await supervisor.unless_failing(_run(use, supervisor))
        except asyncio.CancelledError:
            if not signals:
                raise
    if signals:
        print("stopped", flush=True)


async def _run(use: Callable[[Supervisor], Awaitable[None]], supervisor: Supervisor) -> None:
    await use(supervisor)


@contextlib.contextmanager
def _stopping_on_signals(supervisor: Supervisor) -> Iterator[list[signal.Signals]]:
    """The first signal cancels this task, which unwinds; the second kills the children. → the signals that came."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals: list[signal.Signals] = []

    def handle(number: signal.Signals) -> None:
        signals.append(number)
        if len(signals) > 1:
            supervisor.kill()
            return
        print("stopping: running streams may end; once more to stop at once", file=sys.stderr, flush=True)
        task.cancel()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
