"""Every message that crosses the border between gateway and engine, and the errors they turn into.

Ids, lanes and digests only: no text, tenant, adapter name or HTTP is known on either side of this file. No torch.

Worker → engine: Hello Generate Abort Warm Evict Keep Owners Ping.
Engine → worker: Ready Accepted Failed Chunks Stats Pong.

    EngineError            anything that an engine answers instead of tokens; has .code, .message, .retry_after_s
    ├── Refused            before the first chunk: nothing was generated, nothing is billed
    ├── Broken             in mid-stream: chunks already delivered stand
    └── Unavailable        no engine is there to ask
"""

from __future__ import annotations

from typing import Literal

import msgspec

from adapters.spec import AdapterRef
from engine.params import SamplingParams

FailureCode = Literal[
    "prompt_too_long",  # prompt + 1 > max_model_len, or it can never fit the KV memory
    "invalid_request",  # ids outside the vocabulary, empty prompt, parameters out of range, id already in use
    "adapter_not_found",  # the store has no such digest
    "adapter_invalid",  # the stored files are damaged or don't fit this base model
    "adapter_loading",  # not loaded within adapter_wait_s; try again
    "queue_full",  # the engine holds as many waiting requests as it may
    "lane_full",  # this lane does
    "deadline",  # the request's own deadline has passed
    "draining",  # the engine is about to stop
    "engine_error",  # a fault of ours
]
FinishReason = Literal["stop", "length"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token's log-probability (natural log, of the distribution after penalties and bias, before truncation)
    and the likeliest alternatives, likeliest first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Continue `prompt`. A request is its tokens: `outputs` are ids already produced (replay, fail-over).

    id          unique among all requests of this engine; made by the worker, never by a client
    lane        opaque fair-share group; `weight` is its share
    priority    class: 0 interactive, 1 standard, 2 batch
    cache_salt  prefix-cache entries are shared only between requests of equal salt (and adapter, and owner)
    owner       whose the KV blocks are: 16 opaque bytes, or none; see Owners
    outputs     per choice, ids already produced: never produced again, never changed; not repeated in chunks
    timeout_s   seconds from arrival until the request fails with `deadline`
    ephemeral   nothing of it may be kept beyond memory: its KV never reaches a disk, and shares no prefix with what may
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    adapter: AdapterRef | None = None
    lane: str = ""
    weight: float = 1.0
    priority: int = 1
    cache_salt: str = ""
    owner: bytes = b""
    outputs: list[list[int]] | None = None
    timeout_s: float | None = None
    ephemeral: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nothing more is wanted of the request; or of one choice (a stop string ended it), which then finishes."""

    id: str
    choice: int | None = None


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """Load this adapter soon, if there is room."""

    adapter: AdapterRef


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """No new request will ask for this digest: free it when the running ones have ended."""

    digest: str


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """These adapters and no others are to stay in adapter memory. Said again and again: what was said before, or to an
    engine that has restarted, does not count."""

    adapters: list[AdapterRef]


class Owners(msgspec.Struct, frozen=True, tag="owners"):
    """KV blocks of these owners may stay; those of all others are forgotten wherever they lie, also what a former run
    left on the disk. Said again and again: blocks that a running request adds go with the next word."""

    owners: list[bytes]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker introduces itself; `boot_id` is new at every start of the worker."""

    boot_id: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """What the engine is. `boot_id` is new at every start: if it changed, whatever ran before is gone."""

    boot_id: str
    model: str  # model directory's name
    fingerprint: str  # of the base weights and config
    max_model_len: int  # prompt + output tokens of one choice
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_lora_rank: int
    adapter_memory_bytes: int
    pin_memory_bytes: int  # of it, what Keep may hold: room for the largest allowed adapter is left
    dtype: str
    device: str
    quantization: str = "none"  # of the base's linears
    kv_host_bytes: int = 0  # host memory for KV blocks that left the device
    kv_disk_bytes: int = 0  # and how much the disk may hold of them


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The request is in the engine. `tier` is where its adapter lay: "resident", "host", "disk", or "" for none."""

    id: str
    tier: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request has ended without (or before) its finish. `param` names the request field at fault, if one is."""

    id: str
    code: FailureCode
    message: str
    retry_after_s: float | None = None
    param: str | None = None


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice. `ids` include the end-of-sequence or stop token that ended it (it is billed).

    start               index of ids[0] in the choice's output: a receiver detects gaps and repeats
    finish              set in the last chunk of the choice, else None
    stop_id             the id that ended it, when finish == "stop"
    num_cached_tokens   prompt tokens that the prefix cache gave at first admission
    prompt_logprobs     in the first chunk of choice 0, when asked: one entry per prompt token, None for the first
    """

    id: str
    choice: int
    start: int
    ids: list[int]
    finish: FinishReason | None = None
    stop_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Chunks(msgspec.Struct, frozen=True, tag="chunks"):
    """All chunks of one step for one worker."""

    chunks: list[Chunk]


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """Where one adapter is: state is "loading", "resident" or "failed"."""

    digest: str
    state: str
    size_bytes: int
    num_pins: int


class ClassState(msgspec.Struct, frozen=True, array_like=True):
    """The sequences of one class: running, paused for want of a row alone, and waiting, by what they wait for; of those
    that wait, `swapped` had blocks and gave them up."""

    priority: int
    running: int
    paused: int
    waiting_row: int
    waiting_blocks: int
    waiting_adapter: int
    swapped: int = 0


class LaneState(msgspec.Struct, frozen=True, array_like=True):
    """How one lane is served in one class: `service` is what was charged for it, `counter` its place in the order."""

    lane: str
    priority: int
    running: int
    waiting: int
    service: float
    counter: float


class TierState(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks that left the device: those on the "host" or the "disk".

    blocks, bytes_used  now, of bytes_total
    hits                blocks that it gave back, ever
    stores              blocks that it took
    evictions           blocks that it forgot for others
    faults              blocks that it could not give or take
    """

    tier: str
    blocks: int
    bytes_used: int
    bytes_total: int
    hits: int
    stores: int
    evictions: int
    faults: int


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges and ever-growing counters (`_total`) of the engine, sent every second.

    lanes        those that had most service, 64 at most
    preemptions  by kind: "pause" gave up a row, "blocks" and "adapter" all, for want of that
    failures     requests refused or failed, by FailureCode
    arrivals     requests by where their adapter lay: "resident", "host", "disk", "base"
    kv_tiers     host and disk, as far as there are such
    resumed      sequences that gave up their KV blocks and run again: "swap" copied some back, "recompute" computed
                 some again, "kept" had lost none
    speeds       per second, by which swap or recompute is chosen: "copy_bytes", "disk_bytes", "prefill_tokens"
    """

    boot_id: str
    running: int
    waiting: int
    waiting_adapter: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    preemptions_total: int
    steps_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    adapter_bytes_total: int
    adapter_bytes_used: int
    adapter_bytes_host: int
    adapter_loads_total: int
    adapter_evictions_total: int
    adapter_read_seconds_total: float
    adapter_place_seconds_total: float
    adapters: list[AdapterState]
    classes: list[ClassState] = []
    lanes: list[LaneState] = []
    preemptions: dict[str, int] = {}
    failures: dict[str, int] = {}
    arrivals: dict[str, int] = {}
    kv_tiers: list[TierState] = []
    resumed: dict[str, int] = {}
    speeds: dict[str, float] = {}


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    pass


ToEngine = Hello | Generate | Abort | Warm | Evict | Keep | Owners | Ping
FromEngine = Ready | Accepted | Failed | Chunks | Stats | Pong


class EngineError(Exception):
    """An engine's answer that is not tokens."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param


class Refused(EngineError):
    """The engine did not take the request: nothing was generated."""


class Broken(EngineError):
    """The request ended in mid-stream: the engine died, restarted or failed it."""


class Unavailable(EngineError):
    """No engine is connected, or none answered in time."""
