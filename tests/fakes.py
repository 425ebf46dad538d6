"""The fakes of the seams, each shorter than 50 lines: FakeEngine and FakeRunner."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from adapters.spec import AdapterRef
from engine.protocol import Accepted, Broken, Chunk, EngineError, Generate, Ready, Stats
from engine.step import Sampled, Step

READY = Ready(
    boot_id="boot", model="tiny", fingerprint="f", max_model_len=512, vocab_size=512, eos_token_ids=[2],
    block_size=16, num_blocks=64, max_num_seqs=8, max_lora_rank=64, adapter_memory_bytes=1 << 20,
    pin_memory_bytes=1 << 19, dtype="float32", device="cpu",
)  # fmt: skip


class FakeGeneration:
    """One token per chunk, choice by choice; `fail_after` tokens it breaks."""

    def __init__(self, request: Generate, script: list[list[int]], delay_s: float, fail_after: int | None) -> None:
        self.accepted = Accepted(id=request.id)
        self.closed = False
        self._delay_s = delay_s
        self._fail_after = fail_after
        self._chunks = [
            Chunk(
                id=request.id, choice=choice, start=i, ids=[token],
                finish=None if i + 1 < len(ids) else ("stop" if token == 2 else "length"),
                stop_id=2 if token == 2 else None,
            )
            for choice, ids in enumerate(script)
            for i, token in enumerate(ids)
        ]  # fmt: skip
        self._position = 0

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> Chunk:
        if self.closed or self._position == len(self._chunks):
            raise StopAsyncIteration
        if self._position == self._fail_after:
            raise Broken("engine_error", "the engine stopped")
        await asyncio.sleep(self._delay_s)
        self._position += 1
        return self._chunks[self._position - 1]

    def ready(self) -> list[Chunk]:
        return []

    def stop(self, choice: int) -> None:
        self._chunks = [c for i, c in enumerate(self._chunks) if c.choice != choice or i < self._position]

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """Answers with `reply(request)`, a list of ids per choice; raises `error` instead if set. Records what it saw."""

    def __init__(self, reply: Callable[[Generate], list[list[int]]], delay_s: float = 0.0) -> None:
        self.ready: Ready | None = READY
        self.stats: Stats | None = None
        self.requests: list[Generate] = []
        self.generations: list[FakeGeneration] = []
        self.warmed: list[AdapterRef] = []
        self.evicted: list[str] = []
        self.kept: list[AdapterRef] = []
        self.owners: list[bytes] = []
        self.error: EngineError | None = None
        self.fail_after: int | None = None
        self._reply = reply
        self._delay_s = delay_s

    async def generate(self, request: Generate) -> FakeGeneration:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        self.generations.append(FakeGeneration(request, self._reply(request), self._delay_s, self.fail_after))
        return self.generations[-1]

    async def warm(self, adapter: AdapterRef) -> None:
        self.warmed.append(adapter)

    async def evict(self, digest: str) -> None:
        self.evicted.append(digest)

    async def keep(self, adapters: list[AdapterRef]) -> None:
        self.kept = adapters

    async def keep_owners(self, owners: list[bytes]) -> None:
        self.owners = owners


class FakeRunner:
    """A model whose next token is a hash of everything before it: a lost, doubled or foreign token changes all later
    ones. It reads only what the step says is computed, so a scheduling mistake shows as a wrong text."""

    def __init__(self, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size
        self.steps = 0

    def next_token(self, tokens: list[int], adapter: str | None) -> int:
        digest = hashlib.sha256(repr((tokens, adapter)).encode()).digest()
        return 3 + int.from_bytes(digest[:4], "little") % (self.vocab_size - 3)

    def run(self, step: Step) -> list[Sampled]:
        self.steps += 1
        sampled = []
        for row in step.rows:
            sequence = row.sequence
            assert row.start == sequence.num_computed
            if not row.samples:
                sampled.append(Sampled(None))
                continue
            assert row.start + row.num_tokens == sequence.num_tokens
            digest = sequence.adapter.digest if sequence.adapter else None
            sampled.append(Sampled(self.next_token(sequence.tokens, digest)))
        return sampled
