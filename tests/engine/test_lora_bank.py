"""LoraBank: slots, extents and compaction; what was placed is what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapters.loader import PackedAdapter
from adapters.spec import LINEARS
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.model.weights import load_model
from engine.ops import create_ops
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence, random_adapter
from tests.tiny import block_of, tiny_config

SHAPE = ModelConfig.from_dict(tiny_config(num_layers=2, hidden=64)).base_shape()


by_arena = pytest.mark.parametrize("has_arena", [False, True], ids=["host", "arena"])


def adapter(
    rank: int, seed: int, names: tuple[str, ...] = LINEARS, dtype: torch.dtype = torch.float32
) -> PackedAdapter:
    return random_adapter(SHAPE, {(layer, name): rank for layer in range(2) for name in names}, seed, dtype)


@by_arena
def test_pairs_are_what_the_directory_says(has_arena: bool) -> None:
    """Each module's A and B, at its own rank, None where the adapter lacks it."""
    bank = LoraBank(SHAPE, 1 << 20, torch.float32, has_arena=has_arena)
    bank.place("other", adapter(3, seed=9))
    host = random_adapter(SHAPE, {(0, "q_proj"): 3, (1, "down_proj"): 5}, seed=1)
    bank.place("a", host)

    slot = bank.slot("a")
    pairs = {(layer, module): bank.pair(slot, layer, module) for layer in range(2) for module in range(len(LINEARS))}

    assert {key for key, pair in pairs.items() if pair is not None} == {(0, 0), (1, 6)}
    a_HR, b_RO, gain_O, shift_O = pairs[0, 0] or pytest.fail("q_proj is missing")
    assert a_HR is not None
    assert b_RO is not None
    assert torch.equal(a_HR.t(), host.buffer[: 3 * 64].view(3, 64))
    assert torch.equal(b_RO, host.buffer[3 * 64 : 6 * 64].view(3, 64))
    assert gain_O is shift_O is bank.extras(slot) is None


@by_arena
def test_a_slot_holds_nothing_of_its_former_owner(has_arena: bool) -> None:
    """AL-02: A2 (q only, lower rank) after A1 (all, higher rank) in one slot is A2 on a fresh bank, bit for bit."""
    first, second = adapter(8, seed=1), adapter(2, seed=2, names=("q_proj",))
    used, fresh = (LoraBank(SHAPE, first.size_bytes, torch.float32, has_arena=has_arena) for _ in range(2))
    used.place("a1", first)
    slot = used.slot("a1")
    used.evict("a1")
    used.place("a2", second)
    fresh.place("a2", second)

    assert used.slot("a2") == slot
    for layer in range(2):
        for module in range(len(LINEARS)):
            one, other = used.pair(slot, layer, module), fresh.pair(fresh.slot("a2"), layer, module)
            assert (one is None) == (other is None) == (module != 0)
            if one is not None and other is not None:
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])


def test_a_host_copy_outlives_the_eviction() -> None:
    """What was read before an eviction can be placed again later, whatever took its place in the meantime."""
    first, second = adapter(4, seed=1), adapter(4, seed=2)
    wanted = first.buffer.clone()
    bank = LoraBank(SHAPE, first.size_bytes, torch.float32, has_arena=True)
    bank.place("a", first)
    kept = bank.read("a")
    bank.evict("a")
    bank.place("b", second)

    assert torch.equal(kept.buffer, wanted)


def test_scattered_free_bytes_are_gathered() -> None:
    """An adapter that fits the free bytes is placed though no single gap is large enough."""
    small, large = adapter(2, seed=0), adapter(4, seed=1)
    bank = LoraBank(SHAPE, 4 * small.size_bytes, torch.float32, has_arena=True)
    hosts = {f"s{index}": adapter(2, seed=index) for index in range(4)}
    for digest, host in hosts.items():
        bank.place(digest, host)
    bank.evict("s0")
    bank.evict("s2")

    bank.place("large", large)

    for digest, host in {"s1": hosts["s1"], "s3": hosts["s3"], "large": large}.items():
        assert torch.equal(bank.read(digest).buffer, host.buffer)
        assert torch.equal(bank.read(digest).directory, host.directory)
    assert bank.used_bytes == bank.budget_bytes


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=40))
def test_any_history_of_placing_and_evicting_keeps_every_adapter(
    has_arena: bool, history: list[tuple[int, int]]
) -> None:
    """Whatever comes and goes within the budget, what is placed reads back bit for bit; eviction frees its bytes."""
    bank = LoraBank(SHAPE, adapter(16, seed=0).size_bytes, torch.float32, has_arena=has_arena)
    placed: dict[str, PackedAdapter] = {}
    for name, rank in history:
        digest = f"d{name}"
        if digest in placed:
            bank.evict(digest)
            del placed[digest]
            continue
        host = adapter(rank, seed=100 * name + rank)
        if bank.used_bytes + host.size_bytes <= bank.budget_bytes:
            bank.place(digest, host)
            placed[digest] = host
        assert bank.used_bytes == sum(host.size_bytes for host in placed.values())
        assert len({bank.slot(digest) for digest in placed}) == len(placed)
        assert all(torch.equal(bank.read(digest).buffer, host.buffer) for digest, host in placed.items())


@pytest.mark.parametrize("kind", ["cpu", "native"])
def test_base_rows_equal_a_model_without_adapters(tiny_llama: Path, kind: str) -> None:
    """SC-07: base rows beside adapter rows, after adapters were used and with adapters that have no rows, give the bits
    of the same batch without any adapter; adapter rows differ from them."""
    config = ModelConfig.from_dir(tiny_llama)
    ops = create_ops("cpu", torch.float32 if kind == "cpu" else torch.bfloat16, 16, 16)
    model = load_model(tiny_llama, config, ops)
    bank = LoraBank(config.base_shape(), 1 << 22, ops.adapter_dtype)
    for index, rank in enumerate((2, 8, 64)):
        bank.place(f"a{index}", adapter(rank, index, dtype=ops.adapter_dtype))

    def answers(adapters: list[str | None]) -> list[torch.Tensor]:
        cache = KVCache(config, 64, BLOCK_SIZE, ops.weight_dtype)
        sequences = [
            make_sequence([(7 * row + p) % 300 for p in range(20)], [2 * row, 2 * row + 1], name)
            for row, name in enumerate(adapters)
        ]
        forward(model, cache, [Part(s, 0, 19) for s in sequences], bank)
        return forward(model, cache, [Part(s, 19, 20) for s in sequences], bank)

    base = answers([None] * 6)
    mixed = answers([None, "a1", None, "a0", "a1", None])
    ordered = answers([None, None, None, "a1", "a0", "a1"])
    again = answers([None] * 6)

    assert all(torch.equal(one, other) for one, other in zip(base, again, strict=True))
    assert all(torch.equal(ordered[row], base[row]) for row in (0, 1, 2))
    for row in (0, 2, 5):  # sorted, they lie in other places than among base rows only: by place, plain torch may round
        pair = mixed[row], base[row]
        assert torch.equal(*pair) if kind == "native" else torch.allclose(*pair, 1e-5, 1e-5)
    for row in (1, 3, 4):
        assert (mixed[row] - base[row]).abs().max() > 0.01


def test_adapter_rows_equal_a_model_with_merged_weights(tiny_llama: Path, tmp_path: Path) -> None:
    """All seven linears of every layer: base + adapter in one mixed batch give the logits of W + B·A, within 1e-4."""
    config = ModelConfig.from_dir(tiny_llama)
    ops = create_ops("cpu", torch.float32, 16, 16)
    bank = LoraBank(config.base_shape(), 1 << 22, torch.float32)
    bank.place("other", adapter(3, seed=2))
    bank.place("a", adapter(8, seed=1))
    tensors = load_file(tiny_llama / "model.safetensors")
    for layer in range(2):
        for module, name in enumerate(LINEARS):
            part = bank.pair(bank.slot("a"), layer, module) or pytest.fail("a module is missing")
            a_HR, b_RO = part[:2]
            assert a_HR is not None
            assert b_RO is not None
            tensors[f"model.layers.{layer}.{block_of(name)}.{name}.weight"] += (a_HR @ b_RO).t()
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = list(range(5, 45))

    def logits(path: Path, adapters: list[str | None]) -> torch.Tensor:
        cache = KVCache(config, 64, BLOCK_SIZE, torch.float32)
        rows = [make_sequence(tokens, [4 * i, 4 * i + 1, 4 * i + 2], name) for i, name in enumerate(adapters)]
        return forward(load_model(path, config, ops), cache, [Part(row, 0, 40) for row in rows], bank)[0]

    merged = logits(tmp_path, [None])
    served = logits(tiny_llama, ["a", None, "other"])

    assert (served - merged).abs().max() <= 1e-4
    assert (served - logits(tiny_llama, [None])).abs().max() > 0.1


def test_an_empty_step_runs(tiny_llama: Path) -> None:
    """SC-07: after a mass abort a step may hold no row."""
    config = ModelConfig.from_dir(tiny_llama)
    ops = create_ops("cpu", torch.float32, 16, 16)

    assert forward(load_model(tiny_llama, config, ops), KVCache(config, 4, BLOCK_SIZE, torch.float32), []) == []
