"""The state of Responses and Conversations, against a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway import conversations as module
from gateway.conversation_store import ConversationStore
from gateway.conversations import ConversationBusy, Conversations, Item, NotKept, NotStored, Turn, TurnLost, new_id
from gateway.items import as_messages, output_item, output_part, parse_items
from tenants.keys import Principal
from tenants.slots import TenantSlot
from tenants.state import Client, connect

TTL_S = 3600


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Client]:
    client = connect(redis_url)
    await client.flushdb()
    yield client
    await client.aclose()


class Policy:
    """What SQL would say of every tenant's retention, now."""

    def __init__(self) -> None:
        self.retention_s: int | None = None
        self.epoch = 1

    async def __call__(self, tenant: str) -> tuple[int | None, int]:
        return self.retention_s, self.epoch


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest.fixture
async def all_tenants(redis: Client, policy: Policy) -> ConversationStore:
    for tenant in ("acme", "globex"):
        await redis.set(TenantSlot(tenant).epoch, 1)
    return ConversationStore(redis, TTL_S, policy)


def of(store: ConversationStore, tenant: str, retention_s: int | None = None) -> Conversations:
    return store.of(Principal(tenant, "key", frozenset(), retention_s=retention_s, epoch=1))


@pytest.fixture
def store(all_tenants: ConversationStore) -> Conversations:
    return of(all_tenants, "acme")


@pytest.fixture
def foreign(all_tenants: ConversationStore) -> Conversations:
    return of(all_tenants, "globex")


def said(text: str) -> list[Item]:
    return parse_items(text, "input")


def response(answer: str, previous: str | None = None) -> dict[str, object]:
    item = output_item(new_id("msg"), "completed", [output_part(answer, [])])
    return {"id": new_id("resp"), "previous_response_id": previous, "output": [item]}


def texts(items: list[Item]) -> list[str]:
    return [message["content"] for message in as_messages(items)]


async def one_turn(store: Conversations, conversation_id: str, question: str, answer: str) -> None:
    turn = await store.begin(conversation_id)
    await store.keep(response(answer), said(question), turn, store=True)


async def test_a_stored_response_comes_back_as_it_was(store: Conversations) -> None:
    """T46: what is read later is what was answered, id included."""
    made = response("hello")
    await store.keep(made, said("hi"), None, store=True)

    stored = await store.get_response(made["id"])

    assert stored.response == made
    assert texts(stored.input_items) == ["hi"]


async def test_a_chain_is_read_in_order_and_in_one_call(store: Conversations, redis: Client) -> None:
    """previous_response_id gives all that was said before, oldest first, at the price of one call to Redis."""
    previous = None
    for i in range(50):
        made = response(f"answer {i}", previous)
        await store.keep(made, said(f"question {i}"), None, store=True)
        previous = made["id"]
    await store.chain(previous)  # the script is known from here on
    before = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]

    history = await store.chain(previous)

    assert texts(history.items) == [f"{kind} {i}" for i in range(50) for kind in ("question", "answer")]
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1


@pytest.mark.parametrize("is_conversation", [True, False], ids=["conversation", "chain"])
async def test_a_turn_costs_the_same_however_long_it_was(
    store: Conversations, redis: Client, is_conversation: bool
) -> None:
    """Beside the reading of what was said, the 100th turn calls Redis as often as the third and sends it as many bytes:
    nothing that was said before is written again."""
    conversation, previous = await store.create({}, []), None
    costs = []
    for i in range(100):
        before = await redis.info()
        turn = await store.begin(conversation.id) if is_conversation else None
        if previous is not None and turn is None:
            await store.chain(previous)
        made = response(f"answer {i:03}", None if is_conversation else previous)
        await store.keep(made, said(f"question {i:03}"), turn, store=True)
        previous, after = made["id"], await redis.info()
        costs.append([after[name] - before[name] for name in ("total_net_input_bytes", "total_commands_processed")])

    (bytes_3, calls_3), (bytes_100, calls_100) = costs[2], costs[99]
    assert calls_100 - calls_3 <= 4 * 100  # those that the script makes to read
    assert bytes_3 - 20 <= bytes_100 <= bytes_3 + 20


async def test_unknown_foreign_and_unstored_responses_are_one_case(
    store: Conversations, foreign: Conversations
) -> None:
    """AU-04, T45, T47: another tenant's id, an id never stored (store: false) and nonsense can't be told apart."""
    mine, unstored = response("mine"), response("unstored")
    await store.keep(mine, said("hi"), None, store=True)
    await foreign.keep(unstored, said("hi"), None, store=False)

    for response_id in (mine["id"], unstored["id"], new_id("resp"), "resp_{t:acme}:x", "", "*", "é\0\n"):
        for call in (foreign.get_response, foreign.delete_response, foreign.chain):
            with pytest.raises(NotStored) as caught:
                await call(response_id)
            assert caught.value.code in ("response_not_found", "previous_response_not_found")
    assert (await store.get_response(mine["id"])).response == mine


async def test_a_deleted_turn_in_mid_chain_is_named(store: Conversations) -> None:
    """T48: a chain with a hole is refused with its own code; it never continues with half of what was said."""
    first = response("one")
    await store.keep(first, said("1"), None, store=True)
    second = response("two", first["id"])
    await store.keep(second, said("2"), None, store=True)
    await store.delete_response(first["id"])

    with pytest.raises(NotStored, match=first["id"]) as caught:
        await store.chain(second["id"])

    assert caught.value.code == "response_chain_broken"
    assert (await store.get_response(second["id"])).response == second


async def test_keys_carry_the_tenant_and_expire(store: Conversations, redis: Client) -> None:
    """AU-04: every key lies in its tenant's hash slot; everything has a time to live, renewed by use."""
    made = response("hello")
    await store.keep(made, said("hi"), None, store=True)
    conversation = await store.create({"a": "b"}, said("hi"))
    await one_turn(store, conversation.id, "q", "a")
    keys = [key for key in await redis.keys("*") if not key.endswith(":epoch")]

    assert len(keys) == 5
    assert all(key.startswith("{t:acme}:") for key in keys)
    for key in keys:
        await redis.expire(key, 10)
    await store.chain(made["id"])
    await store.page(conversation.id, limit=1, order="asc", after=None)
    renewed = [key for key in keys if await redis.ttl(key) > 10]
    assert len(renewed) == 4  # the response of the conversation was not used


async def test_ten_turns_at_once_lose_nothing(store: Conversations) -> None:
    """DB-01: of parallel turns on one conversation the losers hear of it; what is kept alternates."""
    conversation = await store.create({}, [])
    have_tried = asyncio.Barrier(10)

    async def attempt(i: int) -> bool:
        try:
            turn = await store.begin(conversation.id)
        except ConversationBusy:
            await have_tried.wait()
            return False
        await have_tried.wait()
        await store.keep(response(f"a{i}"), said(f"q{i}"), turn, store=True)
        return True

    won = [i for i, ok in enumerate(await asyncio.gather(*(attempt(i) for i in range(10)))) if ok]
    page = await store.page(conversation.id, limit=100, order="asc", after=None)

    assert len(won) == 1
    assert texts(page.items) == [text for i in won for text in (f"q{i}", f"a{i}")]


async def test_turns_on_many_conversations_do_not_meet(store: Conversations) -> None:
    """DB-01: parallel turns on 50 conversations all succeed, each in its own."""
    made = [await store.create({}, []) for _ in range(50)]

    await asyncio.gather(*(one_turn(store, c.id, f"q{i}", f"a{i}") for i, c in enumerate(made)))

    for i, conversation in enumerate(made):
        page = await store.page(conversation.id, limit=10, order="asc", after=None)
        assert texts(page.items) == [f"q{i}", f"a{i}"]


async def test_a_killed_worker_frees_its_conversation(store: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that is neither kept nor released holds its conversation no longer than the lease; if its worker was
    only slow, it can't write over what came after."""
    conversation = await store.create({}, [])
    monkeypatch.setattr(module, "TURN_LEASE_S", 0.05)
    slow = await store.begin(conversation.id)
    await asyncio.sleep(0.1)

    await one_turn(store, conversation.id, "q", "a")
    with pytest.raises(TurnLost):
        await store.keep(response("late"), said("late"), slow, store=True)

    page = await store.page(conversation.id, limit=10, order="asc", after=None)
    assert texts(page.items) == ["q", "a"]


async def test_a_late_turn_on_an_unchanged_conversation_is_kept(
    store: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that ran out (a pause of the worker or of Redis) costs no turn if nobody else came."""
    conversation = await store.create({}, [])
    monkeypatch.setattr(module, "TURN_LEASE_S", 0.05)
    turn = await store.begin(conversation.id)
    await asyncio.sleep(0.1)

    await store.keep(response("a"), said("q"), turn, store=True)

    assert texts((await store.page(conversation.id, limit=10, order="asc", after=None)).items) == ["q", "a"]


async def test_renewing_holds_and_releasing_frees(store: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a turn is renewed nobody else gets in, not even to add or delete; once released, the next one may."""
    conversation = await store.create({}, said("hi"))
    item = (await store.page(conversation.id, limit=1, order="asc", after=None)).items[0]
    monkeypatch.setattr(module, "TURN_LEASE_S", 1.5)
    turn: Turn = await store.begin(conversation.id)
    for _ in range(4):
        await asyncio.sleep(0.5)
        await store.renew(turn)
        with pytest.raises(ConversationBusy):
            await store.begin(conversation.id)
    for blocked in (
        store.append(conversation.id, said("x")),
        store.delete_item(conversation.id, item["id"]),
        store.delete(conversation.id),
    ):
        with pytest.raises(ConversationBusy):
            await blocked

    await store.release(turn)
    await store.release(turn)

    await one_turn(store, conversation.id, "q", "a")


async def test_a_conversation_deleted_under_a_turn_stays_deleted(store: Conversations, redis: Client) -> None:
    """keep() never brings half a conversation back to life."""
    conversation = await store.create({}, [])
    turn = await store.begin(conversation.id)
    await redis.flushdb()
    await redis.set(TenantSlot("acme").epoch, 1)

    with pytest.raises(TurnLost):
        await store.keep(response("a"), said("q"), turn, store=True)

    assert await redis.keys("*") == [TenantSlot("acme").epoch]


async def test_a_chain_may_start_in_a_conversation(store: Conversations) -> None:
    """previous_response_id of a turn in a conversation continues from that turn, not from the conversation's end."""
    conversation = await store.create({}, said("zero"))
    turn = await store.begin(conversation.id)
    first = response("a1")
    await store.keep(first, said("q1"), turn, store=True)
    await one_turn(store, conversation.id, "q2", "a2")

    assert texts((await store.chain(first["id"])).items) == ["zero", "q1", "a1"]
    await store.delete(conversation.id)
    with pytest.raises(NotStored) as caught:
        await store.chain(first["id"])
    assert caught.value.code == "response_chain_broken"


async def test_items_come_in_pages(store: Conversations) -> None:
    """Walking the pages, forwards or backwards, gives each item once."""
    conversation = await store.create({}, [item for i in range(25) for item in said(str(i))])

    for order, expected in (("asc", range(25)), ("desc", range(24, -1, -1))):
        seen: list[str] = []
        after, has_more = None, True
        while has_more:
            page = await store.page(conversation.id, limit=10, order=order, after=after)
            seen += texts(page.items)
            after, has_more = page.items[-1]["id"], page.has_more
        assert seen == [str(i) for i in expected]


async def test_items_can_be_read_and_deleted_singly(store: Conversations) -> None:
    """One item: read, deleted, then 404; a cursor on a deleted item is refused, not ignored."""
    conversation = await store.create({"k": "v"}, said("one") + said("two"))
    first, second = (await store.page(conversation.id, limit=10, order="asc", after=None)).items

    assert await store.item(conversation.id, first["id"]) == first
    assert await store.delete_item(conversation.id, first["id"]) == conversation
    for call in (store.item, store.delete_item):
        with pytest.raises(NotStored) as caught:
            await call(conversation.id, first["id"])
        assert caught.value.code == "item_not_found"
    with pytest.raises(NotStored):
        await store.page(conversation.id, limit=10, order="asc", after=first["id"])
    turn = await store.begin(conversation.id)
    assert turn.history.items == [second]


async def test_a_conversation_of_another_tenant_is_not_found(store: Conversations, foreign: Conversations) -> None:
    """AU-04, T45: nothing can be done with another tenant's conversation, and nothing is changed by trying."""
    conversation = await store.create({"k": "v"}, said("secret"))
    item = (await store.page(conversation.id, limit=1, order="asc", after=None)).items[0]

    for attempt in (
        foreign.get(conversation.id),
        foreign.update(conversation.id, {}),
        foreign.delete(conversation.id),
        foreign.append(conversation.id, said("x")),
        foreign.page(conversation.id, limit=10, order="asc", after=None),
        foreign.item(conversation.id, item["id"]),
        foreign.delete_item(conversation.id, item["id"]),
        foreign.begin(conversation.id),
    ):
        with pytest.raises(NotStored) as caught:
            await attempt
        assert caught.value.code == "conversation_not_found"
    assert await store.get(conversation.id) == conversation


async def test_a_very_long_conversation_is_read_from_its_end(
    store: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No conversation is long enough to make one read unbounded: the newest items come, and the cut is told."""
    monkeypatch.setattr(module, "MAX_HISTORY_BYTES", 4000)
    conversation = await store.create({}, [item for i in range(100) for item in said(f"{i:03}")])

    turn = await store.begin(conversation.id)

    assert turn.history.is_cut
    found = texts(turn.history.items)
    assert found == [f"{i:03}" for i in range(100 - len(found), 100)]
    assert 5 < len(found) < 100


async def test_a_repeated_call_changes_nothing(store: Conversations) -> None:
    """The client sends a command again when a connection breaks: a turn that was begun or kept stays one turn."""
    conversation = await store.create({}, [])
    turn = await store.begin(conversation.id)
    made, question = response("a"), said("q")

    await store.keep(made, question, turn, store=True)
    await store.keep(made, question, turn, store=True)

    page = await store.page(conversation.id, limit=10, order="asc", after=None)
    assert texts(page.items) == ["q", "a"]


async def test_scripts_survive_a_flush(store: Conversations, redis: Client) -> None:
    """DB-07: a Redis that has forgotten the scripts is given them again."""
    conversation = await store.create({}, [])
    await redis.script_flush()

    await one_turn(store, conversation.id, "q", "a")

    page = await store.page(conversation.id, limit=10, order="asc", after=None)
    assert texts(page.items) == ["q", "a"]


async def test_a_tenant_may_want_less(all_tenants: ConversationStore, redis: Client) -> None:
    """Retention in hours bounds the time to live; it never makes it longer than the settings say."""
    for retention_s, expected in ((60, 60), (10 * TTL_S, TTL_S), (None, TTL_S)):
        texts_of = of(all_tenants, "acme", retention_s)
        made = response("hello")
        await texts_of.keep(made, said("hi"), None, store=True)
        talk = await texts_of.create({}, said("hi"))
        for key in (f"{{t:acme}}:resp:{made['id']}", f"{{t:acme}}:conv:{talk.id}", f"{{t:acme}}:conv:{talk.id}:items"):
            assert expected - 5 < await redis.ttl(key) <= expected


async def test_nothing_is_kept_of_a_tenant_without_retention(all_tenants: ConversationStore, redis: Client) -> None:
    """Nothing is written, nothing that may still lie there is read, and conversations are refused by name."""
    before = of(all_tenants, "acme")
    talk, made = await before.create({}, said("hi")), response("hello")
    await before.keep(made, said("hi"), None, store=True)
    keys = set(await redis.keys("*"))
    silent = of(all_tenants, "acme", 0)

    assert not await silent.keep(response("x"), said("x"), None, store=True)
    for write in (silent.create({}, []), silent.append(talk.id, said("x")), silent.update(talk.id, {})):
        with pytest.raises(NotKept):
            await write
    for read in (
        silent.get_response(made["id"]),
        silent.chain(made["id"]),
        silent.get(talk.id),
        silent.item(talk.id, "msg_x"),
        silent.begin(talk.id),
        silent.page(talk.id, limit=10, order="asc", after=None),
    ):
        with pytest.raises(NotStored):
            await read
    assert set(await redis.keys("*")) == keys


async def test_retention_acts_on_what_is_under_way(
    all_tenants: ConversationStore, redis: Client, policy: Policy
) -> None:
    """A turn that began before the tenant wanted less is kept only as it wants now; what was stored is cut short or
    erased, and nobody who still knows the old wish makes it live longer again."""
    old, talk_store = of(all_tenants, "acme"), of(all_tenants, "acme")
    made, talk = response("hello"), await old.create({}, said("hi"))
    await old.keep(made, said("hi"), None, store=True)
    turn = await talk_store.begin(talk.id)
    policy.retention_s, policy.epoch = 60, 2
    await redis.incr(TenantSlot("acme").epoch)
    await all_tenants.limit("acme", 60)

    await old.chain(made["id"])
    assert 0 < await redis.ttl(f"{{t:acme}}:resp:{made['id']}") <= 60
    assert await old.keep(response("later"), said("x"), None, store=True)
    for key in await redis.keys("*:resp:*") + await redis.keys("*:conv:*"):
        assert await redis.ttl(key) <= 60

    policy.retention_s, policy.epoch = 0, 3
    await redis.incr(TenantSlot("acme").epoch)
    await all_tenants.limit("acme", 0)
    assert not await old.keep(response("lost"), said("x"), None, store=True)
    with pytest.raises(TurnLost):
        await talk_store.keep(response("lost"), said("x"), turn, store=True)
    assert {*await redis.keys("*")} == {TenantSlot("acme").epoch, TenantSlot("globex").epoch}
