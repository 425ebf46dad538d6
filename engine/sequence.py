"""Sequence: one choice of one request: its tokens, blocks and adapter. Knows no torch and no policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from adapters.spec import AdapterRef
from engine.params import SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """State advances in Scheduler.commit only.

    tokens         prompt and produced ids
    num_prompt     len(prompt)
    num_computed   positions whose KV lies in `blocks`
    blocks         block table: position p lies in blocks[p // block_size]
    seed           decided at arrival: draws are f(seed, choice, position) and have no history
    """

    request_id: str
    choice: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    adapter: AdapterRef | None = None
    cache_salt: str = ""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt
