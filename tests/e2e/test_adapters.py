"""Adapters that come, go, crowd and fail while others are served: real processes, a real engine with room for two."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import IS_CI
from tests.e2e.callers import Heard, Oracle, cached, caller, gauge, hear, remove, say, swap, until, upload
from tests.e2e.conftest import CRAMPED_RANK
from tests.e2e.process import ChorusProcess
from tests.tiny import tiny_adapter, tiny_model

BASE = "tiny-llama"


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 370) for _ in range(length)]


def made(directory: Path, model: Path, seed: int, **options: Any) -> Path:
    """An adapter that takes one of the two places."""
    return tiny_adapter(directory / f"a{seed}", model, seed=seed, **({"rank": CRAMPED_RANK} | options))


async def put_up(server: ChorusProcess, tenant: str, paths: dict[str, Path]) -> str:
    """→ a key of the tenant, which has these adapters."""
    key = await asyncio.to_thread(server.make_key, tenant)
    for name, path in paths.items():
        answer = await upload(server, tenant, name, path)
        assert answer.status_code == 201, answer.text
    return key


async def all_at_once(
    client: openai.AsyncOpenAI, models: Sequence[str], prompts: Sequence[list[int]], num_tokens: int
) -> list[str]:
    answers = await asyncio.gather(
        *(say(client, model, prompt, num_tokens) for model, prompt in zip(models, prompts, strict=True))
    )
    return [answer.choices[0].text for answer in answers]


# ---- loading


async def test_bad_uploads_while_streams_run(
    cramped: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """AL-16: 8 base and 2 adapter streams run; an adapter above the largest rank, a corrupt one and one of another
    model's shapes are 422 each; the ten texts are right, and the engine stays well."""
    good = made(tmp_path, tiny_llama, 1)
    key = await put_up(cramped, tenant, {"good": good})
    over = made(tmp_path, tiny_llama, 2, rank=16)
    corrupt = made(tmp_path, tiny_llama, 3)
    weights = corrupt / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    foreign = made(tmp_path, tiny_model(tmp_path / "wide", hidden=128), 4)
    prompts, used = [prompt_of(8, i) for i in range(10)], [*[None] * 8, good, good]
    async with caller(cramped, key) as client:
        streams = [Heard() for _ in prompts]
        tasks = [
            asyncio.create_task(hear(client, "good" if path else BASE, prompt, 300, heard))
            for prompt, path, heard in zip(prompts, used, streams, strict=True)
        ]
        await asyncio.gather(*(heard.has(2) for heard in streams[:2]))
        refused = [await upload(cramped, tenant, "bad", path) for path in (over, corrupt, foreign)]
        await asyncio.gather(*tasks)

    assert [answer.status_code for answer in refused] == [422] * 3, [answer.text for answer in refused]
    assert [heard.error for heard in streams] == [None] * 10
    assert [heard.text for heard in streams] == oracle.all(prompts, 300, used)
    assert (await asyncio.to_thread(httpx.get, f"{cramped.url}/health")).status_code == 200
    assert (await upload(cramped, tenant, "bad", made(tmp_path, tiny_llama, 5))).status_code == 201


async def test_a_place_keeps_nothing_of_its_former_owner(
    cramped: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """AL-02: two large adapters fill the places again and again; a small one of q alone that comes between them has the
    same text and the same logprobs each time: those of the offline engine."""
    paths = {
        "big": made(tmp_path, tiny_llama, 11), "other": made(tmp_path, tiny_llama, 12),
        "small": made(tmp_path, tiny_llama, 13, rank=2, targets=("q_proj",)),
    }  # fmt: skip
    key = await put_up(cramped, tenant, paths)
    prompt, found = prompt_of(20, 3), []
    async with caller(cramped, key) as client:
        for model in ("big", "other", "small", "big", "other", "small"):
            answer = await say(client, model, prompt, 20, logprobs=3)
            choice = answer.choices[0]
            assert choice.text == oracle(prompt, 20, paths[model]), model
            if model == "small":
                found.append((choice.logprobs.tokens, choice.logprobs.token_logprobs))

    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)


# ---- more adapters than places


@pytest.mark.timeout(600)
async def test_running_streams_keep_their_adapters(
    cramped: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """HS-01: two tenants stream on two adapters that fill both places; a third and a fourth are uploaded and called in
    the middle: they wait; all texts are right to the end."""
    rivals = [f"{tenant}-{i}" for i in range(4)]
    paths = [made(tmp_path, tiny_llama, 20 + i) for i in range(4)]
    keys = [await put_up(cramped, rival, {"voice": path}) for rival, path in zip(rivals, paths, strict=True)]
    prompts = [prompt_of(10, i) for i in range(4)]
    wanted = [*oracle.all(prompts[:2], 200, paths[:2]), *oracle.all(prompts[2:], 20, paths[2:])]
    draw = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(caller(cramped, key)) for key in keys]
        for _ in range(20 if IS_CI else 3):
            streams = [Heard() for _ in range(4)]
            tasks = [
                asyncio.create_task(hear(clients[i], "voice", prompts[i], 200, streams[i])) for i in range(2)
            ]  # fmt: skip
            for i, moment in ((2, draw.randrange(5, 60)), (3, draw.randrange(60, 120))):
                await asyncio.gather(*(heard.has(moment) for heard in streams[:2]))
                await remove(cramped, rivals[i], "voice")
                assert (await upload(cramped, rivals[i], "voice", paths[i])).status_code == 201
                tasks.append(asyncio.create_task(hear(clients[i], "voice", prompts[i], 20, streams[i])))
            await asyncio.gather(*tasks)
            assert [heard.error for heard in streams] == [None] * 4
            assert [heard.text for heard in streams] == wanted


async def test_twelve_adapters_on_two_places(
    cramped: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """SC-02: 12 adapters, one request each, all at once and then one after the other: all 24 are right."""
    paths = {f"m{i}": made(tmp_path, tiny_llama, 40 + i) for i in range(12)}
    key = await put_up(cramped, tenant, paths)
    prompts = [prompt_of(5 + i, i) for i in range(12)]
    wanted = oracle.all(prompts, 12, list(paths.values()))
    async with caller(cramped, key) as client:
        assert await all_at_once(client, list(paths), prompts, 12) == wanted
        in_turn = [await say(client, name, prompt, 12) for name, prompt in zip(paths, prompts, strict=True)]

    assert [answer.choices[0].text for answer in in_turn] == wanted


@pytest.mark.timeout(600)
async def test_bursts_with_cancels(
    cramped: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """SC-01: bursts of four adapters and two base requests in one instant, in KV for little more than one of them at
    its longest, with random clients leaving: whoever stays gets the right text, all memory is free."""
    paths = {f"m{i}": made(tmp_path, tiny_llama, 60 + i) for i in range(4)}
    key = await put_up(cramped, tenant, paths)
    draw = random.Random(2)
    prompts = [prompt_of(60 + 10 * i, i) for i in range(6)]
    models: list[str] = [*paths, BASE, BASE]
    wanted = oracle.all(prompts, 30, [*paths.values(), None, None])
    async with caller(cramped, key) as client:
        for _ in range(200 if IS_CI else 8):
            tasks = [
                asyncio.create_task(say(client, model, prompt, 30))
                for model, prompt in zip(models, prompts, strict=True)
            ]
            leavers = draw.sample(range(6), 2)
            await asyncio.sleep(draw.random() * 0.3)
            for i in leavers:
                tasks[i].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            for i, answer in enumerate(answers):
                if isinstance(answer, BaseException):
                    assert i in leavers, answer
                else:
                    assert answer.choices[0].text == wanted[i]  # type: ignore[attr-defined]
    await until(lambda: gauge(cramped, "running") == gauge(cramped, "blocks_used") == 0)


# ---- going


async def test_deletion_under_running_streams(
    serving: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """HS-02: four streams at their tenth token, DELETE, and two clients leave in that instant: the other two finish as
    if nothing had happened, new calls are 404, and the memory is free after the last one."""
    path = made(tmp_path, tiny_llama, 80, rank=32)
    used_before = await asyncio.to_thread(gauge, serving, "adapter_bytes_used")
    key = await put_up(serving, tenant, {"voice": path})
    prompts = [prompt_of(10, i) for i in range(4)]
    async with caller(serving, key) as client:
        streams = [Heard() for _ in prompts]
        tasks = [
            asyncio.create_task(hear(client, "voice", prompt, 400, heard))
            for prompt, heard in zip(prompts, streams, strict=True)
        ]
        await asyncio.gather(*(heard.has(10) for heard in streams))
        for task in tasks[2:]:
            task.cancel()
        gone = await remove(serving, tenant, "voice")
        with pytest.raises(openai.NotFoundError):
            await say(client, "voice", prompts[0], 1)
        await asyncio.gather(*tasks, return_exceptions=True)

    assert gone.status_code == 200
    assert [heard.text for heard in streams[:2]] == oracle.all(prompts[:2], 400, [path] * 2)
    assert await listed(serving, tenant) == []
    await until(lambda: gauge(serving, "adapter_bytes_used") <= used_before)


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.timeout(900)
async def test_cycles_of_upload_call_and_delete(
    cramped: ChorusProcess, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """HS-04: upload, call, delete, 50 times: after the warm-up the engine's and the workers' memory is flat, and no
    adapter stays in the engine."""
    key = await put_up(cramped, tenant, {})
    paths = [made(tmp_path, tiny_llama, 90 + i) for i in range(4)]
    pids = [*cramped.pids("engine"), *cramped.pids("worker")]
    used_before = await asyncio.to_thread(gauge, cramped, "adapter_bytes_used")
    num_cycles = 50 if IS_CI else 6
    sizes = []
    async with caller(cramped, key) as client:
        for i in range(num_cycles):
            assert (await upload(cramped, tenant, "voice", paths[i % 4])).status_code == 201
            await say(client, "voice", prompt_of(10, i), 4)
            assert (await remove(cramped, tenant, "voice")).status_code == 200
            sizes.append([rss(pid) for pid in pids])
    for before, after in zip(sizes[num_cycles // 2], sizes[-1], strict=True):
        assert after < before * 1.02 + (1 << 20)
    assert await listed(cramped, tenant) == []
    await until(lambda: gauge(cramped, "adapter_bytes_used") <= used_before)


async def listed(server: ChorusProcess, tenant: str) -> list[dict[str, Any]]:
    answer = await asyncio.to_thread(server.admin, "GET", f"tenants/{tenant}/adapters")
    return list(answer.json()["data"])


async def test_ten_uploads_of_one_name(
    serving: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """HS-05: of ten parallel uploads of one name over two workers exactly one is 201, the others 409; what answers is
    its file, and it alone is listed."""
    paths = [made(tmp_path, tiny_llama, 100 + i, rank=2 + i) for i in range(10)]
    key = await put_up(serving, tenant, {})

    answers = await asyncio.gather(*(upload(serving, tenant, "voice", path) for path in paths))

    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 9
    (won,) = [path for path, answer in zip(paths, answers, strict=True) if answer.status_code == 201]
    rows = [(row["id"], row["version"], row["rank"]) for row in await listed(serving, tenant)]
    assert rows == [("voice", 1, int(won.name[1:]) - 98)]
    async with caller(serving, key) as client:
        assert (await say(client, "voice", [5, 6, 7], 20)).choices[0].text == oracle([5, 6, 7], 20, won)


@pytest.mark.timeout(600)
async def test_uploads_swaps_and_deletions_at_once(
    serving: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """HS-05: a mix of POST, PUT, DELETE and calls of one name: only the answers that belong there, version numbers are
    never used twice, and what answers in the end is exactly the last file."""
    paths = [made(tmp_path, tiny_llama, 120 + i, rank=2 + i) for i in range(4)]
    key = await put_up(serving, tenant, {})
    versions: list[int] = []

    async def act(i: int) -> None:
        path = paths[i % 4]
        answer = await (
            remove(serving, tenant, "voice") if i % 5 == 4
            else swap(serving, tenant, "voice", path) if i % 2
            else upload(serving, tenant, "voice", path)
        )  # fmt: skip
        assert answer.status_code in (200, 201, 404, 409), answer.text
        if "version" in answer.json():
            versions.append(answer.json()["version"])

    async with caller(serving, key) as client:
        for wave in range(20 if IS_CI else 2):
            await asyncio.gather(*(act(wave * 8 + i) for i in range(8)))
            with contextlib.suppress(openai.NotFoundError):
                await say(client, "voice", [5, 6], 2)
        await remove(serving, tenant, "voice")
        assert (await upload(serving, tenant, "voice", paths[0])).status_code == 201
        assert (await say(client, "voice", [5, 6, 7], 20)).choices[0].text == oracle([5, 6, 7], 20, paths[0])

    assert len(versions) == len(set(versions))
    assert len(await listed(serving, tenant)) == 1


# ---- the prefix cache


async def test_no_prefix_is_shared_between_adapters(
    serving: ChorusProcess, oracle: Oracle, tenant: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """PC-02: one prompt of 200 tokens under the base, A1, A2, the base and A1 again, in turn and all at once: the first
    call of each finds nothing cached, every text is right."""
    paths = {"a1": made(tmp_path, tiny_llama, 130), "a2": made(tmp_path, tiny_llama, 131)}
    key = await put_up(serving, tenant, paths)
    models = [BASE, "a1", "a2", BASE, "a1"]
    prompt, other = prompt_of(200, 8), prompt_of(200, 9)
    used = [paths.get(model) for model in models]
    async with caller(serving, key) as client:
        in_turn = [await say(client, model, prompt, 16) for model in models]
        at_once = await all_at_once(client, models, [other] * 5, 16)

    assert [cached(answer) for answer in in_turn] == [0, 0, 0, 192, 192]
    assert [answer.choices[0].text for answer in in_turn] == oracle.all([prompt] * 5, 16, used)
    assert at_once == oracle.all([other] * 5, 16, used)
