"""Random traffic on tiny memories: whatever happens, nothing is lost, doubled, leaked or mixed up."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.spec import AdapterInvalid, AdapterMissing
from engine.protocol import Generate, Refused
from tests.engine.rig import Rig, adapter, prompt

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@dataclass(frozen=True)
class Add:
    length: int
    family: int
    adapter: int | None
    lane: str
    priority: int
    n: int
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    salt: str
    prompt_logprobs: bool
    timeout_s: float | None
    replayed: int
    ephemeral: bool


@dataclass(frozen=True)
class Abort:
    index: int


@dataclass(frozen=True)
class StopChoice:
    index: int
    choice: int


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Disk:
    is_stuck: bool


@dataclass(frozen=True)
class KVDisk:
    is_broken: bool
    loses_files: bool


@dataclass(frozen=True)
class Break:
    adapter: int
    kind: int


@dataclass(frozen=True)
class Evict:
    adapter: int


adds = st.builds(
    Add,
    length=st.integers(1, 40),
    family=st.integers(0, 1),
    adapter=st.none() | st.integers(0, 5),
    lane=st.sampled_from("aaab"),
    priority=st.sampled_from([0, 0, 1, 1, 1, 2]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    max_tokens=st.none() | st.integers(1, 30),
    min_tokens=st.sampled_from([0, 0, 4]),
    ignore_eos=st.booleans(),
    salt=st.sampled_from(["", "x"]),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
    timeout_s=st.sampled_from([None, None, None, 0.3]),
    replayed=st.sampled_from([0, 0, 0, 1, 9]),
    ephemeral=st.sampled_from([False, False, True]),
)
others = st.one_of(
    st.builds(Abort, st.integers(0, 30)),
    st.builds(StopChoice, st.integers(0, 30), st.integers(0, 3)),
    st.builds(Steps, st.integers(1, 8)),
    st.builds(Steps, st.integers(1, 8)),
    st.builds(Disk, st.booleans()),
    st.builds(KVDisk, st.booleans(), st.booleans()),
    st.builds(Break, st.integers(0, 5), st.integers(0, 2)),
    st.builds(Evict, st.integers(0, 5)),
)
actions = st.integers(0, 2).flatmap(lambda kind: others if kind == 0 else adds)
stories = st.lists(actions, min_size=6, max_size=30)
rigs = st.builds(
    Rig,
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([3, 4, 16]),
    slots=st.integers(1, 3),
    max_num_seqs=st.integers(1, 8),
    max_batched_tokens=st.sampled_from([1, 7, 16, 32, 1000]),
    max_model_len=st.just(64),
    prefix=st.booleans(),
    delay=st.integers(0, 3),
    options=st.builds(dict, ageing_s=st.sampled_from([0.05, 0.2, 30.0])),
    num_slots=st.sampled_from([0, 1, 5, 12, 40]),
    num_files=st.sampled_from([0, 0, 3, 60]),
    swap=st.sampled_from(["on", "on", "off", "auto"]),
    is_copy_fast=st.booleans(),
)


class Story:
    """Applies actions to a rig and knows what must come of them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.requests: list[Generate] = []
        self.aborted: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()
        self.may_fail: set[str] = set()

    def apply(self, action: object) -> None:
        match action:
            case Add():
                self.add(action)
            case Abort(index) if self.requests:
                request = self.requests[index % len(self.requests)]
                self.aborted.add(request.id)
                self.rig.core.abort(request.id)
            case StopChoice(index, choice) if self.requests:
                request = self.requests[index % len(self.requests)]
                self.stopped.add((request.id, choice % request.params.n))
                self.rig.core.abort(request.id, choice % request.params.n)
            case Steps(count):
                for _ in range(count):
                    self.rig.step()
            case Disk(is_stuck):
                self.rig.fetcher.is_stuck = is_stuck
            case KVDisk(is_broken, loses_files):
                self.rig.disk.is_broken = is_broken
                if loses_files:
                    self.rig.disk.files.clear()
            case Break(index, kind):
                error = [OSError("io"), AdapterInvalid("bad", "bad"), AdapterMissing("adapter_missing", "gone")][kind]
                self.rig.broken[adapter(index).digest] = [error]
            case Evict(index):
                self.rig.core.evict(adapter(index).digest)
        self.rig.check()

    def add(self, add: Add) -> None:
        id = str(len(self.requests))
        ref = None if add.adapter is None else adapter(add.adapter)
        max_tokens = add.max_tokens
        options = dict(
            n=add.n, max_tokens=max_tokens, min_tokens=min(add.min_tokens, max_tokens or 4), ignore_eos=add.ignore_eos,
            prompt_logprobs=0 if add.prompt_logprobs else None,
        )  # fmt: skip
        own = dict(
            lane=add.lane, priority=add.priority, cache_salt=add.salt, timeout_s=add.timeout_s, ephemeral=add.ephemeral
        )  # fmt: skip
        try:
            request = self.rig.add(id, prompt(add.length, add.family), ref, **own, **options)
            if add.replayed:
                self.rig.core.abort(id)
                outputs = [self.rig.expected(request, choice)[: add.replayed] for choice in range(add.n)]
                request = self.rig.add(id, request.prompt, ref, outputs=outputs, **own, **options)
        except Refused as refused:
            if refused.code in ("prompt_too_long", "adapter_invalid", "adapter_not_found"):
                return
            raise
        self.requests.append(request)

    def end(self) -> None:
        self.rig.fetcher.is_stuck = False
        self.rig.run()
        self.rig.assert_idle()
        for request in self.requests:
            self.check(request)

    def check(self, request: Generate) -> None:
        """Each request ended as it should, and what it said until then is what it would have said alone."""
        failure = self.rig.failed.get(request.id)
        for choice in range(request.params.n):
            said, expected = self.rig.outputs[request.id, choice], self.rig.expected(request, choice)
            assert said == expected[: len(said)]
            if request.id not in self.aborted and failure is None:
                assert said == expected or (request.id, choice) in self.stopped
                assert (request.id, choice) in self.rig.finished
        if failure is not None:
            assert failure.code in ("deadline", "adapter_loading", "adapter_invalid", "adapter_not_found")
            assert failure.code == "deadline" or (request.adapter and request.adapter.digest in self.rig.broken)
        logprobs = self.rig.prompt_logprobs.get(request.id)
        if logprobs is not None:
            assert [one and one.logprob for one in logprobs] == [None, *map(float, request.prompt[1:])]


@SETTINGS
@given(rigs, stories)
def test_every_request_ends_with_its_own_text(rig: Rig, story: list[object]) -> None:
    """Random arrivals, aborts, evictions, slow and broken disks, n > 1, replays, prefixes, classes, chunk budgets 1, 7,
    16, 32, 1000, ageing, KV tiers on the host and on a disk that breaks and forgets, and memories that force every kind
    of preemption: blocks, slots, bytes and pins are conserved at every step, running sequences keep blocks and adapter,
    nobody gives up blocks more than three times, every request ends, and every text is that of an undisturbed run
    (SC-01, KV-02, KV-05)."""
    tale = Story(rig)
    for action in story:
        tale.apply(action)
    tale.end()


@SETTINGS
@given(rigs, stories)
def test_equal_stories_are_equal(rig: Rig, story: list[object]) -> None:
    """Scheduling is deterministic: the same story gives the same chunks, step by step."""
    again = Rig(
        num_blocks=rig.num_blocks, block_size=rig.block_size, slots=rig.slots, max_num_seqs=rig.max_num_seqs,
        max_batched_tokens=rig.max_batched_tokens, max_model_len=rig.max_model_len, prefix=rig.prefix, delay=rig.delay,
        options=rig.options, num_slots=rig.num_slots, num_files=rig.num_files, swap=rig.swap,
        is_copy_fast=rig.is_copy_fast,
    )  # fmt: skip
    for one in (rig, again):
        tale = Story(one)
        for action in story:
            tale.apply(action)
        tale.end()

    assert rig.chunks == again.chunks
    assert rig.scheduler.num_preemptions == again.scheduler.num_preemptions
