"""Hot swap with real processes: who runs finishes on the version it began with, who comes gets the new one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine.llm import LLM
from tests.conftest import ROOT
from tests.e2e.callers import Heard, Oracle, assert_no_gap, caller, hear, say, swap, upload
from tests.e2e.process import ChorusProcess
from tests.tiny import tiny_adapter


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 370) for _ in range(length)]


async def swap_under_load(
    server: ChorusProcess, oracle: Oracle, tenant: str, versions: tuple[Path, Path], num_tokens: int
) -> None:
    """8 streams on version 1, PUT of version 2 while they run, 4 new calls at once."""
    first, second = versions
    prompts = [prompt_of(10 + 5 * i, i) for i in range(8)]
    key = server.make_key(tenant)
    assert (await upload(server, tenant, "voice", first)).json()["version"] == 1
    async with caller(server, key) as client:
        streams = [Heard() for _ in prompts]
        tasks = [
            asyncio.create_task(hear(client, "voice", prompt, num_tokens, heard))
            for prompt, heard in zip(prompts, streams, strict=True)
        ]
        await asyncio.gather(*(heard.has(10) for heard in streams))

        answer = await swap(server, tenant, "voice", second)
        assert answer.json()["version"] == 2, answer.text
        assert not [heard for heard in streams if heard.finish], "the streams were too short to prove anything"
        late = await asyncio.gather(*(hear(client, "voice", prompt, 40, Heard()) for prompt in prompts[:4]))
        await asyncio.gather(*tasks)

    assert [heard.error for heard in (*streams, *late)] == [None] * 12
    assert [heard.version for heard in (*streams, *late)] == ["1"] * 8 + ["2"] * 4
    assert_no_gap(streams)
    assert [heard.text for heard in streams] == oracle.all(prompts, num_tokens, [first] * 8)
    assert [heard.usage.completion_tokens for heard in streams] == [num_tokens] * 8
    assert [heard.text for heard in late] == oracle.all(prompts[:4], 40, [second] * 4)
    assert not {heard.text for heard in late} & {heard.text[: len(late[0].text)] for heard in streams[:4]}


async def test_hot_swap(serving: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path) -> None:
    """T52: 8 streams on version 1 while version 2 comes: they finish as version 1, new calls answer as version 2, no
    error, no gap above max(1 s, 10 x the median)."""
    versions = tuple(tiny_adapter(tmp_path / f"v{i}", tiny_llama, seed=40 + i, rank=4 * i) for i in (1, 2))

    await swap_under_load(serving, oracle, tenant, (versions[0], versions[1]), 1500)


@pytest.mark.long
@pytest.mark.demo_model
@pytest.mark.timeout(900)
async def test_hot_swap_on_a_real_model(demo_model: Path, tenant: str) -> None:
    """The same on the demo model with the two adapters of examples/, fp32."""
    versions = (ROOT / "examples/adapters/pirate", ROOT / "examples/adapters/support")
    with (
        ChorusProcess("serve", str(demo_model), "--dtype", "float32", "--max-model-len", "1024") as server,
        LLM(demo_model, dtype="float32", max_model_len=1024, kv_memory="256MiB") as llm,
    ):
        await swap_under_load(server.wait_ready(), Oracle(llm), tenant, versions, 120)


async def test_back_and_forth(
    serving: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """T52, PC-01 through the gateway: a prompt of 200 tokens that is warm on version 1 finds nothing cached on version
    2, nor after deletion and a new upload of other weights; back on version 1 only its own may be used; every text is
    that of the current version."""
    paths = [tiny_adapter(tmp_path / f"v{i}", tiny_llama, seed=60 + i) for i in range(3)]
    prompt = prompt_of(200, 5)
    key = serving.make_key(tenant)
    await upload(serving, tenant, "voice", paths[0])
    seen = []

    async with caller(serving, key) as client:

        async def ask(path: Path) -> None:
            answer = await say(client, "voice", prompt, 24)
            assert answer.choices[0].text == oracle(prompt, 24, path)
            details = answer.usage.prompt_tokens_details
            seen.append(details.cached_tokens)

        await ask(paths[0])
        await ask(paths[0])
        await swap(serving, tenant, "voice", paths[1])
        await ask(paths[1])
        url = f"tenants/{tenant}/adapters/voice"
        await asyncio.to_thread(serving.admin, "POST", f"{url}/activate", json={"version": 1, "if_current": 2})
        await ask(paths[0])
        await asyncio.to_thread(serving.admin, "DELETE", url)
        assert (await upload(serving, tenant, "voice", paths[2])).json()["version"] == 3
        await ask(paths[2])

    assert seen[0] == seen[2] == seen[4] == 0
    assert seen[1] == seen[3] == 192


async def test_listed_and_called_in_the_same_breath(
    serving: ChorusProcess, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """HS-13: right after 201 every worker lists it with its parent and length, and serves it; the answer echoes the
    name that was asked for, plain and streaming."""
    path = tiny_adapter(tmp_path / "a", tiny_llama, seed=70)
    key = serving.make_key(tenant)
    await upload(serving, tenant, "voice", path)

    for _ in range(6):  # a new connection each time: the kernel spreads them over the workers
        async with caller(serving, key) as client:
            (model,) = [model for model in (await client.models.list()).data if model.id == "voice"]
            assert model.parent == "tiny-llama"  # type: ignore[attr-defined]
            assert model.max_model_len == 2048  # type: ignore[attr-defined]
            for name in ("voice", "voice@1"):
                assert (await say(client, name, [5, 6, 7], 3)).model == name
                stream = await client.completions.create(model=name, prompt=[5, 6, 7], max_tokens=3, stream=True)
                assert {chunk.model async for chunk in stream} == {name}
