"""/v1/responses through the unmodified openai client."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from gateway import conversations as store_module
from tests.gateway.live import Live

pytestmark = pytest.mark.usefixtures("live")


@pytest.fixture
async def client(live: Live) -> AsyncOpenAI:
    return await live.openai(await live.key("acme"))


@pytest.fixture
async def stranger(live: Live) -> AsyncOpenAI:
    return await live.openai(await live.key("globex"))


def chat(*turns: tuple[str, str]) -> str:
    """The tiny model's template."""
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return said + "<|im_start|>assistant\n"


async def test_plain_response(live: Live, client: AsyncOpenAI) -> None:
    """A response has the text, the numbers, what was asked and what answered."""
    live.answers = ["hello 🚀"]

    made = await client.responses.create(
        model="tiny", input="hi", instructions="be short", metadata={"a": "b"}, max_output_tokens=50, temperature=0.5
    )

    assert made.output_text == "hello 🚀"
    assert (made.status, made.model, made.object, made.metadata) == ("completed", "tiny", "response", {"a": "b"})
    assert (made.temperature, made.top_p, made.max_output_tokens, made.store) == (0.5, 1.0, 50, True)
    assert live.prompts() == [chat(("system", "be short"), ("user", "hi"))]
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.usage.input_tokens == len(live.engine.requests[0].prompt)


async def test_stream_through_the_sdk(live: Live, client: AsyncOpenAI) -> None:
    """T43: the SDK's own accumulator accepts the order of our events, and gives the plain answer's text."""
    live.answers = ["the quick brown 🦊 jumps"]
    kinds: list[str] = []

    async with client.responses.stream(model="tiny", input="hi") as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_response()

    assert final.output_text == "the quick brown 🦊 jumps"
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 2
    assert (await client.responses.retrieve(final.id)).output_text == final.output_text


async def test_raw_stream_has_no_done_and_no_ids(live: Live) -> None:
    """T10 to T13, T43 on the wire: `event:` and `data:` only, each event closed, no [DONE]."""
    http = await live.http(await live.key("acme"))
    answer = await http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": True})

    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    assert "[DONE]" not in answer.text
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        assert [line.split(":")[0] for line in block.split("\n")] == ["event", "data"]


async def test_reaching_the_limit_is_incomplete(live: Live, client: AsyncOpenAI) -> None:
    """T36 for responses: text cut by max_output_tokens says so, plain and streaming."""
    live.answers = ["word " * 100] * 2

    plain = await client.responses.create(model="tiny", input="hi", max_output_tokens=16)
    streamed = [
        e async for e in await client.responses.create(model="tiny", input="hi", max_output_tokens=16, stream=True)
    ]

    assert streamed[-1].type == "response.incomplete"
    for made in (plain, streamed[-1].response):
        assert made.status == "incomplete"
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert made.usage is not None
        assert made.usage.output_tokens == 16


async def test_chain_without_instructions(live: Live, client: AsyncOpenAI) -> None:
    """T44: previous_response_id carries the whole talk, but not the instructions of the turn before."""
    live.answers = ["one", "two", "three"]
    first = await client.responses.create(model="tiny", input="1", instructions="like a pirate")
    second = await client.responses.create(model="tiny", input="2", previous_response_id=first.id)
    third = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": "3"}], previous_response_id=second.id, instructions="be kind"
    )

    said = [("user", "1"), ("assistant", "one"), ("user", "2")]
    assert live.prompts()[1:] == [
        chat(*said),
        chat(("system", "be kind"), *said, ("assistant", "two"), ("user", "3")),
    ]
    assert third.previous_response_id == second.id


async def test_a_response_is_read_as_it_was_answered(live: Live, client: AsyncOpenAI) -> None:
    """T46: the same id and the same object, from a plain answer and from a stream."""
    plain = await client.responses.create(model="tiny", input="hi")
    streamed = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]

    for made in (plain, streamed[-1].response):
        assert await client.responses.retrieve(made.id) == made


async def test_input_items(live: Live, client: AsyncOpenAI) -> None:
    """The items of the request's own input, in pages, each with an id."""
    made = await client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": str(i)} for i in range(5)],  # type: ignore[misc]
    )

    newest = await client.responses.input_items.list(made.id, limit=2)
    everything = [item async for item in client.responses.input_items.list(made.id, limit=2, order="asc")]

    assert [item.content[0].text for item in newest.data] == ["4", "3"]  # type: ignore[union-attr]
    assert [item.content[0].text for item in everything] == list("01234")  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list(made.id, after="msg_none")


async def test_store_false_can_not_be_continued(live: Live, client: AsyncOpenAI) -> None:
    """T47: what is not stored is neither read nor continued; the error names the field."""
    made = await client.responses.create(model="tiny", input="hi", store=False)

    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="tiny", input="more", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    assert len(live.engine.requests) == 1


async def test_a_tenant_without_retention_stores_nothing(live: Live, client: AsyncOpenAI) -> None:
    """T47 for `retention: none`: every response counts as store false, says so from its first event on, and is neither
    read nor continued; conversations are refused by name."""
    await (await live.http()).patch("/admin/v1/tenants/acme", json={"retention": "none"})

    plain = await client.responses.create(model="tiny", input="hi", store=True)
    events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]

    said = [plain, *(event.response for event in events if hasattr(event, "response"))]
    assert [made.store for made in said] == [False] * 4  # type: ignore[attr-defined]
    for made in said:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="tiny", input="more", previous_response_id=made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.conversations.create()
    assert refused.value.code == "zero_data_retention"


async def test_a_deleted_turn_breaks_the_chain_loudly(live: Live, client: AsyncOpenAI) -> None:
    """T48: 404 with its own code that names the missing turn; nothing is generated from half a talk."""
    first = await client.responses.create(model="tiny", input="1")
    second = await client.responses.create(model="tiny", input="2", previous_response_id=first.id)
    await client.responses.delete(first.id)

    with pytest.raises(openai.NotFoundError, match=first.id) as caught:
        await client.responses.create(model="tiny", input="3", previous_response_id=second.id)

    assert (caught.value.code, caught.value.param) == ("response_chain_broken", "previous_response_id")
    assert len(live.engine.requests) == 2


async def test_another_tenants_response_is_not_there(live: Live, client: AsyncOpenAI, stranger: AsyncOpenAI) -> None:
    """T45, AU-04: reading, continuing, cancelling, deleting and listing a foreign response is what an unknown id is."""
    mine = await client.responses.create(model="tiny", input="secret")
    unknown = store_module.new_id("resp")

    for call in (
        stranger.responses.retrieve,
        stranger.responses.delete,
        stranger.responses.cancel,
        stranger.responses.input_items.list,
        lambda id: stranger.responses.create(model="tiny", input="x", previous_response_id=id),
    ):
        said = []
        for response_id in (mine.id, unknown):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(response_id)  # type: ignore[operator]
            said.append(str(caught.value.body).replace(response_id, "ID"))
        assert said[0] == said[1]
    assert (await client.responses.retrieve(mine.id)).id == mine.id
    assert len(live.engine.requests) == 1


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "missing_required_parameter"),
    ({"input": 7}, "input", "invalid_type"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type", "invalid_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0].type", "invalid_value"),
    ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_value"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format", "unsupported_value"),
    ({"background": True}, "background", "unsupported_value"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "unsupported_value"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_value"),
    ({"service_tier": "flex"}, "service_tier", "unsupported_value"),
    ({"include": ["file_search_call.results"]}, "include", "unsupported_value"),
    ({"stream_options": {}}, "stream_options", "unsupported_value"),
    ({"max_output_tokens": 15}, "max_output_tokens", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {" 5": 1}}, "logit_bias", "invalid_value"),
    ({"truncation": "maybe"}, "truncation", "invalid_value"),
    ({"metadata": {"k": 1}}, "metadata.k", "invalid_value"),
    ({"previous_response_id": "resp_x", "conversation": "conv_x"}, "previous_response_id", "invalid_value"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
    ({"model": 1}, "model", "invalid_value"),
]  # fmt: skip


async def test_what_can_not_be_done_is_said(live: Live) -> None:
    """T1: 400 in OpenAI's envelope with the path of the field; nothing is ignored, nothing is generated."""
    http = await live.http(await live.key("acme"))
    for body, param, code in REFUSED:
        answer = await http.post("/v1/responses", json={"model": "tiny", "input": "hi"} | body)

        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert live.engine.requests == []


async def test_neutral_fields_are_accepted(live: Live, client: AsyncOpenAI) -> None:
    """What SDKs send by habit and asks for nothing is no error."""
    made = await client.responses.create(
        model="tiny", input="hi", tools=[], tool_choice="auto", parallel_tool_calls=False, service_tier="auto",
        text={"format": {"type": "text"}}, reasoning={"effort": None}, background=False, user="u", prompt_cache_key="k",
        safety_identifier="s", truncation="disabled", extra_body={"top_k": 5, "seed": 1, "min_p": 0.1},
    )  # fmt: skip

    assert made.status == "completed"
    params = live.engine.requests[0].params
    assert (params.top_k, params.seed, params.min_p) == (5, 1, 0.1)


async def test_output_can_be_sent_back_as_input(live: Live, client: AsyncOpenAI) -> None:
    """A client that keeps the talk itself sends model_dump() of our output, with all its extra nulls."""
    live.answers = ["one"]
    first = await client.responses.create(model="tiny", input="1", store=False)
    talk: list[Any] = [{"role": "user", "content": "1"}, *(item.model_dump() for item in first.output)]

    await client.responses.create(model="tiny", input=[*talk, {"role": "user", "content": "2"}])

    assert live.prompts()[1] == chat(("user", "1"), ("assistant", "one"), ("user", "2"))


async def test_engine_fault_in_mid_stream(live: Live, client: AsyncOpenAI) -> None:
    """T22, ST-07: the stream ends with response.failed and what was said; nothing is stored, the talk goes on."""
    live.answers = ["the quick brown fox"]
    talk = await client.conversations.create()
    live.engine.fail_after = 3

    events = [
        e async for e in await client.responses.create(model="tiny", input="hi", stream=True, conversation=talk.id)
    ]

    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.code == "server_error"
    assert events[-1].response.output_text
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(events[-1].response.id)
    live.engine.fail_after = None
    await client.responses.create(model="tiny", input="again", conversation=talk.id)
    assert live.prompts()[-1] == chat(("user", "again"))


async def test_a_client_that_leaves_frees_the_conversation(
    live: Live, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T49 for responses: the engine's work is aborted, nothing is stored, and the next turn may begin at once."""
    live.answers = ["word " * 200]
    live.engine._delay_s = 0.05
    talk = await client.conversations.create()
    stream = await client.responses.create(model="tiny", input="hi", stream=True, conversation=talk.id)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()

    live.engine._delay_s = 0.0
    for _ in range(600):
        await asyncio.sleep(0.05)
        with suppress(openai.ConflictError):
            await client.responses.create(model="tiny", input="next", conversation=talk.id)
            break

    assert live.engine.generations[0].closed
    assert live.prompts()[-1] == chat(("user", "next"))


async def test_truncation(live: Live, client: AsyncOpenAI) -> None:
    """A talk longer than the context is 400 context_length_exceeded; with truncation auto its oldest turns are
    dropped, and the instructions stay; nothing is dropped of what fits."""
    talk: list[Any] = []
    for i in range(60):
        talk += [
            {"role": "user", "content": f"question {i} " * 4},
            {"role": "assistant", "content": f"answer {i} " * 4},
        ]
    talk.append({"role": "user", "content": "and now?"})

    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input=talk, max_output_tokens=16)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    await client.responses.create(
        model="tiny", input=talk, max_output_tokens=16, truncation="auto", instructions="be kind"
    )

    greeted: list[Any] = [{"role": "assistant", "content": "welcome"}, {"role": "user", "content": "hi"}]
    await client.responses.create(model="tiny", input=greeted, truncation="auto")
    assert live.prompts()[1] == chat(("assistant", "welcome"), ("user", "hi"))
    prompt = live.prompts()[0]
    assert prompt.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nquestion")
    assert prompt.endswith("and now?<|im_end|>\n<|im_start|>assistant\n")
    assert live.engine.ready is not None
    room = live.engine.ready.max_model_len - 16
    turn = len(live.tokenizer.encode(talk[0]["content"] + talk[1]["content"], add_special_tokens=False)) + 16
    assert room - turn < len(live.engine.requests[0].prompt) <= room


async def test_logprobs(live: Live, client: AsyncOpenAI) -> None:
    """Asked for by `include`, logprobs reach the engine; what nobody asks for is not computed."""
    await client.responses.create(model="tiny", input="hi", include=["message.output_text.logprobs"], top_logprobs=3)
    await client.responses.create(model="tiny", input="hi")

    assert [request.params.logprobs for request in live.engine.requests] == [3, None]


async def test_unknown_models_are_404(live: Live, client: AsyncOpenAI) -> None:
    """HS-03 for responses: a name that is not callable is never answered by the base model."""
    for name in ("A-typo", "", "tiny ", "TINY", "tiny:A"):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model=name, input="hi")
        assert caught.value.code == "model_not_found"
    assert live.engine.requests == []


async def test_background_features_are_refused(live: Live, client: AsyncOpenAI) -> None:
    """Cancel, resuming streams, compaction and includes of tools belong to features we lack: 400, never 200 without
    effect."""
    made = await client.responses.create(model="tiny", input="hi")
    http = await live.http(await live.key("acme"))

    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(made.id)
    talk = await client.conversations.create()
    for call in (
        lambda: client.responses.retrieve(made.id, include=["file_search_call.results"]),
        lambda: client.responses.input_items.list(made.id, include=["file_search_call.results"]),
        lambda: client.conversations.items.list(talk.id, include=["file_search_call.results"]),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await call()  # type: ignore[no-untyped-call]
        assert caught.value.param == "include"
    assert await client.responses.retrieve(made.id, include=["message.output_text.logprobs"]) == made
    for answer in (
        await http.get(f"/v1/responses/{made.id}", params={"stream": "true"}),
        await http.get(f"/v1/responses/{made.id}", params={"starting_after": "3"}),
        await http.post("/v1/responses/compact", json={"model": "tiny"}),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"]


async def test_input_tokens_are_those_of_the_response(live: Live, client: AsyncOpenAI, stranger: AsyncOpenAI) -> None:
    """What is counted beforehand is what the response then reads: with instructions, what was said before, and in a
    conversation; counting generates nothing, holds nothing, and shows nobody else's."""
    conversation = await client.conversations.create(items=[{"type": "message", "role": "user", "content": "before"}])
    first = await client.responses.create(model="tiny", input="one")
    bodies: list[dict[str, Any]] = [
        {"input": "hello world"},
        {"input": [{"role": "user", "content": "hi"}], "instructions": "be short"},
        {"input": "two", "previous_response_id": first.id},
        {"input": "two", "conversation": conversation.id},
    ]

    for body in bodies:
        num_before = len(live.engine.requests)
        counted = await client.responses.input_tokens.count(model="tiny", **body)
        assert len(live.engine.requests) == num_before
        made = await client.responses.create(model="tiny", **body)
        assert made.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)

    for body in bodies[2:]:
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.input_tokens.count(model="tiny", **body)
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(model="nope", input="hi")
    with pytest.raises(openai.BadRequestError):
        await client.responses.input_tokens.count(model="tiny")
    assert (await client.responses.input_tokens.count(input="hi")).input_tokens > 0
