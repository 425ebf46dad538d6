"""Every field of OpenAI's and vLLM's requests is known: used, accepted without effect, or refused; and documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat
from openai.types.responses import input_token_count_params as counted
from openai.types.responses import response_create_params as responses
from pydantic import BaseModel

from gateway.response_request import CountedInput, NewResponse
from gateway.schemas import NEUTRAL, ChatRequest, CompletionRequest
from tests.gateway.live import Live

VLLM = frozenset(
    (
        "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "include_stop_str_in_output",
        "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
        "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words", "echo",
        "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents", "chat_template",
        "chat_template_kwargs", "structured_outputs", "priority", "request_id", "session_id",
        "return_tokens_as_token_ids", "return_token_ids", "cache_salt", "vllm_xargs", "kv_transfer_params",
        "ec_transfer_params", "mm_processor_kwargs", "use_beam_search"
    )
)  # fmt: skip
CASES: list[tuple[type[BaseModel], Any, frozenset[str], frozenset[str]]] = [
    (ChatRequest, chat.CompletionCreateParamsBase, VLLM, frozenset(NEUTRAL)),
    (CompletionRequest, text.CompletionCreateParamsBase, VLLM, frozenset(NEUTRAL)),
    (NewResponse, responses.ResponseCreateParamsBase, frozenset(), frozenset()),
    (CountedInput, counted.InputTokenCountParams, frozenset(), frozenset()),
]
ONLY_CHATS = {"continue_final_message", "add_generation_prompt", "chat_template_kwargs"}


@pytest.mark.parametrize(("ours", "openai", "extra", "others"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_no_field_is_unknown(ours: type[BaseModel], openai: Any, extra: frozenset[str], others: frozenset[str]) -> None:
    """The client's own list of fields, and vLLM's: none of them is answered as if it had been mistyped."""
    theirs = set(openai.__annotations__) | extra | {"stream"}
    if ours is CompletionRequest:
        theirs -= ONLY_CHATS

    assert theirs - set(ours.model_fields) - others == set()
    assert not set(ours.model_fields) & others


def test_every_field_is_documented() -> None:
    """docs/api.md names each field that these bodies know."""
    page = (Path(__file__).parents[2] / "docs/api.md").read_text()
    named = set(re.findall(r"`([a-z_.]+)`", page)) | {
        name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", page)
    }

    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *NewResponse.model_fields}
    assert {*known, *NEUTRAL, *CountedInput.model_fields} - named == set()


async def test_unknown_fields_are_named_or_refused(live: Live) -> None:
    """A tenant's setting: by default what nobody knows is 400; with `warn` it is left out, at any depth, and named in
    the answer's header, plain and streamed. What is known and can't be done stays refused, and so do wrong values."""
    admin, client = await live.http(), await live.http(await live.key("acme"))
    message = {"role": "user", "content": "hi", "cache_control": {"type": "x"}}
    body: dict[str, Any] = {"model": "tiny", "messages": [message], "zzz": 1, "größe": [1]}

    assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
    patched = await admin.patch("/admin/v1/tenants/acme", json={"unknown_fields": "warn"})
    assert patched.json()["unknown_fields"] == "warn"

    for stream in (False, True):
        answer = await client.post("/v1/chat/completions", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-chorus-ignored"] == "gr%C3%B6%C3%9Fe, messages[0].cache_control, zzz"
    made = await client.post("/v1/responses", json={"model": "tiny", "input": "hi", "zzz": 1})
    assert (made.status_code, made.headers["x-chorus-ignored"]) == (200, "zzz")
    assert "x-chorus-ignored" not in (await client.post("/v1/responses", json={"model": "tiny", "input": "a"})).headers
    parts = [{"type": "text", "text": "of many parts", "cache_control": {"type": "ephemeral"}}]
    answer = await client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": [message | {"content": parts}]}
    )
    assert (answer.status_code, live.prompts()[-1].count("of many parts")) == (200, 1)
    item = {"role": "user", "zzz": 1, "content": [{"type": "input_text", "text": "hi", "zzz": 1}]}
    for path, name, more in (
        ("/v1/responses", "input", {"model": "tiny"}), ("/v1/conversations", "items", {}),
        ("/v1/responses/input_tokens", "input", {}),
    ):  # fmt: skip
        made = await client.post(path, json={name: [item], "zzz": 1, **more})
        assert made.status_code == 200, (path, made.text)
        assert made.headers["x-chorus-ignored"] == f"{name}[0].content[0].zzz, {name}[0].zzz, zzz"
    for fields in ({"tools": [{"type": "function"}]}, {"temperature": 9, "zzz": 1}, {"messages": 5, "zzz": 1}):
        assert (await client.post("/v1/chat/completions", json={**body, **fields})).status_code == 400
    await admin.patch("/admin/v1/tenants/acme", json={"unknown_fields": "reject"})
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
    assert (await client.post("/v1/responses", json={"model": "tiny", "input": [item]})).status_code == 400
    assert (await admin.patch("/admin/v1/tenants/acme", json={"unknown_fields": "drop"})).status_code == 400
    assert (await admin.patch("/admin/v1/tenants/acme", json={"zzz": 1})).status_code == 400
