"""A private redis-server as a child, with an append-only file in the data directory; without one, state in memory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.settings import Settings

MEMORY_WARNING = (
    "redis-server is not installed: quotas, conversations and usage not yet written live in this process only and are "
    "lost when it ends, and there is one worker. Install redis-server, or give --redis-url."
)


def redis_server() -> str | None:
    """Path of the redis-server program."""
    return shutil.which("redis-server")


def socket_path(settings: Settings) -> Path:
    return settings.run_dir / "redis.sock"


def url(settings: Settings) -> str:
    return f"unix://{socket_path(settings)}"


def argv(settings: Settings, program: str) -> list[str]:
    """Command line: a Unix socket for us alone, no TCP, every write in the append-only file, nothing ever evicted."""
    directory = settings.data_dir / "redis"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = {
        "port": "0",
        "unixsocket": str(socket_path(settings)),
        "unixsocketperm": "600",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": str(directory / "redis.log"),
    }
    return [program, *(part for name, value in options.items() for part in (f"--{name}", value))]


async def wait_until_up(settings: Settings, timeout_s: float = 60) -> None:
    """Returns when it answers: after it has read its append-only file. Raises TimeoutError."""
    client = Redis(unix_socket_path=str(socket_path(settings)), socket_timeout=1, socket_connect_timeout=1)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await client.ping()
                    return
                except (RedisError, OSError):
                    await asyncio.sleep(0.05)
    finally:
        await client.aclose()
