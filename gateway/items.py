"""Items of the Responses and Conversations APIs: what clients send → what we store → messages for the chat template.

Text only: whatever else an item may carry is refused by name, never dropped. Knows no storage and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.conversations import Item, new_id

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
UNKNOWN = "unknown_parameter"
ITEM_FIELDS = {"type", "role", "content", "id", "status", "phase"}
PART_FIELDS = {"type", "text", "annotations", "logprobs"}


class ItemError(ValueError):
    """An item can't be understood. `param` is the JSON path of the fault, `code` is OpenAI's."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.code = code


def parse_items(value: object, param: str, ignored: list[str] | None = None) -> list[Item]:
    """A string (one user message) or a list of messages → items to store, each with a fresh id. With `ignored`, keys
    that nobody knows are left out, and their paths noted there."""
    if isinstance(value, str):
        return [_item("user", [value])]
    if not isinstance(value, list):
        raise ItemError(param, "must be a string or a list of items", "invalid_type")
    return [_parse_item(item, f"{param}[{i}]", ignored) for i, item in enumerate(value)]


def as_messages(items: Sequence[Item]) -> list[dict[str, str]]:
    """Items → [{"role", "content"}] for the chat template; the parts of one item are one text."""
    return [{"role": item["role"], "content": "".join(part["text"] for part in item["content"])} for item in items]


def output_item(item_id: str, status: str, parts: list[dict[str, Any]]) -> Item:
    """The model's message. `status` is in_progress, completed or incomplete."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": parts}


def output_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _parse_item(value: object, param: str, ignored: list[str] | None) -> Item:
    if not isinstance(value, dict):
        raise ItemError(param, "must be an object", "invalid_type")
    kind = value.get("type")
    if kind not in ("message", None):
        raise ItemError(f"{param}.type", f"items of type {_shown(kind)} are not supported: only text messages are")
    _check_keys(value, ITEM_FIELDS, param, ignored)
    if value.get("role") not in ROLES:
        raise ItemError(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    content = value.get("content")
    if isinstance(content, str):
        return _item(value["role"], [content])
    if not isinstance(content, list) or not content:
        raise ItemError(f"{param}.content", "must be a string or a list of at least one part", "invalid_type")
    texts = [_parse_part(part, f"{param}.content[{i}]", ignored) for i, part in enumerate(content)]
    return _item(value["role"], texts)


def _parse_part(value: object, param: str, ignored: list[str] | None) -> str:
    if not isinstance(value, dict):
        raise ItemError(param, "must be an object", "invalid_type")
    if value.get("type") not in TEXT_PARTS:
        raise ItemError(f"{param}.type", f"content of type {_shown(value.get('type'))} is not supported: only text is")
    _check_keys(value, PART_FIELDS, param, ignored)
    text = value.get("text")
    if not isinstance(text, str):
        raise ItemError(f"{param}.text", "must be a string", "invalid_type")
    return text


def _check_keys(value: dict[str, Any], known: set[str], param: str, ignored: list[str] | None) -> None:
    """A key that we don't know is refused, unless it is null: SDK objects sent back as input carry such keys."""
    for key in value:
        if key in known or value[key] is None:
            continue
        path = f"{param}.{str(key)[:64]}"
        if ignored is None:
            raise ItemError(path, "unknown parameter", UNKNOWN)
        ignored.append(path)


def _item(role: str, texts: list[str]) -> Item:
    if role == "assistant":
        return output_item(new_id("msg"), "completed", [output_part(text, []) for text in texts])
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"id": new_id("msg"), "type": "message", "role": role, "status": "completed", "content": parts}


def _shown(value: object) -> str:
    return repr(value)[:80]
