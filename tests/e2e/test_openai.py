"""The `openai` package, unmodified, against real processes: everything it calls here, and each of its error classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.callers import files_of
from tests.e2e.process import ChorusProcess
from tests.tiny import tiny_adapter

BASE, ADAPTER = "tiny-llama", "voice"
CHAT: Any = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "the quick brown fox"}]
MODELS = pytest.mark.parametrize("model", [BASE, ADAPTER])


@pytest.fixture(scope="module")
def key(serving: ChorusProcess, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tiny_adapter(tmp_path_factory.mktemp("openai") / "a", tiny_llama, seed=90)
    made = serving.make_key("openai-co")
    answer = serving.admin("POST", "tenants/openai-co/adapters", files=files_of(path), data={"name": ADAPTER})
    assert answer.status_code == 201, answer.text
    return made


@pytest.fixture
def client(serving: ChorusProcess, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=key, max_retries=0, timeout=60) as made:
        yield made


@MODELS
def test_chat(client: openai.OpenAI, model: str) -> None:
    """A chat, plain and streaming, says the same, with the same usage."""
    options: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert plain.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-1].choices == []
    assert {chunk.model for chunk in chunks} == {plain.model} == {model}
    assert plain.choices[0].finish_reason == chunks[-2].choices[0].finish_reason


def test_the_stream_helper(client: openai.OpenAI) -> None:
    """T14, T17, T18: client.chat.completions.stream() puts three choices together, with usage."""
    with client.chat.completions.stream(
        model=BASE, messages=CHAT, n=3, temperature=1, seed=1, stop=["e", "a", "o", " "], max_tokens=500,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        final = stream.get_final_completion()

    assert [choice.index for choice in final.choices] == [0, 1, 2]
    assert all(choice.message.role == "assistant" and choice.finish_reason for choice in final.choices)
    assert final.usage is not None
    assert 3 <= final.usage.completion_tokens <= 1500


@MODELS
def test_completions(client: openai.OpenAI, model: str) -> None:
    """T34, T35: four kinds of prompt; several prompts and choices in order; plain and streaming."""
    options: dict[str, Any] = {"model": model, "max_tokens": 5, "temperature": 0}
    ids = [10, 20, 30]
    one = client.completions.create(prompt="the fox", **options)
    many = client.completions.create(prompt=["the fox", "the dog"], n=2, **options)
    as_ids = client.completions.create(prompt=ids, **options)
    lists = client.completions.create(prompt=[ids, [40, 50]], **options)
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=[ids, [40, 50]], stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text

    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text == one.choices[0].text
    assert lists.choices[0].text == as_ids.choices[0].text
    assert streamed == [choice.text for choice in lists.choices]


def test_models(client: openai.OpenAI) -> None:
    """T8, T9: what may be called is listed, and found by its id."""
    listed = {model.id for model in client.models.list()}

    assert listed == {BASE, ADAPTER}
    assert [client.models.retrieve(name).id for name in sorted(listed)] == sorted(listed)


@MODELS
def test_responses(client: openai.OpenAI, model: str) -> None:
    """A turn, its stream, its retrieval, its continuation, its items, its deletion."""
    options: dict[str, Any] = {"model": model, "max_output_tokens": 16, "temperature": 0}
    first = client.responses.create(input="hello", instructions="Be short.", **options)
    with client.responses.stream(input="hello", instructions="Be short.", **options) as stream:
        events = list(stream)
    second = client.responses.create(input="and then?", previous_response_id=first.id, **options)

    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.output_tokens
    assert [item.type for item in client.responses.input_items.list(first.id)] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_conversations(client: openai.OpenAI) -> None:
    """Made, filled, continued by a turn, read, changed, emptied, deleted."""
    talk = client.conversations.create(items=[{"role": "user", "content": "hello"}], metadata={"topic": "foxes"})
    answer = client.responses.create(model=BASE, input="who are you?", conversation=talk.id, max_output_tokens=16)
    client.conversations.items.create(talk.id, items=[{"role": "user", "content": "bye"}])
    items = client.conversations.items.list(talk.id, order="asc").data

    assert [item.role for item in items] == ["user", "user", "assistant", "user"]  # type: ignore[union-attr]
    assert items[2].content[0].text == answer.output_text  # type: ignore[union-attr]
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "foxes"}
    assert client.conversations.update(talk.id, metadata={"topic": "dogs"}).metadata == {"topic": "dogs"}
    first = str(items[0].id)
    assert client.conversations.items.retrieve(first, conversation_id=talk.id).id == first
    client.conversations.items.delete(first, conversation_id=talk.id)
    assert len(client.conversations.items.list(talk.id).data) == 3
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(talk.id)


def test_errors_that_a_request_makes(serving: ChorusProcess, client: openai.OpenAI, tenant: str) -> None:
    """HT-08: 400, 401, 403, 404, 409, 422, 429 are the client's own classes, with code and param."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=BASE, messages=CHAT, temperature=3)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=BASE, prompt=[5] * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError) as unknown:
        client.with_options(api_key="chorus_live_nobody").models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError):
        client.with_options(api_key=serving.admin_key).models.list()
    with pytest.raises(openai.NotFoundError) as lost:
        client.chat.completions.create(model="nobody", messages=CHAT)
    assert lost.value.code == "model_not_found"
    writer = serving.make_key(tenant)
    made = serving.admin("POST", f"tenants/{tenant}/keys", json={"name": "w", "scopes": ["adapters:write"]}).json()[
        "key"
    ]
    with pytest.raises(openai.UnprocessableEntityError):
        client.with_options(api_key=made).post(
            "/adapters", cast_to=object, files={"config": b"{}", "weights": b"x"}, body={"name": "bad"},
            options={"headers": {"Content-Type": "multipart/form-data"}},
        )  # fmt: skip
    serving.admin("PATCH", f"tenants/{tenant}", json={"limits": {"requests_per_minute": 1}})
    limited = client.with_options(api_key=writer)
    limited.completions.create(model=BASE, prompt="x", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as much:
        limited.completions.create(model=BASE, prompt="x", max_tokens=1)
    assert much.value.code == "rate_limit_exceeded"
    assert int(much.value.response.headers["retry-after"]) >= 1


def test_a_conflict(client: openai.OpenAI) -> None:
    """409: a second turn while one runs on the conversation; the client's own retries get it through."""
    talk = client.conversations.create()
    stream = client.responses.create(
        model=BASE, input="tell me more", conversation=talk.id, stream=True, max_output_tokens=1500,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    with pytest.raises(openai.ConflictError) as busy:
        client.responses.create(model=BASE, input="me too", conversation=talk.id, max_output_tokens=16)
    stream.close()

    assert busy.value.code == "conversation_locked"
    patient = client.with_options(max_retries=10)
    assert patient.responses.create(model=BASE, input="now?", conversation=talk.id, max_output_tokens=16).output_text


def test_a_connection_that_fails(client: openai.OpenAI) -> None:
    """APIConnectionError and APITimeoutError are the client's for a server that is not there, or slow."""
    with pytest.raises(openai.APIConnectionError):
        client.with_options(base_url="http://127.0.0.1:9/v1").models.list()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).completions.create(model=BASE, prompt="x", max_tokens=1000)
