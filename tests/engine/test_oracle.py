"""The engine against transformers + peft: whatever is batched, chunked, preempted, cached or evicted, every answer is
the one that the request alone would have got."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from adapters.spec import LINEARS, AdapterRef
from engine.build import build_core
from engine.config import EngineConfig
from engine.llm import LLM
from engine.memory_plan import adapter_bytes, block_bytes
from engine.model.config import ModelConfig
from engine.outputs import Output
from engine.params import SamplingParams
from engine.protocol import Chunk, Generate
from tests.oracle import Oracle
from tests.tiny import tiny_adapter, tiny_model

BLOCK = 16


def prompt_of(length: int, seed: int, vocab_size: int = 370) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, vocab_size) for _ in range(length)]


def greedy(max_tokens: int, logprobs: int | None = None, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, n=n)


def own_logprobs(output: Output) -> list[float]:
    assert output.logprobs is not None
    return [entry.logprob for entry in output.logprobs]


class World:
    """A model, its adapters and their oracle. `llm()` makes engines, closed at the end."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self.model = model
        self.paths = adapters
        self.shape = ModelConfig.from_dir(model)
        self.oracle = Oracle(model, adapters)
        self._open: list[LLM] = []

    def llm(self, **options: object) -> tuple[LLM, dict[str | None, AdapterRef | None]]:
        """`kv_blocks` and `slots` (adapters of max_lora_rank over all linears) size the memory."""
        kv_blocks, slots = options.pop("kv_blocks", None), options.pop("slots", None)
        if kv_blocks is not None:
            options["kv_memory"] = int(str(kv_blocks)) * block_bytes(self.shape, BLOCK, torch.float32)
        if slots is not None:
            rank = int(str(options["max_lora_rank"]))
            options["adapter_memory"] = int(str(slots)) * adapter_bytes(self.shape, rank, 4)
        llm = LLM(self.model, dtype="float32", **options)  # type: ignore[arg-type]
        self._open.append(llm)
        refs: dict[str | None, AdapterRef | None] = {name: llm.add_adapter(path) for name, path in self.paths.items()}
        return llm, {**refs, None: None}

    def check(self, prompts: Sequence[list[int]], outputs: Sequence[Output], names: Sequence[str | None]) -> None:
        for i, (prompt, output, name) in enumerate(zip(prompts, outputs, names, strict=True)):
            self.oracle.assert_greedy(prompt, output.token_ids, name, f"request {i} ({name}, {len(prompt)} tokens)")

    def close(self) -> None:
        for llm in self._open:
            llm.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A random Llama with GQA (4 heads, 2 KV heads, 4 layers) and strong random adapters of many shapes."""
    root = tmp_path_factory.mktemp("world")
    model = tiny_model(root / "model", num_layers=4)
    kinds: dict[str, dict[str, object]] = {
        "a1": {"rank": 8, "alpha": 16},
        "a2": {"rank": 2, "targets": ("q_proj",)},
        "a3": {"rank": 4, "targets": ("k_proj", "v_proj", "down_proj")},
        "a4": {"rank": 3, "targets": ("gate_proj", "up_proj")},
        "a5": {"rank": 1, "targets": ("o_proj", "q_proj"), "alpha": 4},
        "k": {"rank": 4, "targets": ("k_proj",)},
        "v": {"rank": 4, "targets": ("v_proj",)},
        "up": {"rank": 4, "targets": ("up_proj",)},
    }
    adapters = {
        name: tiny_adapter(root / name, model, seed=10 + i, **kind)  # type: ignore[arg-type]
        for i, (name, kind) in enumerate(kinds.items())
    }
    world = World(model, adapters)
    yield world
    world.close()


# ---- the proof: a real model, everything at once


@pytest.mark.demo_model
@pytest.mark.timeout(900)
def test_everything_at_once_on_a_real_model(demo_model: Path, tmp_path: Path) -> None:
    """30 requests in one batch: base and five adapters of ranks 2 to 64 over different linears, prompts of 1 to 600
    tokens with shared beginnings, chunks of 64, KV for a fraction of them: each answer equals the request's alone."""
    kinds = {2: LINEARS, 4: LINEARS[0:3:2], 8: ("k_proj", "o_proj", "gate_proj"), 16: LINEARS[4:], 64: LINEARS[:4]}
    adapters = {}
    for rank, targets in kinds.items():
        path, strong = tmp_path / f"r{rank}", {"alpha": 2 * rank, "strength": rank**0.5}
        adapters[f"r{rank}"] = tiny_adapter(path, demo_model, seed=rank, rank=rank, targets=targets, **strong)
    world = World(demo_model, adapters)
    llm, refs = world.llm(kv_blocks=56, max_batched_tokens=64, max_num_seqs=32, max_lora_rank=64)
    names = [None, *adapters]
    shared = prompt_of(48, 0, 49000)
    lengths = [600, 300, 1, 77, 130, 2, 16, 33, 64, 17, 250, 5, 31, 15, 48]
    lengths += [3, 65, 96, 129, 10, 4, 63, 32, 8, 20, 1, 40, 12, 7, 90]
    prompts = [
        (shared + prompt_of(600, i, 49000))[:n] if i % 2 else prompt_of(n, i, 49000) for i, n in enumerate(lengths)
    ]
    used = [names[i % len(names)] for i in range(len(prompts))]

    outputs = llm.generate(prompts, greedy(24), [refs[name] for name in used])
    again = llm.generate(prompts[::-1], greedy(24), [refs[name] for name in used[::-1]])

    assert llm.stats.preemptions_total > 0
    assert llm.stats.cached_tokens_total > 0
    assert {len(output.token_ids) for output in outputs} == {24}
    world.check(prompts, outputs, used)
    world.check(prompts[::-1], again, used[::-1])
    world.close()
    texts = {tuple(output.token_ids) for output in outputs}
    assert len(texts) > len(outputs) // 2, "adapters that change nothing prove nothing"


# ---- adapters


def test_rslora_scales_by_the_root_of_the_rank(tiny: World, tmp_path: Path) -> None:
    """AL-01: equal tensors with use_rslora true and false have scales 8 and 2, also when reloaded after an eviction."""
    paths = {name: tmp_path / name for name in ("rs", "plain")}
    for name, path in paths.items():
        tiny_adapter(path, tiny.model, seed=3, rank=16, alpha=32, targets=LINEARS[:4], strength=0.5)
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": name == "rs"}))
    oracle = Oracle(tiny.model, paths)
    llm, _ = tiny.llm(max_lora_rank=16, slots=1)
    refs = {name: llm.add_adapter(path) for name, path in paths.items()}
    prompt = prompt_of(20, 1)
    answers = {}
    for name in ("rs", "plain", "rs", "plain"):
        output = llm.generate([prompt], greedy(32, logprobs=0), refs[name])[0]
        oracle.assert_greedy(prompt, output.token_ids, name)
        assert own_logprobs(output) == pytest.approx(oracle.logprobs(prompt, output.token_ids, name), abs=1e-3)
        assert answers.setdefault(name, output.token_ids) == output.token_ids
    assert answers["rs"] != answers["plain"]


def test_a_slot_keeps_nothing_of_its_former_owner(tiny: World) -> None:
    """AL-02: with room for one adapter, a small one after a large one answers bit for bit as on a fresh engine."""
    prompt = prompt_of(30, 2)
    fresh, refs = tiny.llm(max_lora_rank=8, slots=1)
    wanted = fresh.generate([prompt], greedy(20, logprobs=5), refs["a2"])[0]
    llm, refs = tiny.llm(max_lora_rank=8, slots=1, enable_prefix_caching=False)

    answers = [llm.generate([prompt], greedy(20, logprobs=5), refs[name])[0] for name in ("a1", "a2", "a1", "a2")]

    for answer in (answers[1], answers[3]):
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs == wanted.logprobs
    tiny.check([prompt] * 4, answers, ["a1", "a2", "a1", "a2"])
    assert llm.stats.adapter_evictions_total == 3


def test_parts_of_a_fused_linear_may_be_absent(tiny: World) -> None:
    """AL-06: adapters of q, k, v or up only, under GQA, each equal the oracle, alone and together."""
    llm, refs = tiny.llm()
    names: list[str | None] = ["a2", "k", "v", "up", None]
    prompts = [prompt_of(25 + i, i) for i in range(len(names))]

    together = llm.generate(prompts, greedy(24), [refs[name] for name in names])
    alone = [llm.generate([p], greedy(24), refs[name])[0] for p, name in zip(prompts, names, strict=True)]

    tiny.check(prompts, together, names)
    tiny.check(prompts, alone, names)


def test_more_adapters_than_fit(tiny: World, tmp_path: Path) -> None:
    """SC-02: with room for 2, 12 adapters at once and then 12 one after the other are all served."""
    paths = {f"m{i}": tiny_adapter(tmp_path / f"m{i}", tiny.model, seed=100 + i, rank=4) for i in range(12)}
    oracle = Oracle(tiny.model, paths)
    llm, _ = tiny.llm(max_lora_rank=8, slots=1)  # one of rank 8, two of rank 4
    refs = {name: llm.add_adapter(path) for name, path in paths.items()}
    prompts = [prompt_of(10 + i, i) for i in range(12)]

    at_once = llm.generate(prompts, greedy(12), list(refs.values()))
    in_turn = [llm.generate([p], greedy(12), ref)[0] for p, ref in zip(prompts, refs.values(), strict=True)]

    for prompt, name, first, second in zip(prompts, paths, at_once, in_turn, strict=True):
        oracle.assert_greedy(prompt, first.token_ids, name)
        oracle.assert_greedy(prompt, second.token_ids, name)


def test_an_adapter_in_use_is_never_evicted(tiny: World) -> None:
    """SC-03: rows on four adapters fill the memory; the fifth takes the place of the one that ended first, and the
    texts of the others, the least recently admitted one's too, stay right."""
    llm, _ = tiny.llm(max_lora_rank=8, slots=4)
    big = tiny_five(tiny, llm)
    order = ["b2", "b3", "b4", "b1", "b5"]
    prompts = [prompt_of(12, i) for i in range(5)]
    lengths = [60, 60, 60, 5, 20]
    for name in order[:4]:
        llm.generate([[5]], greedy(1), big[name][0])

    outputs = llm.generate(prompts, [greedy(n) for n in lengths], [big[name][0] for name in order])

    oracle = Oracle(tiny.model, {name: path for name, (_, path) in big.items()})
    for prompt, output, name in zip(prompts, outputs, order, strict=True):
        oracle.assert_greedy(prompt, output.token_ids, name, name)
    resident = {state.digest for state in llm.stats.adapters if state.state == "resident"}
    assert resident == {big[name][0].digest for name in ("b2", "b3", "b4", "b5")}


def tiny_five(tiny: World, llm: LLM) -> dict[str, tuple[AdapterRef, Path]]:
    """Five adapters that take an equal share of the adapter memory each."""
    found = {}
    for i in range(1, 6):
        path = tiny_adapter(tiny.model.parent / f"b{i}", tiny.model, seed=50 + i, rank=8, alpha=16)
        found[f"b{i}"] = (llm.add_adapter(path), path)
    return found


@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 1000])
def test_chunks_of_many_adapters(tiny: World, chunk: int) -> None:
    """SC-05: long prompts on three adapters and the base are prefilled in chunks while three rows decode."""
    llm, refs = tiny.llm(max_batched_tokens=chunk)
    names: list[str | None] = [None, "a1", "a4", "a1", "a2", None, "a3"]
    prompts = [prompt_of(n, n) for n in (2, 3, 4, 10, 33, 100, 250)]

    outputs = llm.generate(prompts, [greedy(n) for n in (40, 40, 40, 8, 8, 8, 8)], [refs[name] for name in names])

    tiny.check(prompts, outputs, names)


def test_base_rows_after_beside_and_without_adapters(tiny: World) -> None:
    """SC-07: batches of the base alone after adapters were used, of one adapter alone, and of both where the adapter's
    row ends first: base rows equal, bit for bit where the batch is equal, an engine that never saw an adapter."""
    prompts = [prompt_of(20, 1), prompt_of(21, 2)]
    plain = tiny.llm(enable_prefix_caching=False)[0].generate(prompts, greedy(20, logprobs=3))
    llm, refs = tiny.llm(enable_prefix_caching=False)

    adapter = llm.generate(prompts[:1], greedy(20), refs["a1"])
    after = llm.generate(prompts, greedy(20, logprobs=3))
    mixed = llm.generate(prompts, [greedy(5), greedy(20, logprobs=3)], [refs["a1"], None])

    tiny.check(prompts[:1], adapter, ["a1"])
    assert [output.logprobs for output in after] == [output.logprobs for output in plain]
    tiny.check(prompts, mixed, ["a1", None])
    assert own_logprobs(mixed[1]) == pytest.approx(own_logprobs(plain[1]), abs=1e-4)


def test_an_empty_step_after_a_mass_abort(tiny: World) -> None:
    """SC-07: when everything is aborted between two steps the next one has nothing to do, and all memory is free."""
    core, ready = build_core(EngineConfig(model=tiny.model, dtype="float32"))
    for i in range(8):
        core.add(Generate(id=str(i), prompt=prompt_of(30, i), params=greedy(50, n=2)))
    for _ in range(3):
        core.step()
    for i in range(8):
        core.abort(str(i))

    assert core.step() == []
    assert not core.has_work
    assert core.stats(ready.boot_id).blocks_used == 0
    core.close()


# ---- memory


@pytest.mark.parametrize("back", ["recompute", "swap", "disk"])
def test_preemption_loses_and_doubles_nothing(tiny: World, tmp_path: Path, back: str) -> None:
    """KV-02: 8 requests of 150 tokens on base and adapters in KV for fewer: preempted rows go on as if nothing had
    been, whether they are computed again or come back from the host or the disk: each token is the oracle's, with its
    logprob. Every chunk begins where the one before ended."""
    one_block = block_bytes(tiny.shape, BLOCK, torch.float32)
    tiers: dict[str, object] = {"swap": "on", "kv_host_bytes": 20 * one_block} if back != "recompute" else {}
    if back == "disk":
        tiers["kv_disk_dir"] = tmp_path
    llm, refs = tiny.llm(kv_blocks=24, max_num_seqs=8, **tiers)
    names: list[str | None] = [None, "a1", "a2", "a3", None, "a4", "a5", "a1"]
    prompts = [prompt_of(5 + 3 * i, i) for i in range(8)]

    outputs = llm.generate(prompts, greedy(150, logprobs=0), [refs[name] for name in names])

    assert llm.stats.preemptions_total > 0
    assert (llm.stats.resumed["swap"] > 0) == (back != "recompute")
    assert [len(output.token_ids) for output in outputs] == [150] * 8
    tiny.check(prompts, outputs, names)
    for prompt, output, name in zip(prompts, outputs, names, strict=True):
        wanted = tiny.oracle.logprobs(prompt, output.token_ids, name)
        assert own_logprobs(output) == pytest.approx(wanted, abs=1e-3)
    if back == "recompute":
        config = EngineConfig(model=tiny.model, dtype="float32", kv_memory_bytes=24 * one_block, max_num_seqs=8)
        assert chunk_starts(config, prompts) == {str(i): list(range(150)) for i in range(8)}


@pytest.mark.parametrize("has_disk", [False, True])
def test_prefixes_from_the_tiers_are_right(tiny: World, tmp_path: Path, has_disk: bool) -> None:
    """PC-02, PC-06 below the device: a prompt of 200 tokens under base and two adapters, whose blocks leave the device
    in between, comes back to each from its own KV: answers and logprobs are the oracle's."""
    one_block = block_bytes(tiny.shape, BLOCK, torch.float32)
    slots, directory = (20, tmp_path) if has_disk else (90, None)
    llm, refs = tiny.llm(kv_blocks=16, kv_host_bytes=slots * one_block, kv_disk_dir=directory, swap="on")
    names: list[str | None] = [None, "a1", "a2"]
    prompt = prompt_of(200, 6)
    cached = []
    for name in [*names, *names, *names]:
        output = llm.generate([prompt], greedy(8, logprobs=0), refs[name])[0]
        cached.append(output.num_cached_tokens)
        tiny.check([prompt], [output], [name])
        wanted = tiny.oracle.logprobs(prompt, output.token_ids, name)
        assert own_logprobs(output) == pytest.approx(wanted, abs=1e-3)
    tier = llm.stats.kv_tiers[-1]

    assert cached[:3] == [0, 0, 0]
    assert all(count > 0 for count in cached[6:])
    assert (tier.tier, tier.hits > 0) == ("disk" if has_disk else "host", True)


def chunk_starts(config: EngineConfig, prompts: list[list[int]]) -> dict[str, list[int]]:
    """The index of every token that comes out, by request, in the order of coming."""
    core, ready = build_core(config)
    for i, prompt in enumerate(prompts):
        core.add(Generate(id=str(i), prompt=prompt, params=greedy(150)))
    seen: dict[str, list[int]] = {}
    while core.has_work:
        for chunk in core.step():
            assert isinstance(chunk, Chunk)
            seen.setdefault(chunk.id, []).extend(range(chunk.start, chunk.start + len(chunk.ids)))
    assert core.stats(ready.boot_id).preemptions_total > 0
    core.close()
    return seen


@pytest.mark.parametrize("chunk", [24, 32])
def test_chunk_borders(tiny: World, chunk: int) -> None:
    """KV-06: prompts around one and two chunks, with 0, 1 and 2 blocks of them in the prefix cache, have the logprobs
    of an unchunked run."""
    whole, _ = tiny.llm(enable_prefix_caching=False)
    llm, _ = tiny.llm(max_batched_tokens=chunk)
    for cached in (0, 1, 2):
        for length in (chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1):
            prompt = prompt_of(length, 1000 * cached + length)
            if cached:
                llm.generate([prompt[: cached * BLOCK + 1]], greedy(1))
            output = llm.generate([prompt], greedy(4, logprobs=3))[0]
            wanted = whole.generate([prompt], greedy(4, logprobs=3))[0]
            assert output.num_cached_tokens == min(cached, (length - 1) // BLOCK) * BLOCK
            assert own_logprobs(output) == pytest.approx(own_logprobs(wanted), abs=1e-3)
            tiny.check([prompt], [output], [None])


# ---- the prefix cache


def test_a_new_version_never_reads_the_old_ones_prefix(tiny: World, tmp_path: Path) -> None:
    """PC-01: the KV of a prompt is reused under equal weights only; back on version 1 its own may be used again."""
    llm, _ = tiny.llm()
    paths = {f"v{i}": tiny_adapter(tmp_path / f"v{i}", tiny.model, seed=i, rank=8) for i in (1, 2)}
    oracle = Oracle(tiny.model, paths)
    refs = {name: llm.add_adapter(path) for name, path in paths.items()}
    prompt = prompt_of(200, 5)
    cached = []
    for name in ("v1", "v1", "v2", "v1", "v2"):
        output = llm.generate([prompt], greedy(16), refs[name])[0]
        oracle.assert_greedy(prompt, output.token_ids, name)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 192, 0, 192, 192]

    llm.remove_adapter(refs["v1"])
    again = llm.add_adapter(paths["v1"])

    assert again.digest == refs["v1"].digest
    oracle.assert_greedy(prompt, llm.generate([prompt], greedy(16), again)[0].token_ids, "v1")


def test_adapters_and_base_share_no_prefix(tiny: World) -> None:
    """PC-02: one prompt of 200 tokens under base, two adapters, base and the first again: one after the other, each
    first call finds nothing cached; all in one batch, all texts are right."""
    names: list[str | None] = [None, "a1", "a2", None, "a1"]
    prompt = prompt_of(200, 6)
    llm, refs = tiny.llm()
    outputs = [llm.generate([prompt], greedy(16), refs[name])[0] for name in names]
    other, refs = tiny.llm()
    at_once = other.generate([prompt] * 5, greedy(16), [refs[name] for name in names])

    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 192, 192]
    tiny.check([prompt] * 5, outputs, names)
    tiny.check([prompt] * 5, at_once, names)


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_wholly_cached_prompt_still_computes_a_token(tiny: World, length: int) -> None:
    """PC-05: a prompt that is a multiple of the block size, sent twice, with n = 2 and with logprobs: the second answer
    is the first one's, and at most all but one token come from the cache."""
    llm, _ = tiny.llm()
    prompt = prompt_of(length, 7)
    variants = [greedy(10), greedy(10, n=2), greedy(10, logprobs=2)]
    first = [llm.generate([prompt], params)[0] for params in variants]
    second = [llm.generate([prompt], params)[0] for params in variants]

    tiny.check([prompt] * 6, first + second, [None] * 6)
    assert first[1].choices[0].token_ids == first[1].choices[1].token_ids == first[0].token_ids
    assert first[0].num_cached_tokens == 0
    for output in [*first[1:], *second]:
        assert output.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert [output.token_ids for output in second] == [output.token_ids for output in first]
