"""The demo's burst: streaming chats of several tenants and models at the same time, with the openai client."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_TOKENS = 64
NARROW = 100
"""Columns of a terminal below which the questions are left out."""


@dataclass
class Chat:
    """One question of one tenant to one model, and what has come back so far."""

    tenant: str
    model: str
    prompt: str
    answer: str = ""
    num_tokens: int = 0
    duration_s: float = 0.0
    error: str = ""


@dataclass
class Burst:
    """All chats, at once. `duration_s` is from the first request to the last token."""

    chats: list[Chat]
    clients: dict[str, AsyncOpenAI]
    duration_s: float = field(default=0.0, init=False)
    _is_narrow: bool = field(default=False, init=False)

    @property
    def num_tokens(self) -> int:
        return sum(chat.num_tokens for chat in self.chats)

    async def run(self, console: Console) -> None:
        """Shows the answers while they come, if somebody is looking."""
        started_at = time.perf_counter()
        self._is_narrow = console.width < NARROW
        with Live(self.table(), console=console, refresh_per_second=8, transient=True) as live:
            work = asyncio.gather(*(self._ask(chat) for chat in self.chats))
            while not work.done():
                await asyncio.wait([work], timeout=0.125)
                live.update(self.table())
            await work
        self.duration_s = time.perf_counter() - started_at
        console.print(self.table())

    async def _ask(self, chat: Chat) -> None:
        from openai import APIError

        started_at = time.perf_counter()
        try:
            stream = await self.clients[chat.tenant].chat.completions.create(
                model=chat.model,
                messages=[{"role": "user", "content": chat.prompt}],
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    chat.answer += chunk.choices[0].delta.content
                if chunk.usage is not None:
                    chat.num_tokens = chunk.usage.completion_tokens
        except APIError as error:
            chat.error = error.message
        chat.duration_s = time.perf_counter() - started_at

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, title="who asked which model, and what came back", title_justify="left")
        table.add_column("tenant")
        table.add_column("model")
        if not self._is_narrow:
            table.add_column("asked", max_width=26)
        table.add_column("answer", ratio=1)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("tok/s", justify="right", no_wrap=True)
        for chat in self.chats:
            rate = f"{chat.num_tokens / chat.duration_s:.1f}" if chat.num_tokens and chat.duration_s else ""
            answer = f"refused: {chat.error}" if chat.error else " ".join(chat.answer.split())
            asked = [] if self._is_narrow else [chat.prompt]
            table.add_row(chat.tenant, chat.model, *asked, answer, str(chat.num_tokens or ""), rate)
        return table
