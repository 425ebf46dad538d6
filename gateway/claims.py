"""What a start takes for itself alone: the port, the run directory, the locks. Everything is given back by the system,
however the process ends. All raise ConfigError."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from engine.config import ConfigError
from gateway.settings import Settings


def bind(settings: Settings) -> socket.socket:
    """The listening socket, bound but not listening: until a worker accepts, connections are refused."""
    where = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"can't listen on {where}: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {where}: {error.strerror}; choose another --host or --port") from error
    return listener


def make_run_dir(settings: Settings) -> None:
    """The data directory, and the one of the sockets, which nobody else may write to."""
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = settings.run_dir.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"{settings.run_dir} must be a directory that only this user can write to")


@contextlib.contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Holds a lock on the file."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"the {what} already runs; stop it, or choose another --data-dir") from error
        yield
