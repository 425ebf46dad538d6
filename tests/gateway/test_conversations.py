"""/v1/conversations through the unmodified openai client, and turns on them through /v1/responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from gateway.conversations import Conversations, new_id
from tests.gateway.live import Live
from tests.gateway.test_responses import chat


@pytest.fixture
async def client(live: Live) -> AsyncOpenAI:
    return await live.openai(await live.key("acme"))


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


async def test_life_of_a_conversation(live: Live, client: AsyncOpenAI) -> None:
    """Create, read, change, delete; then it is gone."""
    made = await client.conversations.create(metadata={"a": "b"}, items=[user("hi")])
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    assert await client.conversations.retrieve(made.id) == made

    changed = await client.conversations.update(made.id, metadata={"c": "d"})
    assert (changed.id, changed.metadata, changed.created_at) == (made.id, {"c": "d"}, made.created_at)

    gone = await client.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            await call(made.id)
        assert caught.value.code == "conversation_not_found"


async def test_items(live: Live, client: AsyncOpenAI) -> None:
    """Items are added in order, listed in pages either way, read and deleted singly."""
    talk = await client.conversations.create(items=[user(str(i)) for i in range(20)])
    added = await client.conversations.items.create(talk.id, items=[user("20"), user("21")])
    assert texts(added.data) == ["20", "21"]

    newest = await client.conversations.items.list(talk.id, limit=3)
    assert texts(newest.data) == ["21", "20", "19"]
    assert newest.has_more
    everything = [item async for item in client.conversations.items.list(talk.id, limit=7, order="asc")]
    assert texts(everything) == [str(i) for i in range(22)]

    one = added.data[0]
    assert await client.conversations.items.retrieve(one.id, conversation_id=talk.id) == one
    assert (await client.conversations.items.delete(one.id, conversation_id=talk.id)).id == talk.id
    with pytest.raises(openai.NotFoundError) as caught:
        await client.conversations.items.retrieve(one.id, conversation_id=talk.id)
    assert caught.value.code == "item_not_found"
    assert texts((await client.conversations.items.list(talk.id, limit=2)).data) == ["21", "19"]


async def test_turns_are_appended(live: Live, client: AsyncOpenAI) -> None:
    """A response in a conversation reads its items and appends its own, plain and streaming, input before output."""
    live.answers = ["one", "two"]
    talk = await client.conversations.create(items=[{"role": "system", "content": "be kind"}])

    first = await client.responses.create(model="tiny", input="1", conversation=talk.id)
    stream = await client.responses.create(model="tiny", input="2", conversation={"id": talk.id}, stream=True)
    last = [event async for event in stream][-1]

    assert last.type == "response.completed"
    assert first.conversation is not None
    assert first.conversation.id == talk.id
    assert live.prompts()[1] == chat(("system", "be kind"), ("user", "1"), ("assistant", "one"), ("user", "2"))
    items = await client.conversations.items.list(talk.id, order="asc")
    assert texts(items.data) == ["be kind", "1", "one", "2", "two"]
    assert [item.role for item in items.data] == ["system", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    assert items.data[2].id == first.output[0].id


async def test_a_turn_is_stored_before_its_end_is_told(
    live: Live, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has seen response.completed can read and continue at once, on a connection of its own, however long storing
    takes."""
    keep = Conversations.keep

    async def late(*values: Any, **options: Any) -> bool:
        await asyncio.sleep(0.05)
        return await keep(*values, **options)

    monkeypatch.setattr(Conversations, "keep", late)
    talk = await client.conversations.create()
    other = await live.openai(await live.key("acme"))
    for i in range(10):
        async for event in await client.responses.create(model="tiny", input=str(i), conversation=talk.id, stream=True):
            if event.type == "response.completed":
                assert (await other.responses.retrieve(event.response.id)).id == event.response.id
                assert len((await other.conversations.items.list(talk.id, limit=100)).data) == 2 * (i + 1)
                break


async def test_parallel_turns(live: Live, client: AsyncOpenAI) -> None:
    """DB-01: of 10 turns at once on one conversation the losers get 409 with Retry-After; what is kept alternates, and
    clients that try again all get their turn."""
    live.engine._delay_s = 0.01
    talk = await client.conversations.create()

    async def ask(asker: AsyncOpenAI, i: int) -> None:
        await asker.responses.create(model="tiny", input=f"q{i}", conversation=talk.id)

    outcomes = await asyncio.gather(*(ask(client, i) for i in range(10)), return_exceptions=True)
    lost = [outcome for outcome in outcomes if outcome is not None]
    for error in lost:
        assert isinstance(error, openai.ConflictError)
        assert error.code == "conversation_locked"
        assert int(error.response.headers["retry-after"]) >= 1
    num_won = 10 - len(lost)
    assert num_won >= 1
    patient = await live.openai(await live.key("acme"), max_retries=20)
    await asyncio.gather(*(ask(patient, i) for i in range(10, 13)))

    items = (await client.conversations.items.list(talk.id, limit=100, order="asc")).data
    assert [item.role for item in items] == ["user", "assistant"] * (num_won + 3)  # type: ignore[union-attr]
    for i in range(1, num_won + 3):
        assert live.prompts()[i].startswith(live.prompts()[i - 1])


async def test_fifty_conversations_do_not_mix(live: Live, client: AsyncOpenAI) -> None:
    """DB-01: parallel turns on 50 conversations all succeed, each reads only its own."""
    talks = [await client.conversations.create(items=[user(f"this is talk {i}")]) for i in range(50)]

    await asyncio.gather(
        *(client.responses.create(model="tiny", input=f"q{i}", conversation=talk.id) for i, talk in enumerate(talks))
    )

    assert sorted(live.prompts()) == sorted(chat(("user", f"this is talk {i}"), ("user", f"q{i}")) for i in range(50))
    for i, talk in enumerate(talks):
        items = await client.conversations.items.list(talk.id, order="asc")
        assert texts(items.data) == [f"this is talk {i}", f"q{i}", "ok"]


async def test_a_conversation_can_not_be_changed_under_a_turn(live: Live, client: AsyncOpenAI) -> None:
    """While a turn runs, new items and deletion are 409: the model's answer belongs to what it has read."""
    live.engine._delay_s = 0.05
    live.answers = ["word " * 40]
    talk = await client.conversations.create(items=[user("hi")])
    stream = await client.responses.create(model="tiny", input="1", conversation=talk.id, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break

    for attempt in (
        client.conversations.items.create(talk.id, items=[user("x")]),
        client.conversations.delete(talk.id),
    ):
        with pytest.raises(openai.ConflictError) as caught:
            await attempt
        assert caught.value.code == "conversation_locked"

    live.engine._delay_s = 0.0
    assert [event async for event in stream][-1].type == "response.completed"
    assert len((await client.conversations.items.list(talk.id)).data) == 3


async def test_a_foreign_conversation_is_not_there(live: Live, client: AsyncOpenAI) -> None:
    """AU-04, T45: reading, changing, continuing, listing, deleting another tenant's conversation is exactly what an
    unknown id is, and leaves it as it was."""
    stranger = await live.openai(await live.key("globex"))
    mine = await client.conversations.create(items=[user("secret")])
    item = (await client.conversations.items.list(mine.id)).data[0]
    unknown = new_id("conv")

    for call in (
        stranger.conversations.retrieve,
        stranger.conversations.delete,
        stranger.conversations.items.list,
        lambda id: stranger.conversations.update(id, metadata={"x": "y"}),
        lambda id: stranger.conversations.items.create(id, items=[user("x")]),
        lambda id: stranger.conversations.items.retrieve(item.id, conversation_id=id),
        lambda id: stranger.conversations.items.delete(item.id, conversation_id=id),
        lambda id: stranger.responses.create(model="tiny", input="x", conversation=id),
    ):
        said = []
        for conversation_id in (mine.id, unknown):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(conversation_id)  # type: ignore[operator]
            said.append(str(caught.value.body).replace(conversation_id, "ID"))
        assert said[0] == said[1]
    assert await client.conversations.retrieve(mine.id) == mine
    assert texts((await client.conversations.items.list(mine.id)).data) == ["secret"]
    assert live.engine.requests == []


async def test_bad_bodies_are_refused_by_path(live: Live) -> None:
    """T1: unknown fields, too many items, other than text, oversized metadata: 400 with the path."""
    http = await live.http(await live.key("acme"))
    talk = (await http.post("/v1/conversations", json={})).json()["id"]
    many = [user("x")] * 21

    for path, body, param in (
        ("", {"itemz": []}, "itemz"),
        ("", {"items": many}, "items"),
        ("", {"items": "hi"}, "items"),
        ("", {"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ("", {"metadata": {"k" * 65: "x"}}, "metadata"),
        ("", {"metadata": {"k": "x" * 513}}, "metadata.k"),
        (f"/{talk}", {}, "metadata"),
        (f"/{talk}", {"metadata": {}, "items": []}, "items"),
        (f"/{talk}/items", {}, "items"),
        (f"/{talk}/items", {"items": []}, "items"),
        (f"/{talk}/items", {"items": many}, "items"),
        (f"/{talk}/items", {"items": [user("a"), {"type": "item_reference", "id": "x"}]}, "items[1].type"),
    ):
        answer = await http.post(f"/v1/conversations{path}", json=body)
        assert answer.status_code == 400, (path, body, answer.text)
        assert answer.json()["error"]["param"].startswith(param)
    for query in ("limit=0", "limit=101", "order=up", "limit=x"):
        answer = await http.get(f"/v1/conversations/{talk}/items?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.split("=")[0]
    assert (await http.get(f"/v1/conversations/{talk}/items")).json()["data"] == []
