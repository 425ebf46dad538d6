"""Clients that leave and uploads that come while adapters crowd: a real engine with room for two."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.conftest import IS_CI
from tests.e2e.callers import Heard, Oracle, assert_no_gap, caller, gauge, hear, say, until, upload
from tests.e2e.process import ChorusProcess
from tests.e2e.test_adapters import BASE, made, prompt_of, put_up

MAX_RANK = 64
"""The largest that a server takes when nothing else is said."""


@pytest.mark.timeout(600)
async def test_streams_that_are_left_poison_nothing(
    cramped: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """HS-08: eight streams of four adapters on two places, half of the clients leave at random points, again and again:
    every connection ends, nothing stays pinned, and then each adapter answers at once and right."""
    paths = {f"m{i}": made(tmp_path, tiny_llama, 200 + i) for i in range(4)}
    key = await put_up(cramped, tenant, paths)
    draw = random.Random(8)
    prompts = [prompt_of(8 + i, i) for i in range(8)]
    models = [f"m{i % 4}" for i in range(8)]
    async with caller(cramped, key) as client:
        for _ in range(30 if IS_CI else 4):
            streams = [Heard() for _ in prompts]
            tasks = [
                asyncio.create_task(hear(client, model, prompt, 60, heard))
                for model, prompt, heard in zip(models, prompts, streams, strict=True)
            ]
            for i in draw.sample(range(8), 4):
                await asyncio.sleep(draw.random() * 0.1)
                tasks[i].cancel()
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
        await until(lambda: gauge(cramped, "running") == gauge(cramped, "blocks_used") == 0)
        pinned = await asyncio.to_thread(cramped.admin, "GET", "engine")
        [engine] = pinned.json()["data"]
        assert [found["num_pins"] for found in engine["adapters"]] == [0] * len(engine["adapters"])
        for name, path in paths.items():
            answer = await say(client, name, prompts[0], 12, timeout=30)
            assert answer.choices[0].text == oracle(prompts[0], 12, path)


async def test_uploads_hold_up_no_stream(
    serving: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """HS-11: while four streams run, in memory for all of them, the largest adapter that is allowed is uploaded and
    called, three times: no stream pauses for more than a second (or ten times its usual pause), and all texts are
    right."""
    key = await put_up(serving, tenant, {})
    largest = [made(tmp_path, tiny_llama, 220 + i, rank=MAX_RANK) for i in range(3)]
    prompts = [prompt_of(10, i) for i in range(4)]
    async with caller(serving, key) as client:
        streams = [Heard() for _ in prompts]
        tasks = [
            asyncio.create_task(hear(client, BASE, prompt, 1500, heard))
            for prompt, heard in zip(prompts, streams, strict=True)
        ]
        await asyncio.gather(*(heard.has(5) for heard in streams))
        for i, path in enumerate(largest):
            assert (await upload(serving, tenant, f"large{i}", path)).status_code == 201
            answer = await say(client, f"large{i}", prompts[0], 4)
            assert answer.choices[0].text == oracle(prompts[0], 4, path)
        await asyncio.gather(*tasks)

    assert [heard.error for heard in streams] == [None] * 4
    assert [heard.text for heard in streams] == oracle.all(prompts, 1500, [None] * 4)
    assert_no_gap(streams)
