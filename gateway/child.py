"""What runs inside a child process of the supervisor: `python -m gateway.child`. Its job comes as one line of JSON on
stdin, which then stays open: when it closes, the parent is gone, and so is the child."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from engine.config import ConfigError
from engine.garbage import settle
from gateway.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gateway.acceptor import Tally

EX_CONFIG = 78
"""Exit status of a child whose settings can't work: starting it again would not help (sysexits.h)."""
BEAT_EVERY_S = 0
"""At each tick of uvicorn's, ten times a second."""
ALIVE, READY = b".", b"!"
"""Beats of a worker: it runs; it runs and an engine answers it."""


class Job(BaseModel):
    """What a child shall do. `listen_fd` is the shared listening socket, `admin_fd` that of the admin port, `beat_fd` a
    pipe for signs of life, `tally_fd` what worker `number` (from 0) shares with the others: see acceptor.Tally."""

    model_config = ConfigDict(frozen=True)

    role: Literal["engine", "worker"]
    settings: Settings
    listen_fd: int = -1
    admin_fd: int = -1
    beat_fd: int = -1
    tally_fd: int = -1
    number: int = 0


def set_up_logging(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for chatty in ("uvicorn", "httpx", "httpx2", "alembic"):
        logging.getLogger(chatty).setLevel("WARNING" if settings.log_level == "info" else settings.log_level.upper())


def run_engine(settings: Settings) -> None:
    """Serves until SIGTERM. Raises ConfigError."""
    from engine.server import run

    run(settings.engine_config(), settings.engine_endpoints[0], settings.engine_key or None, settings.drain_s)


def run_worker(job: Job) -> None:
    """One gateway process on the shared listening sockets, until SIGTERM and the end of its streams."""
    from gateway.acceptor import Tally
    from gateway.app import create_app, has_engine

    app = create_app(job.settings)

    async def beat() -> None:
        with contextlib.suppress(BlockingIOError):  # a parent that was stopped for hours has not read the others
            os.write(job.beat_fd, READY if has_engine(app) else ALIVE)

    os.set_blocking(job.beat_fd, False)
    fds = [fd for fd in (job.listen_fd, job.admin_fd) if fd >= 0]
    serve(app, job.settings, fds, beat, Tally(job.tally_fd, job.number))


def serve(
    app: FastAPI, settings: Settings, listen_fds: list[int], beat: Callable[[], Awaitable[None]], tally: Tally
) -> None:
    """As run_worker(), for any application."""
    import uvicorn

    from gateway.http_guard import GuardedProtocol
    from gateway.sharing_server import SharingServer

    settle()
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_s),
        callback_notify=beat,
        timeout_notify=BEAT_EVERY_S,
    )
    SharingServer(config, tally).run(sockets=[socket.socket(fileno=fd) for fd in listen_fds])


def _end_with_parent(stdin: io.FileIO) -> None:
    while stdin.read(1):
        pass
    os._exit(1)


def main() -> None:
    stdin = io.FileIO(0, closefd=False)
    job = Job.model_validate_json(stdin.readline())
    threading.Thread(target=_end_with_parent, args=(stdin,), name="parent-watch", daemon=True).start()
    set_up_logging(job.settings)
    try:
        if job.role == "engine":
            run_engine(job.settings)
        else:
            run_worker(job)
    except ConfigError as error:
        print(f"chorus: {error}", file=sys.stderr, flush=True)
        sys.exit(EX_CONFIG)


if __name__ == "__main__":
    main()
