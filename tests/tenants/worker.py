"""A gateway worker's share of quotas, as a process: does the orders on its standard input, one a line.

    python -m tests.tenants.worker REDIS_URL NAME
    {"holds": 50, "tokens": 100, "limits": {…}, "then": "exit"}     → how many holds passed

then: "keep" the leases without a heartbeat · "beat" until killed, with `completion_tokens` so far
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tenants.keys import Principal
from tenants.limits import Limits
from tenants.quotas import Hold, QuotaExceeded, Quotas
from tenants.slots import TenantSlot
from tenants.state import Client, connect
from tenants.usage import UsageRecord

EPOCH = 7


def principal(limits: dict[str, int], key_id: str = "k1", key_limits: dict[str, int] | None = None) -> Principal:
    return Principal(
        "acme", key_id, frozenset({"inference"}), tenant_limits=Limits.of(limits),
        key_limits=Limits.of(key_limits or {}), epoch=EPOCH,
    )  # fmt: skip


def attempt(name: str, prompt_tokens: int = 1, **values: Any) -> UsageRecord:
    who = {"tenant_id": "acme", "key_id": "k1", "model": "m"}
    return UsageRecord(**{**who, **values}, attempt_id=name, prompt_tokens=prompt_tokens)


async def prepare(redis: Client) -> None:
    """What authenticate() does: there is an epoch."""
    await redis.set(TenantSlot("acme").epoch, EPOCH)


async def try_holds(quotas: Quotas, order: dict[str, Any]) -> list[Hold]:
    who = principal(order["limits"])

    async def one(number: int) -> Hold | None:
        try:
            record = attempt(f"{order['name']}-{number}", order.get("prompt_tokens", 1))
            return await quotas.hold(who, record, order["tokens"])
        except QuotaExceeded:
            return None

    found = await asyncio.gather(*(one(number) for number in range(order["holds"])))
    return [hold for hold in found if hold is not None]


async def do(redis: Client, order: dict[str, Any]) -> None:
    quotas = Quotas(redis, lease_s=order.get("lease_s", 20))
    holds = await try_holds(quotas, order)
    for hold in holds:
        hold.completion_tokens = order.get("completion_tokens", 0)
    if order["then"] == "beat":
        await quotas.beat()
    print(len(holds), flush=True)
    while order["then"] == "beat":
        await asyncio.sleep(quotas.lease_s / 4)
        await quotas.beat()


async def main(url: str, name: str) -> None:
    redis = connect(url)
    await redis.ping()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await do(redis, {"name": name, **json.loads(line)})
    await redis.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
