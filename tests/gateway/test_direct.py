"""The short cut of the metered routes: the same answers as without it, and two round trips to Redis per request."""

from __future__ import annotations

import pytest
import redis.asyncio

from gateway.app import ROUTERS
from gateway.auth import METERED
from gateway.direct import Direct
from tests.gateway.live import Live
from tests.gateway.scripted import chat, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_it_has_every_metered_route() -> None:
    """A metered route that it lacks would be slow; one that it has and that isn't metered would go without limits."""

    async def app(*_: object) -> None: ...

    direct = Direct(app, [route for router in ROUTERS for route in router.routes])

    assert set(direct._routes) == METERED


@pytest.mark.parametrize("path", sorted(METERED))
async def test_faults_and_scopes(server: Live, path: str) -> None:
    """What FastAPI would see to holds here too: scopes, other methods, faults in bodies, and the metrics by route."""
    client = await server.http(await server.key("acme"))
    powerless = await server.http(await server.key("acme", "adapters:write"))

    assert error_of(await powerless.post(path, json={}))["code"] == "insufficient_permissions"
    assert error_of(await (await server.http()).post(path, json={}))["code"] == "insufficient_permissions"
    assert error_of(await client.post(path, json={"model": 1}))["param"] is not None
    assert error_of(await client.put(path, json={}))["code"] == "method_not_allowed"
    assert error_of(await client.post(path + "/", json={}))["code"] in ("not_found", "method_not_allowed")
    assert f'chorus_requests_total{{route="{path}",status="400"}}' in (await (await server.http()).get("/metrics")).text


async def test_one_round_trip_in_and_one_out(server: Live) -> None:
    """A request costs Redis one call at admission, which checks key, limits and model, and one at its end."""
    client = await server.http(await server.key("counted"))
    limits = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "concurrency": 100}
    await (await server.http()).patch("/admin/v1/tenants/counted", json={"limits": limits})
    await client.post("/v1/chat/completions", json=chat())

    async with redis.asyncio.Redis.from_url(server.settings.redis_url) as own, own.monitor() as monitor:
        for _ in range(20):
            assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        await own.echo("done")
        asked: list[str] = []
        while not asked or "done" not in asked[-1]:
            told = await monitor.next_command()
            if told["client_type"] != "lua":  # those within a script cost no way
                asked.append(told["command"])

    of_requests = [command for command in asked if "{t:counted}:attempt:" in command]  # what else there is, upkeep does
    assert [command.split()[0] for command in of_requests] == ["EVALSHA"] * 40
    assert sum(" hold " in command for command in of_requests) == 20
    assert sum(" settle " in command for command in of_requests) == 20
