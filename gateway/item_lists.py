"""Lists of items as OpenAI pages through them: `limit`, `order`, `after` in; first_id, last_id, has_more out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from gateway.conversations import Item

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
After = Annotated[str | None, Query(max_length=256)]


def item_list(items: Sequence[Item], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
