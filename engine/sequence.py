"""Sequence: one choice of one request: its tokens, blocks and adapter. Request: the choices that share a prompt.

Knows no torch and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from adapters.spec import AdapterRef
from engine.params import SamplingParams

if TYPE_CHECKING:
    from engine.lane import Lane
    from engine.protocol import Generate, TokenLogprobs


MAX_PREEMPTIONS = 3
"""So often a sequence may be made to give up its blocks."""


class Phase(Enum):
    """WAITING holds neither blocks nor its adapter; PAUSED holds both and lacks a row; RUNNING has all three; DONE will
    never run again."""

    WAITING = "waiting"
    PAUSED = "paused"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Sequence:
    """State advances in Scheduler only; num_computed and tokens in Scheduler.commit only.

    tokens         prompt and produced ids
    num_prompt     len(prompt)
    num_computed   positions whose KV lies in `blocks`
    blocks         block table: position p lies in blocks[p // block_size]
    seed           decided at arrival: draws are f(seed, choice, position) and have no history
    stop_ids       ids that end the output once it has params.min_tokens (end-of-sequence and stop_token_ids)
    max_len        len(tokens) at which the output ends
    lane_name      of the lane in which it waits
    rank           (class, arrival number of the request, choice): the smaller goes first and is preempted last
    hashes         chained hash of each full block of tokens, as far as anybody asked
    num_hashed     leading blocks that are known to the prefix cache
    need           free blocks that it lacked when it was last passed over
    waits_since    when it arrived
    ticket         of its place in a queue; 0 = it is in none
    num_preempted  times that it gave up its blocks
    has_run        it was admitted, or forked, before: what is computed of it is owed to it
    goes_first     its turn has come before: it waits ahead of the lanes of its class
    is_arriving    some of its blocks are being brought back from the host: it has no row in a step until they are there
    read_until     so long it waits for blocks that are being read from the disk; None = it has not asked for any
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
    stop_ids: frozenset[int] = frozenset()
    max_len: int = 1 << 31
    rank: tuple[int, int, int] = (1, 0, 0)
    hash_seed: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    num_hashed: int = 0
    need: int = 0
    phase: Phase = Phase.WAITING
    lane_name: str = ""
    waits_since: float = 0.0
    ticket: int = 0
    num_preempted: int = 0
    has_run: bool = False
    goes_first: bool = False
    is_arriving: bool = False
    read_until: float | None = None

    @property
    def is_queued(self) -> bool:
        return self.ticket != 0

    @property
    def may_yield(self) -> bool:
        """It can be made to give up its blocks."""
        return self.num_preempted < MAX_PREEMPTIONS

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_stopped(self) -> bool:
        """Its last token ended the output."""
        return self.num_output > 0 and self.tokens[-1] in self.stop_ids and self.num_output >= self.params.min_tokens


@dataclass(eq=False, slots=True)
class Request:
    """What was asked for once. Its first unfinished choice, the leader, computes the prompt; the others fork from it.

    lane             where it waits and is charged
    home             the lane in which it arrived; charged too, if ageing has lifted it to another
    deadline         when it fails (engine clock), None = never
    num_cached       prompt tokens given by the prefix cache at first admission; None = not admitted yet
    has_forked       the choices after the leader are under way
    blocked_at       admissions so far when it was first passed over for lack of blocks
    prompt_logprobs  collected so far; None once delivered, or when not asked for
    """

    message: Generate
    lane: Lane
    deadline: float | None
    sequences: list[Sequence] = field(default_factory=list)
    num_cached: int | None = None
    has_forked: bool = False
    blocked_at: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    home: Lane = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.lane

    @property
    def leader(self) -> Sequence:
        """The first choice that is not done; when all are, the last one."""
        return next((one for one in self.sequences if one.phase is not Phase.DONE), self.sequences[-1])

    @property
    def is_done(self) -> bool:
        return all(one.phase is Phase.DONE for one in self.sequences)
