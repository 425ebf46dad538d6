"""What streams and answers hold to with a real engine behind two workers: clients that leave, stop strings, characters,
seeds, broken bodies, conversations."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from engine.params import SamplingParams
from tests.e2e.callers import Heard, Oracle, caller, gauge, hear, say, until, upload
from tests.e2e.process import ChorusProcess
from tests.tiny import tiny_adapter, tiny_model, tiny_tokenizer

BASE = "tiny-llama"
BODY: dict[str, Any] = {"model": BASE, "prompt": [5, 6, 7], "ignore_eos": True}


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 370) for _ in range(length)]


# ---- clients that leave


async def test_forty_clients_leave(serving: ChorusProcess, tenant: str) -> None:
    """KV-01: 20 plain and 20 streaming requests of 1,900 tokens whose clients leave while queued, before the first
    token, after three chunks or later: within seconds nothing runs, no block is held, and the tenant's limit of 40 at a
    time is free."""
    key = await asyncio.to_thread(serving.make_key, tenant)
    await asyncio.to_thread(serving.admin, "PATCH", f"tenants/{tenant}", json={"limits": {"concurrency": 40}})
    headers = {"authorization": f"Bearer {key}"}

    async def leave(i: int) -> None:
        body = BODY | {"max_tokens": 1900, "stream": i % 2 == 0}
        async with httpx.AsyncClient(timeout=60) as http:
            if i % 4 == 0:
                async with http.stream("POST", f"{serving.url}/v1/completions", json=body, headers=headers) as answer:
                    lines = answer.aiter_lines()
                    for _ in range(6):
                        await anext(lines)
                return
            task = asyncio.create_task(http.post(f"{serving.url}/v1/completions", json=body, headers=headers))
            await asyncio.sleep(0.01 * i)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    generated = await asyncio.to_thread(gauge, serving, "generated_tokens_total")
    await asyncio.gather(*(leave(i) for i in range(40)))

    await until(lambda: gauge(serving, "running") == gauge(serving, "waiting") == gauge(serving, "blocks_used") == 0)
    assert gauge(serving, "generated_tokens_total") - generated < 40 * 1900 / 2, "they ran on to their end"
    async with caller(serving, key) as client:
        answers = await asyncio.gather(*(say(client, BASE, [5, 6, 7], 2) for _ in range(40)))
    assert len(answers) == 40


# ---- usage


async def test_cached_tokens_are_told_in_both_modes(serving: ChorusProcess, tenant: str) -> None:
    """PC-11: the same prompt plain, streamed, plain: the first finds nothing, the others all whole blocks but the last
    token's; the last chunk of a stream does not overwrite it, and prompt_tokens counts the whole prompt."""
    key = await asyncio.to_thread(serving.make_key, tenant)
    prompt = prompt_of(100, 11)
    async with caller(serving, key) as client:
        first = (await say(client, BASE, prompt, 5)).usage
        streamed = (await hear(client, BASE, prompt, 5, Heard())).usage
        again = (await say(client, BASE, prompt, 5)).usage

    assert [usage.prompt_tokens for usage in (first, streamed, again)] == [100] * 3
    assert [usage.prompt_tokens_details.cached_tokens for usage in (first, streamed, again)] == [0, 96, 96]


# ---- text


@pytest.fixture(scope="module")
def voiced(serving: ChorusProcess, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A key whose tenant has the adapter `voice`, and its files."""
    path = tiny_adapter(tmp_path_factory.mktemp("streams") / "voice", tiny_llama, seed=140)
    key = serving.make_key("streams-co")
    asyncio.run(upload(serving, "streams-co", "voice", path))
    return key, path


@pytest.mark.parametrize("num_spanned", [2, 3, 5])
async def test_stop_strings(serving: ChorusProcess, oracle: Oracle, voiced: tuple[str, Path], num_spanned: int) -> None:
    """ST-01: a stop that spans 2, 3 or 5 tokens of a known greedy text, with an adapter, chat and completions, stream
    and plain: the text ends right before its first place, no piece holds a part of it, finish_reason is stop."""
    key, path = voiced
    chat = [{"role": "user", "content": "the quick brown fox"}]
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    ids = oracle.llm.generate(prompt_of(12, 3), params, oracle.ref(path))[0].token_ids
    said = oracle.llm.chat(chat, params, oracle.ref(path))[0].token_ids
    options: dict[str, Any] = {
        "model": "voice",
        "max_tokens": 150,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    async with caller(serving, key) as client:
        full = (await say(client, "voice", prompt_of(12, 3), 150)).choices[0].text
        stop = _spanning(oracle, ids, full, num_spanned)
        plain = await client.completions.create(prompt=prompt_of(12, 3), stop=stop, **options)
        heard = await hear(client, "voice", prompt_of(12, 3), 150, Heard(), stop=stop)
        assert plain.choices[0].text == heard.text == full[: full.index(stop)]
        assert plain.choices[0].finish_reason == heard.finish == "stop"

        full = (await client.chat.completions.create(messages=chat, **options)).choices[0].message.content
        stop = _spanning(oracle, said, full, num_spanned)
        answer = await client.chat.completions.create(messages=chat, stop=stop, **options)
        stream = await client.chat.completions.create(messages=chat, stop=stop, stream=True, **options)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert answer.choices[0].message.content == "".join(pieces) == full[: full.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def _spanning(oracle: Oracle, ids: list[int], full: str, num_spanned: int) -> str:
    """A part of the text that begins inside one token and ends with the last of so many, in whole characters."""
    pieces = [oracle.llm.tokenizer.decode([token]) for token in ids]
    for i in range(10, len(pieces) - num_spanned):
        part = "".join(pieces[i : i + num_spanned])
        if "\ufffd" not in part and part in full:
            return part[1:] if len(pieces[i]) > 1 else part
    pytest.fail("the text has no such place: choose another seed")


WANTED = "ž🚀漢é" * 3
START = 100


@pytest.fixture(scope="module")
def reciting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChorusProcess]:
    """A model that says WANTED after the token START, whatever came before: the head of each token's successor is its
    own embedding, and the layers add nothing."""
    directory = tiny_model(tmp_path_factory.mktemp("reciting") / "reciting")
    tensors = load_file(directory / "model.safetensors")
    ids = tiny_tokenizer().encode("ž🚀漢é", add_special_tokens=False).ids
    assert len(set(ids)) == len(ids) == 11, "each byte is a token with one successor"
    embedding = tensors["model.embed_tokens.weight"]
    head = np.zeros_like(tensors["lm_head.weight"])
    for token, successor in zip([*ids, START], [*ids[1:], ids[0], ids[0]], strict=True):
        head[successor] += embedding[token] / np.linalg.norm(embedding[token])
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = np.zeros_like(tensors[name])
    save_file(tensors | {"lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
    with ChorusProcess("serve", str(directory), "--dtype", "float32") as server:
        yield server.wait_ready()


async def test_characters_arrive_whole(reciting: ChorusProcess) -> None:
    """ST-02: emoji, CJK and accents whose bytes come one token at a time: no U+FFFD and no half character in any piece,
    stream equals plain equals the text; a limit in the middle of a character gives the whole ones before it."""
    key = await asyncio.to_thread(reciting.make_key, "acme")
    async with caller(reciting, key) as client:
        plain = (await say(client, "reciting", [START], 33)).choices[0].text
        heard = await hear(client, "reciting", [START], 33, Heard())
        cut = await hear(client, "reciting", [START], 4, Heard())

    assert plain == heard.text == WANTED
    assert not [piece for piece in heard.pieces if "\ufffd" in piece]
    assert {piece for piece in heard.pieces if piece} == set("ž🚀漢é")
    assert cut.text == "ž"
    assert cut.finish == "length"


# ---- seeds


async def test_a_seed_holds_in_any_company(serving: ChorusProcess, voiced: tuple[str, Path]) -> None:
    """SM-01: a seeded request at temperature 0.8, base and adapter, alone, beside unseeded ones, beside other seeds and
    beside greedy ones: always the same text."""
    key, _ = voiced
    async with caller(serving, key) as client:

        def ask(model: str, **options: Any) -> Any:
            return say(client, model, prompt_of(9, 1), 40, **({"temperature": 0.8} | options))

        for model in (BASE, "voice"):
            texts = [(await ask(model, seed=42)).choices[0].text for _ in range(3)]
            for company in ({}, {"seed": 7}, {"temperature": 0.0}):
                neighbours = [ask(other, **company) for other in (BASE, "voice", BASE, "voice")]
                ours, *_ = await asyncio.gather(ask(model, seed=42), *neighbours)
                texts.append(ours.choices[0].text)
            other = (await ask(model, seed=43)).choices[0].text
            assert len(set(texts)) == 1
            assert other != texts[0]


async def test_choices_of_one_seed_differ(serving: ChorusProcess, voiced: tuple[str, Path]) -> None:
    """T40: with n, each choice has draws of its own, and the same ones again when the call is repeated, streamed, or
    asks for more choices; the fingerprint tells base and adapter apart."""
    key, _ = voiced
    chat: Any = [{"role": "user", "content": "hello"}]
    options: dict[str, Any] = {"seed": 11, "temperature": 1.0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    async with caller(serving, key) as client:
        fingerprints = set()
        for model in (BASE, "voice"):
            three = await client.chat.completions.create(model=model, messages=chat, n=3, **options)
            texts = [choice.message.content for choice in three.choices]
            assert len(set(texts)) == 3
            two = await client.chat.completions.create(model=model, messages=chat, n=2, **options)
            assert [choice.message.content for choice in two.choices] == texts[:2]
            streamed = ["", "", ""]
            async for chunk in await client.chat.completions.create(
                model=model, messages=chat, n=3, stream=True, **options
            ):
                streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            assert streamed == texts
            assert three.system_fingerprint == two.system_fingerprint
            fingerprints.add(three.system_fingerprint)
    assert len(fingerprints) == 2


async def test_logprobs_in_any_company(serving: ChorusProcess, voiced: tuple[str, Path]) -> None:
    """SM-12: streams with five alternatives, with none, and without logprobs, at the same time: each token has its own
    alternatives, the chosen one first where it is greedy, and all are what they are alone and in a plain answer."""
    key, _ = voiced
    chat: Any = [{"role": "user", "content": "the quick brown fox 🦊"}]
    wanted: list[dict[str, Any]] = [{"logprobs": True, "top_logprobs": 5}, {"logprobs": True}, {}]
    async with caller(serving, key) as client:

        async def hear_one(options: dict[str, Any]) -> tuple[str, list[Any]]:
            stream = await client.chat.completions.create(
                model="voice", messages=chat, temperature=0, max_tokens=40, stream=True, stop=["never to be said"],
                extra_body={"ignore_eos": True}, **options,
            )  # fmt: skip
            text, entries = "", []
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if chunk.choices[0].logprobs:
                    entries += chunk.choices[0].logprobs.content or []
            return text, entries

        alone = [await hear_one(options) for options in wanted]
        together = await asyncio.gather(*(hear_one(options) for options in wanted * 2))
        plain = await client.chat.completions.create(
            model="voice", messages=chat, temperature=0, max_tokens=40, extra_body={"ignore_eos": True}, **wanted[0]
        )

    assert len({text for text, _ in (*alone, *together)}) == 1
    (_, five), (_, none), (_, without) = alone
    assert plain.choices[0].logprobs is not None
    told = plain.choices[0].logprobs.content or []
    assert [(entry.token, entry.bytes) for entry in five] == [(entry.token, entry.bytes) for entry in told]
    assert [entry.top_logprobs for entry in none] == [[]] * len(five)
    assert without == []
    for entry in five:
        assert len(entry.top_logprobs) == 5
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    assert len({tuple(top.token for top in entry.top_logprobs) for entry in five}) > 5
    for found, expected in zip(together, alone * 2, strict=True):
        assert [entry.token for entry in found[1]] == [entry.token for entry in expected[1]]
        assert [entry.logprob for entry in found[1]] == pytest.approx(
            [entry.logprob for entry in expected[1]], abs=1e-4
        )


# ---- keys and limits of two workers


async def ask_often(serving: ChorusProcess, key: str, count: int) -> list[int]:
    """Statuses of so many requests at once, each on a connection of its own: they are spread over both workers."""

    async def ask() -> int:
        async with httpx.AsyncClient(timeout=60) as http:
            body = BODY | {"max_tokens": 1}
            headers = {"authorization": f"Bearer {key}"}
            return (await http.post(f"{serving.url}/v1/completions", json=body, headers=headers)).status_code

    return await asyncio.gather(*(ask() for _ in range(count)))


async def test_what_changes_acts_on_every_worker(serving: ChorusProcess, tenant: str) -> None:
    """QB-04: a key that both workers know, revoked, suspended, limited, rotated: at the very next requests, on all
    connections at once; a new key works at once, also where it was asked for before."""
    path = f"tenants/{tenant}"
    key = await asyncio.to_thread(serving.make_key, tenant)

    async def after(status: int, method: str, where: str, **body: Any) -> dict[str, Any]:
        answer = await asyncio.to_thread(serving.admin, method, where, **({"json": body} if body else {}))
        assert answer.is_success, answer.text
        assert set(await ask_often(serving, key, 12)) == {status}, (where, body)
        return dict(answer.json())

    assert set(await ask_often(serving, key, 12)) == {200}
    await after(401, "PATCH", path, suspended=True)
    await after(200, "PATCH", path, suspended=False)
    await after(404, "PATCH", path, models=["other"])
    await after(200, "PATCH", path, models=None)
    await after(429, "PATCH", path, limits={"concurrency": 0})
    await after(200, "PATCH", path, limits={"concurrency": None})
    (row,) = (await asyncio.to_thread(serving.admin, "GET", f"{path}/keys")).json()["data"]
    await after(403, "PATCH", f"{path}/keys/{row['id']}", scopes=["adapters:write"])
    await after(200, "PATCH", f"{path}/keys/{row['id']}", scopes=["inference"])
    made = await after(401, "POST", f"{path}/keys/{row['id']}/rotate", overlap_s=0)
    assert set(await ask_often(serving, made["key"], 12)) == {200}
    await asyncio.to_thread(serving.admin, "DELETE", f"{path}/keys/{made['id']}")
    assert set(await ask_often(serving, made["key"], 12)) == {401}


async def test_limits_are_those_of_all_workers(serving: ChorusProcess, tenant: str) -> None:
    """QB-08: 100 requests at once over two workers under 20 per minute: 20 pass, and what flowed back meanwhile."""
    key = await asyncio.to_thread(serving.make_key, tenant)
    await asyncio.to_thread(serving.admin, "PATCH", f"tenants/{tenant}", json={"limits": {"requests_per_minute": 20}})
    started = time.monotonic()

    statuses = await ask_often(serving, key, 100)

    assert set(statuses) == {200, 429}
    assert 20 <= statuses.count(200) <= 20 + (time.monotonic() - started) / 3


# ---- bodies


BROKEN: list[bytes] = [
    b"{x", b"", b"\xff\xfe", b'{"model":"\xff"}', '{"model":"x"}'.encode("utf-16"), b"null", b"[]", b'"s"',
    b'{"model":"tiny-llama","model":"x"}', b'{"model":"tiny-llama","prompt":"x","temperature":NaN}', b"[" * 100_000,
    b'{"model":"tiny-llama","prompt":"\\ud800"}', b'{"model":"\\udc00","prompt":"x"}',
]  # fmt: skip


async def test_broken_bodies(serving: ChorusProcess, tenant: str) -> None:
    """HT-01, HT-02: whatever is no sound JSON object is 400 in OpenAI's shape on every route, the admin's too; then 50
    normal calls under a limit of 4 at a time: nothing was left held, and both workers live."""
    key = await asyncio.to_thread(serving.make_key, tenant)
    await asyncio.to_thread(serving.admin, "PATCH", f"tenants/{tenant}", json={"limits": {"concurrency": 4}})
    workers = serving.pids("worker")
    routes = {
        "/v1/chat/completions": key, "/v1/completions": key, "/v1/responses": key, "/v1/conversations": key,
        "/tokenize": key, "/admin/v1/tenants": serving.admin_key,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=60) as http:
        for path, bearer in routes.items():
            headers = {"authorization": f"Bearer {bearer}", "content-type": "application/json"}
            for body in BROKEN:
                if path == "/v1/conversations" and body in (b"", b"null"):
                    continue  # everything in this body is optional
                answer = await http.post(f"{serving.url}{path}", content=body, headers=headers)
                assert answer.status_code == 400, (path, body[:40], answer.text)
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    async with caller(serving, key) as client:
        for _ in range(13):
            await asyncio.gather(*(say(client, BASE, [5, 6, 7], 2) for _ in range(4)))

    assert serving.pids("worker") == workers


# ---- conversations


async def test_parallel_turns_on_one_conversation(serving: ChorusProcess, voiced: tuple[str, Path]) -> None:
    """DB-01: ten turns at once over two workers: the losers get 409, nothing is lost or mixed: what is kept alternates,
    and every answer is the one that its history gets again."""
    key, _ = voiced
    async with caller(serving, key) as client:
        talk = await client.conversations.create()

        async def turn(asker: openai.AsyncOpenAI, text: str) -> Any:
            return await asker.responses.create(
                model="voice", input=text, conversation=talk.id, max_output_tokens=16, temperature=0
            )

        outcomes = await asyncio.gather(*(turn(client, f"q{i}") for i in range(10)), return_exceptions=True)
        lost = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert {getattr(error, "code", error) for error in lost} <= {"conversation_locked"}
        patient = client.with_options(max_retries=30)
        await asyncio.gather(*(turn(patient, f"p{i}") for i in range(3)))

        items = (await client.conversations.items.list(talk.id, limit=100, order="asc")).data
        assert [item.role for item in items] == ["user", "assistant"] * (len(items) // 2)  # type: ignore[union-attr]
        assert len(items) == 2 * (10 - len(lost) + 3)
        texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
        for i in range(1, len(texts), 2):
            history = [{"role": "assistant" if j % 2 else "user", "content": text} for j, text in enumerate(texts[:i])]
            again = await client.chat.completions.create(
                model="voice",
                messages=history,
                max_tokens=16,
                temperature=0,  # type: ignore[arg-type]
            )
            assert again.choices[0].message.content == texts[i]


async def test_many_conversations_do_not_mix(serving: ChorusProcess, voiced: tuple[str, Path]) -> None:
    """DB-01: parallel turns on 20 conversations over two workers all succeed; each holds its own items only."""
    key, _ = voiced
    async with caller(serving, key) as client:
        talks = [await client.conversations.create() for _ in range(20)]
        for n in range(2):
            await asyncio.gather(
                *(
                    client.responses.create(
                        model=BASE, input=f"talk {i} turn {n}", conversation=talk.id, max_output_tokens=16
                    )
                    for i, talk in enumerate(talks)
                )
            )
        for i, talk in enumerate(talks):
            items = (await client.conversations.items.list(talk.id, order="asc")).data
            asked = [item.content[0].text for item in items[::2]]  # type: ignore[union-attr]
            assert asked == [f"talk {i} turn 0", f"talk {i} turn 1"]
            assert len(items) == 4
