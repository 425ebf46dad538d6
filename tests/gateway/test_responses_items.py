"""Items in and out, and the order of a response's events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.items import ItemError, as_messages, parse_items
from gateway.response_events import ResponseWriter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BASE = {
    "id": "resp_1", "object": "response", "created_at": 1, "status": "in_progress", "model": "m", "output": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
}  # fmt: skip
USAGE = {
    "input_tokens": 1, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 3,
}  # fmt: skip


def events(raw: bytes) -> list[dict[str, Any]]:
    """Server-sent events as the wire has them: `event:` and `data:` agree, one blank line ends each."""
    assert raw.endswith(b"\n\n")
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_strings_and_messages_become_items() -> None:
    """All ways to write text give the same messages; every item has an id of ours."""
    items = parse_items(
        [
            {"role": "user", "content": "a"},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "text", "text": "d"}]},
            {"type": "message", "id": "msg_theirs", "role": "assistant", "status": "completed", "phase": None,
             "content": [{"type": "output_text", "text": "e", "annotations": [], "logprobs": None}]},
        ],
        "input",
    )  # fmt: skip

    assert as_messages(parse_items("hi", "input")) == [{"role": "user", "content": "hi"}]
    assert [(m["role"], m["content"]) for m in as_messages(items)] == [
        ("user", "a"),
        ("developer", "b"),
        ("user", "cd"),
        ("assistant", "e"),
    ]
    ids = [item["id"] for item in items]
    assert len(set(ids)) == 4
    assert all(len(item_id) == 52 and item_id.startswith("msg_") for item_id in ids)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (7, "input"),
        (None, "input"),
        ({}, "input"),
        (["hi"], "input[0]"),
        ([{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "x"}], "input[1].type"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": []}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": ["a"]}], "input[0].content[0]"),
        ([{"role": "user", "content": "a", "name": "bob"}], "input[0].name"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}], "input[0].content[0].x"),
    ],
)
def test_what_is_not_text_is_refused_by_path(value: object, param: str) -> None:
    """Nothing of an item is dropped in silence: the error says where it lies."""
    with pytest.raises(ItemError) as caught:
        parse_items(value, "input")

    assert caught.value.param == param


@pytest.mark.parametrize(("reason", "last"), [("stop", "response.completed"), ("length", "response.incomplete")])
def test_events_come_in_the_order_that_clients_need(reason: str, last: str) -> None:
    """T43: created first, parts announced before their deltas, one terminal event, numbers without a gap, and every
    event is what the SDK's types ask for."""
    writer = ResponseWriter(dict(BASE))
    raw = writer.open() + writer.add("he") + writer.add("llo 🚀")
    writer.finish(reason, USAGE)
    found = events(raw + writer.close())

    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        last,
    ]
    assert [event["sequence_number"] for event in found] == list(range(10))
    for event in found:
        EVENT.validate_python(event)
    final = Response.model_validate(found[-1]["response"])
    assert final.output_text == "hello 🚀"
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert (final.incomplete_details is None) == (reason == "stop")


def test_a_failure_is_the_last_event_and_keeps_the_text() -> None:
    """T22 for responses: a fault in mid-stream ends with response.failed; the text so far is in it."""
    writer = ResponseWriter(dict(BASE))
    found = events(writer.open() + writer.add("he") + writer.fail("the engine stopped"))

    EVENT.validate_python(found[-1])
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "the engine stopped"}
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "he"
