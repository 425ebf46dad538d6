"""The state of Responses and Conversations, against a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway import conversations as module
from gateway.conversations import ConversationBusy, ConversationStore, Item, NotStored, Turn, TurnLost, new_id
from gateway.items import as_messages, output_item, output_part, parse_items
from tenants.state import Client, connect

TTL_S = 3600


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Client]:
    client = connect(redis_url)
    await client.flushdb()
    yield client
    await client.aclose()


@pytest.fixture
def store(redis: Client) -> ConversationStore:
    return ConversationStore(redis, TTL_S)


def said(text: str) -> list[Item]:
    return parse_items(text, "input")


def response(answer: str, previous: str | None = None) -> dict[str, object]:
    item = output_item(new_id("msg"), "completed", [output_part(answer, [])])
    return {"id": new_id("resp"), "previous_response_id": previous, "output": [item]}


def texts(items: list[Item]) -> list[str]:
    return [message["content"] for message in as_messages(items)]


async def one_turn(store: ConversationStore, tenant: str, conversation_id: str, question: str, answer: str) -> None:
    turn = await store.begin(tenant, conversation_id)
    await store.keep(tenant, response(answer), said(question), turn, store=True)


async def test_a_stored_response_comes_back_as_it_was(store: ConversationStore) -> None:
    """T46: what is read later is what was answered, id included."""
    made = response("hello")
    await store.keep("acme", made, said("hi"), None, store=True)

    stored = await store.get_response("acme", made["id"])

    assert stored.response == made
    assert texts(stored.input_items) == ["hi"]


async def test_a_chain_is_read_in_order_and_in_one_call(store: ConversationStore, redis: Client) -> None:
    """previous_response_id gives all that was said before, oldest first, at the price of one call to Redis."""
    previous = None
    for i in range(50):
        made = response(f"answer {i}", previous)
        await store.keep("acme", made, said(f"question {i}"), None, store=True)
        previous = made["id"]
    await store.chain("acme", previous)  # the script is known from here on
    before = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]

    history = await store.chain("acme", previous)

    assert texts(history.items) == [f"{kind} {i}" for i in range(50) for kind in ("question", "answer")]
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1


async def test_unknown_foreign_and_unstored_responses_are_one_case(store: ConversationStore) -> None:
    """AU-04, T45, T47: another tenant's id, an id never stored (store: false) and nonsense can't be told apart."""
    mine, unstored = response("mine"), response("unstored")
    await store.keep("acme", mine, said("hi"), None, store=True)
    await store.keep("globex", unstored, said("hi"), None, store=False)

    for response_id in (mine["id"], unstored["id"], new_id("resp"), "resp_{t:acme}:x", "", "*", "é\0\n"):
        for call in (store.get_response, store.delete_response, store.chain):
            with pytest.raises(NotStored) as caught:
                await call("globex", response_id)
            assert caught.value.code in ("response_not_found", "previous_response_not_found")
    assert (await store.get_response("acme", mine["id"])).response == mine


async def test_a_deleted_turn_in_mid_chain_is_named(store: ConversationStore) -> None:
    """T48: a chain with a hole is refused with its own code; it never continues with half of what was said."""
    first = response("one")
    await store.keep("acme", first, said("1"), None, store=True)
    second = response("two", first["id"])
    await store.keep("acme", second, said("2"), None, store=True)
    await store.delete_response("acme", first["id"])

    with pytest.raises(NotStored, match=first["id"]) as caught:
        await store.chain("acme", second["id"])

    assert caught.value.code == "response_chain_broken"
    assert (await store.get_response("acme", second["id"])).response == second


async def test_keys_carry_the_tenant_and_expire(store: ConversationStore, redis: Client) -> None:
    """AU-04: every key lies in its tenant's hash slot; everything has a time to live, renewed by use."""
    made = response("hello")
    await store.keep("acme", made, said("hi"), None, store=True)
    conversation = await store.create("acme", {"a": "b"}, said("hi"))
    await one_turn(store, "acme", conversation.id, "q", "a")
    keys = await redis.keys("*")

    assert len(keys) == 5
    assert all(key.startswith("{t:acme}:") for key in keys)
    for key in keys:
        await redis.expire(key, 10)
    await store.chain("acme", made["id"])
    await store.page("acme", conversation.id, limit=1, order="asc", after=None)
    renewed = [key for key in keys if await redis.ttl(key) > 10]
    assert len(renewed) == 4  # the response of the conversation was not used


async def test_ten_turns_at_once_lose_nothing(store: ConversationStore) -> None:
    """DB-01: of parallel turns on one conversation the losers hear of it; what is kept alternates."""
    conversation = await store.create("acme", {}, [])

    async def attempt(i: int) -> bool:
        try:
            turn = await store.begin("acme", conversation.id)
        except ConversationBusy:
            return False
        await asyncio.sleep(0.01)
        await store.keep("acme", response(f"a{i}"), said(f"q{i}"), turn, store=True)
        return True

    won = [i for i, ok in enumerate(await asyncio.gather(*(attempt(i) for i in range(10)))) if ok]
    page = await store.page("acme", conversation.id, limit=100, order="asc", after=None)

    assert len(won) == 1
    assert texts(page.items) == [text for i in won for text in (f"q{i}", f"a{i}")]


async def test_turns_on_many_conversations_do_not_meet(store: ConversationStore) -> None:
    """DB-01: parallel turns on 50 conversations all succeed, each in its own."""
    made = [await store.create("acme", {}, []) for _ in range(50)]

    await asyncio.gather(*(one_turn(store, "acme", c.id, f"q{i}", f"a{i}") for i, c in enumerate(made)))

    for i, conversation in enumerate(made):
        page = await store.page("acme", conversation.id, limit=10, order="asc", after=None)
        assert texts(page.items) == [f"q{i}", f"a{i}"]


async def test_a_killed_worker_frees_its_conversation(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that is neither kept nor released holds its conversation no longer than the lease; if its worker was
    only slow, it can't write over what came after."""
    conversation = await store.create("acme", {}, [])
    monkeypatch.setattr(module, "TURN_LEASE_S", 0.05)
    slow = await store.begin("acme", conversation.id)
    await asyncio.sleep(0.1)

    await one_turn(store, "acme", conversation.id, "q", "a")
    with pytest.raises(TurnLost):
        await store.keep("acme", response("late"), said("late"), slow, store=True)

    page = await store.page("acme", conversation.id, limit=10, order="asc", after=None)
    assert texts(page.items) == ["q", "a"]


async def test_a_late_turn_on_an_unchanged_conversation_is_kept(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that ran out (a pause of the worker or of Redis) costs no turn if nobody else came."""
    conversation = await store.create("acme", {}, [])
    monkeypatch.setattr(module, "TURN_LEASE_S", 0.05)
    turn = await store.begin("acme", conversation.id)
    await asyncio.sleep(0.1)

    await store.keep("acme", response("a"), said("q"), turn, store=True)

    assert texts((await store.page("acme", conversation.id, limit=10, order="asc", after=None)).items) == ["q", "a"]


async def test_renewing_holds_and_releasing_frees(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a turn is renewed nobody else gets in, not even to add or delete; once released, the next one may."""
    conversation = await store.create("acme", {}, said("hi"))
    item = (await store.page("acme", conversation.id, limit=1, order="asc", after=None)).items[0]
    monkeypatch.setattr(module, "TURN_LEASE_S", 0.2)
    turn: Turn = await store.begin("acme", conversation.id)
    for _ in range(4):
        await asyncio.sleep(0.1)
        await store.renew("acme", turn)
        with pytest.raises(ConversationBusy):
            await store.begin("acme", conversation.id)
    for blocked in (
        store.append("acme", conversation.id, said("x")),
        store.delete_item("acme", conversation.id, item["id"]),
        store.delete("acme", conversation.id),
    ):
        with pytest.raises(ConversationBusy):
            await blocked

    await store.release("acme", turn)
    await store.release("acme", turn)

    await one_turn(store, "acme", conversation.id, "q", "a")


async def test_a_conversation_deleted_under_a_turn_stays_deleted(store: ConversationStore, redis: Client) -> None:
    """keep() never brings half a conversation back to life."""
    conversation = await store.create("acme", {}, [])
    turn = await store.begin("acme", conversation.id)
    await redis.flushdb()

    with pytest.raises(TurnLost):
        await store.keep("acme", response("a"), said("q"), turn, store=True)

    assert await redis.keys("*") == []


async def test_a_chain_may_start_in_a_conversation(store: ConversationStore) -> None:
    """previous_response_id of a turn in a conversation continues from that turn, not from the conversation's end."""
    conversation = await store.create("acme", {}, said("zero"))
    turn = await store.begin("acme", conversation.id)
    first = response("a1")
    await store.keep("acme", first, said("q1"), turn, store=True)
    await one_turn(store, "acme", conversation.id, "q2", "a2")

    assert texts((await store.chain("acme", first["id"])).items) == ["zero", "q1", "a1"]
    await store.delete("acme", conversation.id)
    with pytest.raises(NotStored) as caught:
        await store.chain("acme", first["id"])
    assert caught.value.code == "response_chain_broken"


async def test_items_come_in_pages(store: ConversationStore) -> None:
    """Walking the pages, forwards or backwards, gives each item once."""
    conversation = await store.create("acme", {}, [item for i in range(25) for item in said(str(i))])

    for order, expected in (("asc", range(25)), ("desc", range(24, -1, -1))):
        seen: list[str] = []
        after, has_more = None, True
        while has_more:
            page = await store.page("acme", conversation.id, limit=10, order=order, after=after)
            seen += texts(page.items)
            after, has_more = page.items[-1]["id"], page.has_more
        assert seen == [str(i) for i in expected]


async def test_items_can_be_read_and_deleted_singly(store: ConversationStore) -> None:
    """One item: read, deleted, then 404; a cursor on a deleted item is refused, not ignored."""
    conversation = await store.create("acme", {"k": "v"}, said("one") + said("two"))
    first, second = (await store.page("acme", conversation.id, limit=10, order="asc", after=None)).items

    assert await store.item("acme", conversation.id, first["id"]) == first
    assert await store.delete_item("acme", conversation.id, first["id"]) == conversation
    for call in (store.item, store.delete_item):
        with pytest.raises(NotStored) as caught:
            await call("acme", conversation.id, first["id"])
        assert caught.value.code == "item_not_found"
    with pytest.raises(NotStored):
        await store.page("acme", conversation.id, limit=10, order="asc", after=first["id"])
    turn = await store.begin("acme", conversation.id)
    assert turn.history.items == [second]


async def test_a_conversation_of_another_tenant_is_not_found(store: ConversationStore) -> None:
    """AU-04, T45: nothing can be done with another tenant's conversation, and nothing is changed by trying."""
    conversation = await store.create("acme", {"k": "v"}, said("secret"))
    item = (await store.page("acme", conversation.id, limit=1, order="asc", after=None)).items[0]

    for attempt in (
        store.get("globex", conversation.id),
        store.update("globex", conversation.id, {}),
        store.delete("globex", conversation.id),
        store.append("globex", conversation.id, said("x")),
        store.page("globex", conversation.id, limit=10, order="asc", after=None),
        store.item("globex", conversation.id, item["id"]),
        store.delete_item("globex", conversation.id, item["id"]),
        store.begin("globex", conversation.id),
    ):
        with pytest.raises(NotStored) as caught:
            await attempt
        assert caught.value.code == "conversation_not_found"
    assert await store.get("acme", conversation.id) == conversation


async def test_a_very_long_conversation_is_read_from_its_end(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No conversation is long enough to make one read unbounded: the newest items come, and the cut is told."""
    monkeypatch.setattr(module, "MAX_HISTORY_BYTES", 4000)
    conversation = await store.create("acme", {}, [item for i in range(100) for item in said(f"{i:03}")])

    turn = await store.begin("acme", conversation.id)

    assert turn.history.is_cut
    found = texts(turn.history.items)
    assert found == [f"{i:03}" for i in range(100 - len(found), 100)]
    assert 5 < len(found) < 100


async def test_a_repeated_call_changes_nothing(store: ConversationStore) -> None:
    """The client sends a command again when a connection breaks: a turn that was begun or kept stays one turn."""
    conversation = await store.create("acme", {}, [])
    turn = await store.begin("acme", conversation.id)
    made, question = response("a"), said("q")

    await store.keep("acme", made, question, turn, store=True)
    await store.keep("acme", made, question, turn, store=True)

    page = await store.page("acme", conversation.id, limit=10, order="asc", after=None)
    assert texts(page.items) == ["q", "a"]


async def test_scripts_survive_a_flush(store: ConversationStore, redis: Client) -> None:
    """DB-07: a Redis that has forgotten the scripts is given them again."""
    conversation = await store.create("acme", {}, [])
    await redis.script_flush()

    await one_turn(store, "acme", conversation.id, "q", "a")

    page = await store.page("acme", conversation.id, limit=10, order="asc", after=None)
    assert texts(page.items) == ["q", "a"]
