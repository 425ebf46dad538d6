"""Writes of one turn of the event loop leave together, in order, and none is lost at the end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from gateway.cork import Corked


class Sink:
    """A transport that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def write_eof(self) -> None:
        self.calls.append("eof")

    def close(self) -> None:
        self.calls.append("close")

    def is_closing(self) -> bool:
        return "close" in self.calls

    def get_extra_info(self, name: str) -> str:
        return f"the {name}"


async def test_one_turn_is_one_write() -> None:
    """Head and body in one piece; the next turn's apart; everything else is the transport's own."""
    sink = Sink()
    corked = Corked(cast(Any, sink), asyncio.get_running_loop())

    corked.write(b"head ")
    corked.write(b"body")
    assert sink.calls == []
    await asyncio.sleep(0)
    corked.write(b"more")
    await asyncio.sleep(0)

    assert sink.calls == [b"head body", b"more"]
    assert corked.get_extra_info("peer") == "the peer"


async def test_nothing_is_lost_at_the_end() -> None:
    """What was written before the end goes out before it."""
    for end in ("close", "write_eof"):
        sink = Sink()
        corked = Corked(cast(Any, sink), asyncio.get_running_loop())
        corked.write(b"last words")
        getattr(corked, end)()
        await asyncio.sleep(0)
        assert sink.calls == [b"last words", end.removeprefix("write_")]
        assert corked.is_closing() == (end == "close")
