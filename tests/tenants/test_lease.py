"""Lease: one holder at a time, on a real Redis."""

from __future__ import annotations

import asyncio

from tenants.lease import Lease
from tenants.state import connect


async def test_one_holder_at_a_time(redis_url: str) -> None:
    """Whoever has it keeps it by taking it again; another gets it when it is given back, or when its holder is silent
    for its time; giving what is another's takes nothing away."""
    redis = connect(redis_url)
    first, second, brief = Lease(redis, "k", 60), Lease(redis, "k", 60), Lease(redis, "k", 0.1)
    assert await first.take()
    assert await first.take()
    assert not await second.take()
    await second.give()
    assert not await second.take()

    await first.give()
    assert await second.take()
    assert not await first.take()
    await second.give()
    assert await brief.take()
    assert not await first.take()
    await asyncio.sleep(0.2)
    assert await first.take()
    assert not await brief.take()
    assert await Lease(redis, "other", 60).take()
    await redis.aclose()
