"""Lists of items as OpenAI pages through them: `limit`, `order`, `after` in; first_id, last_id, has_more out. And what
else their queries may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.requests import Request

from gateway.conversations import Item
from gateway.errors import bad_request
from gateway.response_request import LOGPROBS

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
After = Annotated[str | None, Query(max_length=256)]


async def refuse_unserved(request: Request) -> None:
    """A dependency of routes that read: what OpenAI's queries may ask for and we lack is no silent nothing."""
    asked = request.query_params
    if any(value != LOGPROBS for name in ("include", "include[]") for value in asked.getlist(name)):
        raise bad_request(f"Only {LOGPROBS} can be included.", "include", "unsupported_value")
    if "starting_after" in asked:
        raise bad_request("Only background responses can be streamed later.", "starting_after", "unsupported_value")


def item_list(items: Sequence[Item], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
