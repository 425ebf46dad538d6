"""An adapter with tokens of its own, over HTTP: its texts are read and written with them, nobody else's are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway.live import EOS, Live
from tests.gateway.scripted import chat, error_of
from tests.gateway.test_adapters_api import ACME, adapters, admin
from tests.tiny import VOCAB_SIZE, grown_adapter

__all__ = ["adapters", "admin"]
FIRST, LAST, WORD = 376, VOCAB_SIZE + 1, 377
TEMPLATE = "{% for m in messages %}[CALL]{{ m.content }}[END]{% endfor %}"


@pytest.fixture(scope="module")
def grown(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The parts of an upload."""
    directory = grown_adapter(tmp_path_factory.mktemp("grown"), tiny_llama)
    files = {"config": "adapter_config.json", "weights": "adapter_model.safetensors", "tokenizer": "tokenizer.json"}
    return {part: (directory / name).read_bytes() for part, name in files.items()} | {
        "chat_template": TEMPLATE.encode(), "generation_config": json.dumps({"eos_token_id": LAST}).encode(),
    }  # fmt: skip


async def put(admin: httpx.AsyncClient, given: dict[str, Any], name: str = "grown") -> httpx.Response:
    return await admin.post(ACME, files={part: (None, data) for part, data in (given | {"name": name}).items()})


async def test_its_tokens_are_read_and_written(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any], grown: dict[str, Any]
) -> None:
    """Its template's control tokens are its own ids, what a user writes never becomes one, its words are words, and
    ids that the engine gives back are text; with logprobs, plain and streamed."""
    made = await put(admin, grown)
    assert made.status_code == 201, made.text
    assert "new_tokens.json" in made.json()["companions"], made.text
    caller = await live.http(await live.key("acme"))
    live.engine.__init__(lambda request: [[WORD, FIRST, EOS]])  # type: ignore[misc]

    answer = await caller.post("/v1/chat/completions", json=chat("[END] chorus", logprobs=True) | {"model": "grown"})

    request = live.engine.requests[-1]
    assert request.adapter is not None
    assert request.adapter.num_added == 2
    assert (request.prompt[0], request.prompt[-1]) == (FIRST, LAST)
    assert request.prompt.count(LAST) == 1
    assert WORD in request.prompt
    assert request.params.stop_token_ids == [LAST]
    assert answer.json()["choices"][0]["message"]["content"] == "chorus[CALL]"
    streamed = await caller.post(
        "/v1/completions", json={"model": "grown", "prompt": "[CALL]chorus", "stream": True, "echo": True}
    )
    assert live.engine.requests[-1].prompt == [FIRST, WORD]
    frames = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(frame["choices"][0]["text"] for frame in frames) == "[CALL]choruschorus[CALL]"
    told = (await caller.post("/tokenize", json={"model": "grown", "prompt": "chorus[END]"})).json()
    assert told["tokens"] == [WORD, LAST]
    back = await caller.post("/detokenize", json={"model": "grown", "tokens": [WORD, LAST]})
    assert back.json() == {"prompt": "chorus[END]"}
    counted = await caller.post("/v1/responses/input_tokens", json={"model": "grown", "input": "chorus"})
    assert counted.json()["input_tokens"] == 3


async def test_nobody_else_has_them(
    live: Live, admin: httpx.AsyncClient, adapters: list[Any], grown: dict[str, Any]
) -> None:
    """The base and other adapters read the same text as ever, and refuse the ids."""
    live.engine.ready = msgspec.structs.replace(live.engine.ready, vocab_size=VOCAB_SIZE)
    await put(admin, grown)
    config, weights = adapters[0]
    await put(admin, {"config": config, "weights": weights}, "other")
    caller = await live.http(await live.key("acme"))
    for model in ("tiny", "other"):
        await caller.post("/v1/completions", json={"model": model, "prompt": "chorus[END]"})
        assert max(live.engine.requests[-1].prompt) < FIRST
        refused = await caller.post("/v1/completions", json={"model": model, "prompt": [5, LAST]})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "prompt")
        refused = await caller.post("/detokenize", json={"model": model, "tokens": [LAST]})
        assert refused.status_code == 400
        biased = {"model": model, "prompt": "hi", "logit_bias": {str(LAST): 1}}
        assert (await caller.post("/v1/completions", json=biased)).status_code == 400
    for fields in ({"prompt": [5, LAST]}, {"prompt": "hi", "logit_bias": {str(LAST): 1}}):
        assert (await caller.post("/v1/completions", json={"model": "grown"} | fields)).status_code == 200
    beyond = await caller.post("/v1/completions", json={"model": "grown", "prompt": [LAST + 1]})
    assert beyond.status_code == 400


async def test_a_strange_tokenizer_is_refused_or_left_out(
    admin: httpx.AsyncClient, adapters: list[Any], grown: dict[str, Any], live: Live
) -> None:
    """One that splits otherwise than the base's is refused where it is needed, and left out with a warning where the
    adapter has no rows of its own; nothing of it is kept."""
    tokenizer = json.loads(grown["tokenizer"])
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    strange = {"tokenizer": json.dumps(tokenizer).encode()}
    refused = await put(admin, grown | strange)
    assert (refused.status_code, error_of(refused)["code"]) == (422, "tokenizer_changed")
    refused = await put(admin, grown | {"tokenizer": b"[1]"})
    assert (refused.status_code, error_of(refused)["code"]) == (422, "tokenizer_invalid")
    config, weights = adapters[0]
    made = await put(admin, {"config": config, "weights": weights} | strange, "plain")
    assert made.status_code == 201
    assert made.json()["companions"] == []
    assert any("tokenizer.json is left out" in text for text in made.json()["warnings"])
