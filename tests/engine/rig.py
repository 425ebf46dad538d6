"""Rig: a scheduler on a model that remembers what lies in every KV slot; clock and disk are in the test's hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adapters.fetcher import Fetcher, HostAdapter
from adapters.residency import ResidencyCache
from adapters.spec import AdapterRef
from engine.block_pool import BlockPool, is_ephemeral
from engine.core import EngineCore
from engine.cost_model import CostModel
from engine.intake import SchedulerConfig
from engine.kv_disk_index import DiskIndex
from engine.kv_host_pool import HostPool
from engine.kv_tiers import KVTiers, SwapPolicy
from engine.kv_traffic import DiskTraffic, Transfer
from engine.lanes import Lanes
from engine.params import SamplingParams
from engine.protocol import Chunk, Failed, Generate, TokenLogprobs
from engine.scheduler import Scheduler
from engine.sequence import MAX_PREEMPTIONS, Phase, Sequence
from engine.step import Row, Sampled, Step
from tests.fakes import FakeRunner

ADAPTER_BYTES = 100
VOCAB = 1000
EOS = 2


@dataclass(frozen=True)
class Host:
    """What a fetch gives."""

    digest: str
    size_bytes: int


class FakeBank:
    """Holds what was placed, and refuses what a bank may not be asked for."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.placed: dict[str, Host] = {}
        self.history: list[tuple[str, str]] = []

    def place(self, digest: str, host: Host) -> None:
        assert digest not in self.placed
        assert host.digest == digest
        self.placed[digest] = host
        self.history.append(("place", digest))
        assert sum(one.size_bytes for one in self.placed.values()) <= self.budget_bytes

    def read(self, digest: str) -> Host:
        return self.placed[digest]

    def evict(self, digest: str) -> None:
        del self.placed[digest]
        self.history.append(("evict", digest))


class ManualFetcher(Fetcher):
    """Fetches in the calling thread, `delay` polls after it was asked to."""

    def __init__(self, fetch: Callable[[AdapterRef], HostAdapter], num_threads: int, delay: int) -> None:
        super().__init__(fetch, 0)
        self._num_free = num_threads
        self.delay = delay
        self.is_stuck = False
        self._open: list[tuple[int, AdapterRef]] = []
        self._num_polls = 0

    def poll(self, now: float) -> list[tuple[str, HostAdapter | Exception]]:
        self._num_polls += 1
        while not self._todo.empty():
            ref = self._todo.get()
            assert ref is not None
            self._open.append((self._num_polls + self.delay, ref))
        due = [item for item in self._open if item[0] <= self._num_polls and not self.is_stuck]
        for item in due:
            self._open.remove(item)
            self._load(item[1])
        return super().poll(now)


class MemoryRunner(FakeRunner):
    """A FakeRunner with KV memory: it writes what a step says, and reads every position of every row's table. A block
    that is shared, recycled or copied wrongly, or an adapter that is not there, fails at once."""

    def __init__(self, num_blocks: int, block_size: int, bank: FakeBank, num_slots: int) -> None:
        super().__init__(VOCAB)
        self.block_size = block_size
        self.kv: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[Any]] = [[None] * block_size for _ in range(num_slots)]
        self.bank = bank
        self.num_computed = 0

    def run(self, step: Step) -> list[Sampled]:
        assert step.rows or step.loads
        assert len({slot for _, slot in step.stores}) == len(step.stores)
        assert not any(row.sequence.is_arriving for row in step.rows)
        for block, slot in step.stores:
            self.host[slot] = list(self.kv[block])
        for source, destination in step.copies:
            self.kv[destination] = list(self.kv[source])
        for slot, block in step.loads:
            self.kv[block] = list(self.host[slot])
        for row in step.rows:
            stamps = self.stamps(row.sequence)
            for position in range(row.start, row.start + row.num_tokens):
                block, slot = divmod(position, self.block_size)
                self.kv[row.sequence.blocks[block]][slot] = stamps[position]
            self.num_computed += row.num_tokens
        for row in step.rows:
            if row.sequence.adapter is not None:
                assert row.sequence.adapter.digest in self.bank.placed, "a running adapter was taken"
            for position, stamp in enumerate(self.stamps(row.sequence)[: row.start + row.num_tokens]):
                block, slot = divmod(position, self.block_size)
                assert self.kv[row.sequence.blocks[block]][slot] == stamp, "foreign KV"
        self.steps += 1
        return [self.sample(row) for row in step.rows]

    def sample(self, row: Row) -> Sampled:
        sequence = row.sequence
        assert row.start == sequence.num_computed
        assert row.samples == (row.start + row.num_tokens == sequence.num_tokens)
        digest = sequence.adapter.digest if sequence.adapter else None
        token = self.next_token([sequence.choice, *sequence.tokens], digest) if row.samples else None
        prompt = None
        if sequence.params.prompt_logprobs is not None:
            last = min(row.start + row.num_tokens, sequence.num_prompt - 1)
            prompt = [TokenLogprobs(float(one), [], []) for one in sequence.tokens[row.start + 1 : last + 1]]
        return Sampled(token, prompt_logprobs=prompt)

    def stamps(self, sequence: Sequence) -> list[int]:
        """What must lie at each position: it depends on all tokens before it, the adapter and the salt."""
        stamp = hash((sequence.adapter.digest if sequence.adapter else None, sequence.cache_salt))
        stamps = []
        for token in sequence.tokens:
            stamp = hash((stamp, token))
            stamps.append(stamp)
        return stamps

    def next_token(self, tokens: list[int], adapter: str | None) -> int:
        token = super().next_token(tokens, adapter)
        return EOS if token % 97 == 0 else token


class FakeDisk:
    """A Disk whose work is done `delay` polls after it was asked for: slots that are not pinned until then show."""

    block_bytes = 10

    def __init__(self, host: list[list[Any]], delay: int) -> None:
        self.files: dict[bytes, list[Any]] = {}
        self.delay = delay
        self.is_broken = False
        self.seconds = 0.0  # that a transfer took, as it says
        self._host = host
        self._open: list[tuple[int, str, bytes, int]] = []
        self._num_polls = 0

    def write(self, key: bytes, slot: int) -> None:
        assert not is_ephemeral(key)
        self._open.append((self._num_polls + self.delay, "write", key, slot))

    def read(self, key: bytes, slot: int) -> None:
        self._open.append((self._num_polls + self.delay, "read", key, slot))

    def remove(self, key: bytes) -> None:
        self._open.append((self._num_polls + self.delay, "remove", key, 0))

    def poll(self) -> list[Transfer]:
        self._num_polls += 1
        due = [item for item in self._open if item[0] <= self._num_polls]
        self._open = [item for item in self._open if item not in due]
        return [done for _, kind, key, slot in due if (done := self._do(kind, key, slot)) is not None]

    def close(self) -> None:
        pass

    def _do(self, kind: str, key: bytes, slot: int) -> Transfer | None:
        if kind == "remove":
            self.files.pop(key, None)
            return None
        is_read = kind == "read"
        is_ok = not self.is_broken and (not is_read or key in self.files)
        if is_ok and is_read:
            self._host[slot] = list(self.files[key])
        elif is_read:
            self._host[slot] = ["damaged"] * len(self._host[slot])
        elif is_ok:
            self.files[key] = list(self._host[slot])
        return Transfer(key, slot, is_read, is_ok, self.seconds)


def adapter(index: int, size_bytes: int = ADAPTER_BYTES) -> AdapterRef:
    return AdapterRef(f"{index:064x}", 8, size_bytes)


@dataclass
class Rig:
    """Everything of an engine but the model. `outputs[id, choice]` collects tokens; a gap or repeat fails."""

    num_blocks: int = 64
    block_size: int = 4
    slots: int = 4
    max_num_seqs: int = 8
    max_batched_tokens: int = 1000
    max_model_len: int = 256
    prefix: bool = True
    delay: int = 1
    per_lane: int = 1024
    num_slots: int = 0
    num_files: int = 0
    swap: SwapPolicy = "on"
    is_copy_fast: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.bank = FakeBank(self.slots * ADAPTER_BYTES)
        self.broken: dict[str, list[Exception]] = {}
        self.residency = ResidencyCache(self.bank, self._fetch, self.bank.budget_bytes, num_threads=1)
        self.residency.close()
        self.fetcher = ManualFetcher(self._fetch, 2, self.delay)
        self.residency._staging.fetcher = self.fetcher
        self.pool = BlockPool(self.num_blocks, self.block_size, self.prefix)
        self.lanes = Lanes(self.per_lane)
        config = SchedulerConfig(
            max_model_len=self.max_model_len, vocab_size=VOCAB, eos_token_ids=(EOS,), max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens, **self.options,
        )  # fmt: skip
        self.runner = MemoryRunner(self.num_blocks, self.block_size, self.bank, self.num_slots)
        self.disk = FakeDisk(self.runner.host, self.delay)
        self.tiers = self._tiers()
        self.scheduler = Scheduler(config, self.pool, self.residency, self.lanes, self.tiers)
        self.core = EngineCore(self.scheduler, self.runner, self.residency, self.pool, lambda: self.now)
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.failed: dict[str, Failed] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.chunks: list[Chunk] = []
        self.first_step: dict[str, int] = {}
        self.num_steps = 0

    def _tiers(self) -> KVTiers:
        speed = 1e9 if self.is_copy_fast else 1.0
        cost = CostModel(1000, self.block_size, copy_speed=speed, compute_speed=100.0, disk_speed=speed)
        host, traffic = HostPool(self.num_slots), None
        if self.num_files:
            index = DiskIndex(self.num_files * FakeDisk.block_bytes)
            traffic = self.traffic = DiskTraffic(self.disk, index, host, cost, always=self.swap == "on")
        return KVTiers(self.pool, host, cost, self.swap, traffic)

    def _fetch(self, ref: AdapterRef) -> Host:
        errors = self.broken.get(ref.digest)
        if errors:
            raise errors.pop(0) if len(errors) > 1 else errors[0]
        return Host(ref.digest, ref.size_bytes)

    def add(self, id: str, prompt: list[int], ref: AdapterRef | None = None, **more: Any) -> Generate:
        """Adds a request; keywords of Generate, and of SamplingParams."""
        own = {key: more.pop(key) for key in ("lane", "weight", "priority", "cache_salt", "outputs", "timeout_s",
               "ephemeral", "owner") if key in more}  # fmt: skip
        request = Generate(id=id, prompt=prompt, params=SamplingParams(**more), adapter=ref, **own)
        self.core.add(request)
        for choice in range(request.params.n):
            done = (request.outputs or [])[choice : choice + 1]
            self.outputs[id, choice] = list(done[0]) if done else []
        return request

    def step(self) -> list[Chunk | Failed]:
        self.num_steps += 1
        events = self.take(self.core.step())
        self.now += 0.01
        self.check()
        return events

    def take(self, events: list[Chunk | Failed]) -> list[Chunk | Failed]:
        for event in events:
            if isinstance(event, Failed):
                assert event.id not in self.failed
                self.failed[event.id] = event
                continue
            key = event.id, event.choice
            assert event.id not in self.failed
            assert key not in self.finished, "a chunk after the finish"
            assert event.start == len(self.outputs[key]), "tokens lost or repeated"
            self.first_step.setdefault(event.id, self.num_steps)
            self.outputs[key] += event.ids
            if event.prompt_logprobs is not None:
                assert event.id not in self.prompt_logprobs
                self.prompt_logprobs[event.id] = event.prompt_logprobs
            self.chunks.append(event)
            if event.finish is not None:
                self.finished[key] = event.finish
        return events

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.scheduler.requests}")

    def expected(self, request: Generate, choice: int = 0) -> list[int]:
        """What an undisturbed run of this choice gives."""
        params = request.params
        stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
        done = (request.outputs or [])[choice : choice + 1]
        output = list(done[0]) if done else []
        room = min(self.max_model_len, self.num_blocks * self.block_size + 1) - len(request.prompt)
        digest = request.adapter.digest if request.adapter else None
        while len(output) < min(room, params.max_tokens or room):
            if output and output[-1] in stops and len(output) >= params.min_tokens:
                break
            output.append(self.runner.next_token([choice, *request.prompt, *output], digest))
        return output

    def assert_right(self, request: Generate) -> None:
        for choice in range(request.params.n):
            assert self.outputs[request.id, choice] == self.expected(request, choice), (request.id, choice)
            assert (request.id, choice) in self.finished

    def check(self) -> None:
        """Blocks and bytes are conserved, and whoever runs holds what it needs."""
        requests = self.scheduler.requests.values()
        sequences = [one for request in requests for one in request.sequences]
        running = [one for one in sequences if one.phase is Phase.RUNNING]
        assert sorted(map(id, running)) == sorted(map(id, self.scheduler.running))
        assert [one.rank for one in self.scheduler.running] == sorted(one.rank for one in running)
        assert len(running) <= self.max_num_seqs
        paused = [one for one in sequences if one.phase is Phase.PAUSED]
        assert sorted(map(id, paused)) == sorted(map(id, self.scheduler.holding.paused))
        assert all(one.is_queued and one.blocks for one in paused)
        assert all(not one.blocks for one in sequences if one.phase in (Phase.WAITING, Phase.DONE))
        assert all(one.num_preempted <= MAX_PREEMPTIONS for one in sequences)
        for lane in self.lanes:
            assert lane.num_running == sum(self.scheduler.holding.lane_of(one) is lane for one in running)
        running += paused
        self.pool.check([one.blocks for one in running])
        self.tiers.check()
        used = sum(host.size_bytes for host in self.bank.placed.values())
        assert used == self.residency.used_bytes <= self.residency.budget_bytes
        entries = self.residency._entries
        for digest, entry in entries.items():
            assert entry.pins == sum(one.adapter is not None and one.adapter.digest == digest for one in running)
            holders = [r for r in requests if r.num_cached is not None and r.message.adapter is not None]
            assert entry.holders == sum(r.message.adapter.digest == digest for r in holders if r.message.adapter)
        idle = {digest for digest, entry in entries.items() if digest in self.bank.placed and not entry.is_pinned}
        assert set(self.residency._idle) == idle
        staged = sum(entry.size for entry in entries.values() if entry.state.value in ("loading", "host"))
        assert self.residency.host_bytes == staged
        held = sum(entry.size for entry in entries.values() if entry.state.value == "host" and entry.holders)
        assert self.residency._staging._held_bytes == held
        assert self.lanes.num_waiting == sum(request.num_cached is None for request in requests)

    def assert_idle(self) -> None:
        """Nothing is held by anybody."""
        assert not self.scheduler.requests
        assert self.pool.num_used == 0
        assert not self.tiers.has_loads
        assert self.lanes.num_waiting == 0
        assert not self.residency._staging.demanded
        assert all(not entry.is_pinned and not entry.holders for entry in self.residency._entries.values())
        assert not len(self.scheduler.admission.demands)


def prompt(length: int, family: int = 0) -> list[int]:
    """Prompts of one family begin alike."""
    return [3 + (family * 131 + index * 7) % (VOCAB - 3) for index in range(length)]
