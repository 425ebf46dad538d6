"""`chorus health`: is a part alive? For health checks of containers."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import httpx
import typer

from engine.client import EngineClient
from engine.protocol import Unavailable
from gateway.cli.options import LINK, PLACE, with_settings
from gateway.cli.rest import RestError
from gateway.settings import Settings

WAIT_S = 5.0


class Part(StrEnum):
    engine = "engine"
    gateway = "gateway"


@with_settings(("port", *LINK, *PLACE))
def health(settings: Settings, part: Annotated[Part, typer.Argument(show_default=False)]) -> None:
    """Exit status 0 if the part answers: the engine at its endpoint, the gateway on its port."""
    print(asyncio.run(_ask_engine(settings)) if part is Part.engine else _ask_gateway(settings))


async def _ask_engine(settings: Settings) -> str:
    client = EngineClient(settings.engine_endpoints[0], settings.engine_key or None)
    await client.start()
    try:
        return f"engine serves {(await client.wait_ready(WAIT_S)).model}"
    except Unavailable as error:
        raise RestError(str(error)) from error
    finally:
        await client.close()


def _ask_gateway(settings: Settings) -> str:
    url = f"http://127.0.0.1:{settings.port}/readyz"
    try:
        response = httpx.get(url, timeout=WAIT_S)
    except httpx.HTTPError as error:
        raise RestError(f"{url}: {error}") from error
    if not response.is_success:
        raise RestError(f"{url}: {response.text}")
    return "gateway is ready"
