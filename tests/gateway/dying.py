"""A gateway that is killed (SIGKILL) at one point of an upload: `python -m tests.gateway.dying POINT MODEL DATA DB
REDIS` prints its address, and waits for the upload."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gateway.admin.adapters
import gateway.intake
from adapters.registry import AdapterRegistry
from adapters.storage import DirectoryStore
from tenants.epochs import Epochs
from tests.gateway.live import serve

POINTS: dict[str, tuple[Any, str, bool]] = {
    "received": (gateway.admin.adapters, "receive", True),
    "validated": (gateway.intake, "validate_in_subprocess", True),
    "before the commit of files": (DirectoryStore, "commit", False),
    "after the commit of files": (DirectoryStore, "commit", True),
    "before the registration": (AdapterRegistry, "register", False),
    "before the epoch moves": (Epochs, "repair", False),
    "after the registration": (AdapterRegistry, "register", True),
}
"""Where: object, name of its function, killed after it (or else before)."""


def arm(point: str) -> None:
    place, name, is_after = POINTS[point]
    real: Callable[..., Any] = getattr(place, name)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def call(*arguments: Any, **options: Any) -> Any:
        if not is_after:
            die()
        found = await real(*arguments, **options)
        die()
        return found

    def call_now(*arguments: Any, **options: Any) -> Any:
        if not is_after:
            die()
        found = real(*arguments, **options)
        die()
        return found

    setattr(place, name, call if asyncio.iscoroutinefunction(real) else call_now)


async def main(point: str, model: str, data: str, database_url: str, redis_url: str) -> None:
    async with serve(Path(model), Path(data), database_url, redis_url) as live:
        await (await live.http()).post("/admin/v1/tenants", json={"id": "acme"})
        arm(point)
        print(live.url, flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
