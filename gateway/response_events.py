"""ResponseWriter: one response told as the events of the Responses API, in the only order that clients accept.

    response.created · in_progress · output_item.added · content_part.added · output_text.delta* · output_text.done ·
    content_part.done · output_item.done · then one of response.completed | incomplete | failed

Pure: text in, objects and `text/event-stream` bytes out. There is no [DONE].
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from gateway.conversations import Item, new_id
from gateway.items import output_item, output_part


class ResponseWriter:
    """Tells one response. `response` is the object as it stands; after finish() or fail() it is final."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._sequence = 0
        self._item_id = new_id("msg")
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def open(self) -> bytes:
        """Everything that precedes the first token."""
        frames = [
            self._frame("response.created", response=self.response),
            self._frame("response.in_progress", response=self.response),
            self._frame(
                "response.output_item.added", output_index=0, item=output_item(self._item_id, "in_progress", [])
            ),
            self._part("response.content_part.added", part=output_part("", [])),
        ]
        return b"".join(frames)

    def add(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> bytes:
        """One delta."""
        self._text.append(text)
        self._logprobs.extend(logprobs or [])
        return self._part("response.output_text.delta", delta=text, logprobs=logprobs or [])

    def finish(self, reason: str, usage: dict[str, Any]) -> Item:
        """The text is whole: `reason` is "stop" or "length". Makes the response final; returns its output item."""
        is_cut = reason == "length"
        status = "incomplete" if is_cut else "completed"
        part = output_part("".join(self._text), self._logprobs)
        item = output_item(self._item_id, status, [part])
        self.response |= {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [item],
            "usage": usage,
        }
        return item

    def close(self) -> bytes:
        """Everything that follows the last token; call it when the finished response has been stored."""
        item = self.response["output"][0]
        part = item["content"][0]
        frames = [
            self._part("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._part("response.content_part.done", part=part),
            self._frame("response.output_item.done", output_index=0, item=item),
            self._frame(f"response.{self.response['status']}", response=self.response),
        ]
        return b"".join(frames)

    def fail(self, message: str, code: str = "server_error", usage: dict[str, Any] | None = None) -> bytes:
        """The response ends here: what was said so far stays in its output, marked incomplete."""
        part = output_part("".join(self._text), self._logprobs)
        self.response |= {
            "status": "failed",
            "error": {"code": code, "message": message},
            "output": [output_item(self._item_id, "incomplete", [part])],
            "usage": usage,
        }
        return self._frame("response.failed", response=self.response)

    def _part(self, kind: str, **fields: Any) -> bytes:
        return self._frame(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _frame(self, kind: str, **fields: Any) -> bytes:
        body = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)
