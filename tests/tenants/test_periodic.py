"""Periodic: work that is done again and again, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from tenants.periodic import Periodic
from tenants.state import RedisUnavailable


async def test_no_fault_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """A store that is away, and a fault that nobody expected, wait for the next time; the fault is logged."""
    faults: list[Exception] = [RedisUnavailable("away"), RuntimeError("ours")]
    is_done = asyncio.Event()

    async def work() -> None:
        if faults:
            raise faults.pop(0)
        is_done.set()

    async with Periodic(work, 0.001), asyncio.timeout(30):
        await is_done.wait()

    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]


@pytest.mark.parametrize("at_once", [False, True])
async def test_when_it_begins(at_once: bool) -> None:
    """At its beginning, if that is wanted; else after its time."""
    count = 0

    async def work() -> None:
        nonlocal count
        count += 1

    async with Periodic(work, 3600, at_once=at_once):
        await asyncio.sleep(0.01)

    assert count == at_once


async def test_it_has_ended_when_it_is_left() -> None:
    """Nothing of it goes on behind the back of what is closed next."""
    has_begun, has_ended = asyncio.Event(), False

    async def work() -> None:
        nonlocal has_ended
        has_begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            has_ended = True

    async with Periodic(work, 3600, at_once=True):
        await has_begun.wait()

    assert has_ended
