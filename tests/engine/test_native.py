"""The native CPU operations against naive loops, at odd sizes too; and their promise that a row's bits depend
on nothing but the row."""

from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.model.weights import load_model
from engine.ops import compile as native_build
from engine.ops import create_ops
from engine.ops.cpu import CpuOps
from engine.ops.native import NativeOps
from engine.params import SamplingParams
from engine.sampler import Sampler
from engine.sequence import Sequence
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence, random_adapter, step_of
from tests.engine.test_ops import (
    QKV,
    SHAPE,
    SPANS,
    attention_batch,
    batch_of,
    filled_bank,
    naive_attention,
    naive_lora,
    popularity,
)
from tests.tiny import tiny_model

OPS = NativeOps()
"""Of the fastest instruction set here, which every other test runs with too."""


@pytest.fixture(params=native_build.supported(), ids=lambda each: each.name, scope="module")
def ops(request: pytest.FixtureRequest) -> NativeOps:
    """Of each instruction set that this machine can run."""
    return NativeOps(request.param)


def as_read(x: torch.Tensor, ops: NativeOps) -> torch.Tensor:
    """Activations as products see them."""
    return x.bfloat16().float() if ops.rounds_activations else x


def tolerance(ops: NativeOps) -> float:
    """Of what passes two products: what lies between them may be rounded to bf16."""
    return 2**-7 if ops.rounds_activations else 2e-5


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12, 13, 25, 250, 500])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (33, 17), (100, 63), (5, 1)])
def test_linear(ops: NativeOps, rows: int, outputs: int, inputs: int) -> None:
    """W·x + b for any number of rows and any shape, and each row's bits are those that it has alone."""
    draw = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, inputs, generator=draw).bfloat16()
    x, bias = torch.randn(rows, inputs, generator=draw), torch.randn(outputs, generator=draw)
    packed = ops.pack_linear(weight)

    got = ops.linear(x, packed, bias)

    assert torch.allclose(got.double(), as_read(x, ops).double() @ weight.double().t() + bias, atol=1e-4)
    assert torch.equal(got[-1:], ops.linear(x[-1:].clone(), packed, bias))


@pytest.mark.parametrize("kind", ["identical", "distinct", "uniform", "zipf"])
@pytest.mark.parametrize("shape", ["decode", "mixed"])
def test_lora(ops: NativeOps, kind: str, shape: str) -> None:
    """Mixed ranks, targets and base rows in one batch, whatever the popularity; base rows untouched bit for bit."""
    bank = filled_bank(8, torch.bfloat16)
    lengths = [1] * 24 if shape == "decode" else [1 + 5 * (row % 4) for row in range(24)]
    batch = batch_of(popularity(kind, 24, 8), lengths, bank)
    x, y = torch.randn(batch.num_tokens, 64), torch.randn(batch.num_tokens, 128)
    got = y.clone()

    ops.lora(got, x, ops.plan(batch), 1, QKV)

    num_base = batch.segments[0].start if batch.segments else batch.num_tokens
    assert (got - naive_lora(y, as_read(x, ops), batch, bank, 1, QKV)).abs().max() <= tolerance(ops)
    assert torch.equal(got[:num_base], y[:num_base])


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("window", [None, 7, 16, 50])
@pytest.mark.parametrize("spans", SPANS)
def test_attention(ops: NativeOps, spans: str, window: int | None, head_dim: int) -> None:
    """Decodes of any lengths, first and later chunks in one batch, with and without sliding window."""
    draw = torch.Generator().manual_seed(2)
    batch = attention_batch(SPANS[spans])
    num_slots = 512 * BLOCK_SIZE
    q = torch.randn(batch.num_tokens, 6, head_dim, generator=draw)
    plain = torch.randn(2, num_slots, 2, head_dim, generator=draw).bfloat16()
    cache = torch.zeros(2, num_slots, 2, head_dim, dtype=torch.bfloat16)
    ops.write_kv(plain[0].float(), plain[1].float(), cache, torch.arange(num_slots))

    got = ops.attention(q, cache, ops.plan(batch), 0.25, window)

    wanted = naive_attention(as_read(q, ops), plain.float(), batch, batch.positions_T.tolist(), 0.25, window)
    assert (got - wanted).abs().max() <= tolerance(ops)


@pytest.mark.parametrize("head_dim", [16, 48, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_keys_and_values_are_kept_alike_in_blocks_and_one_by_one(ops: NativeOps, head_dim: int, threads: int) -> None:
    """Tokens that fill a block are written in another way: from any slot on, runs broken or not, the cache holds the
    same bits, and nothing else of it is touched."""
    torch.manual_seed(0)
    slots = torch.cat([torch.arange(5, 70), torch.arange(96, 128), torch.arange(200, 216), torch.tensor([91, 80, 85])])
    k, v = torch.randn(2, len(slots), 3, head_dim)
    k[3, 1, 2], v[4, 0, 0], v[20, 2, 5] = float("nan"), float("inf"), -1e38
    caches = [torch.full((2, 16 * 16, 3, head_dim), 7.0, dtype=torch.bfloat16) for _ in range(2)]
    ops.set_threads(threads)

    ops.write_kv(k, v, caches[0], slots)
    for t in range(len(slots)):
        ops.write_kv(k[t : t + 1], v[t : t + 1], caches[1], slots[t : t + 1])

    assert torch.equal(caches[0].view(torch.int16), caches[1].view(torch.int16))
    assert int((caches[0] == 7.0).sum()) == caches[0].numel() - 2 * len(slots) * 3 * head_dim


def test_an_overflow_stays_with_its_owner() -> None:
    """NaN and Inf in somebody's keys and values change no bit of the answer of whoever gets the block next."""
    k, q = torch.randn(40, 2, 16), torch.randn(2, 6, 16)
    poison = torch.full((32, 2, 16), math.nan)
    poison[::2] = math.inf
    sequences = [make_sequence([1] * 18, [0, 1]), make_sequence([1] * 3, [2])]
    batch = build_batch(step_of([Part(s, s.num_tokens - 1, s.num_tokens) for s in sequences]), None, BLOCK_SIZE)
    answers = []
    for is_poisoned in (False, True):
        cache = torch.zeros(2, 4 * BLOCK_SIZE, 2, 16, dtype=torch.bfloat16)
        if is_poisoned:
            for start in (0, 32):
                OPS.write_kv(poison, poison, cache, torch.arange(start, start + 32))
        OPS.write_kv(k[:21], k[19:40], cache, torch.cat((torch.arange(18), torch.arange(32, 35))))
        answers.append(OPS.attention(q, cache, OPS.plan(batch), 0.25, None))

    assert torch.equal(*answers)
    assert answers[0].isfinite().all()


def test_small_ones(ops: NativeOps) -> None:
    """Norm, residual, SiLU·mul and rope equal torch, at widths that fill no whole vector too."""
    reference = CpuOps(torch.float32)
    for width in (16, 50, 576):
        x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
        assert torch.allclose(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=1e-5)
        got, added = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
        assert torch.equal(added, residual + x)
        assert torch.allclose(got, reference.rms_norm(added, weight, 1e-5), atol=1e-5)
        wide = torch.cat((x * 30, residual), 1)
        assert torch.allclose(ops.silu_mul(wide), reference.silu_mul(wide.clone()), rtol=1e-5, atol=1e-6)
    heads, angles = torch.randn(5, 6, 16), torch.randn(5, 8)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    assert torch.allclose(ops.rope(heads.clone(), cos, sin), reference.rope(heads, cos, sin), atol=1e-5)
    extremes = torch.tensor([[-200.0, -88.0, 0.0, 88.0, 200.0, math.inf] * 4 + [1.0] * 24])
    assert ops.silu_mul(extremes)[:, :5].isfinite().all()


@pytest.mark.parametrize("vocab_size", [5000, 383, 50])
def test_native_sampling_chooses_as_torch_does(ops: NativeOps, vocab_size: int) -> None:
    """Seeded draws give the same tokens natively, whatever the cuts: of steep rows, flat ones, rows with equal logits
    and with blocked ones."""
    logits = torch.randn(80, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits[:20] *= 0.05
    logits[20:40] = logits[20:40].round()
    logits[60:70, ::2] = torch.finfo(torch.float32).min
    rows = [
        Sequence("r", 0, [1] * (1 + index), 1, SamplingParams(temperature=0.5 + index / 64, **cut), index)
        for index in range(16)
        for cut in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05, "top_p": 0.95}, {}, {"top_k": 700, "top_p": 0.97})
    ]
    by_torch, native = (Sampler((2,), draw).sample(logits.clone(), rows) for draw in (None, ops.draw))

    assert [each.token_id for each in native] == [each.token_id for each in by_torch]


@pytest.mark.parametrize("vocab_size", [1, 7, 50, 4096, 5003])
def test_native_greedy_is_argmax(ops: NativeOps, vocab_size: int) -> None:
    """The lowest id among the largest logits, also where it is the last; NaN, ∞ and rows of −∞ aren't sound."""
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(1)).mul(3).round()
    logits[30, -1] = 1e9
    logits[31, vocab_size // 2] = math.nan
    logits[32, 0] = math.inf
    logits[33] = -math.inf

    tokens, is_sound = ops.greedy(logits)

    kept = [*range(31), *range(34, 40)]
    assert tokens[kept].tolist() == logits[kept].argmax(-1).tolist()
    assert np.flatnonzero(is_sound == 0).tolist() == [31, 32, 33]


def test_a_row_has_the_same_bits_in_every_batch(tmp_path: Path) -> None:
    """Logits of a sequence are equal bit for bit alone and beside others, in one prompt and in chunks of any size."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=2))
    model = load_model(tmp_path, config, OPS)
    bank = LoraBank(config.base_shape(), 1 << 22, OPS.adapter_dtype)
    ranks = {(layer, name): 8 for layer in range(2) for name in ("q_proj", "v_proj", "down_proj")}
    bank.place("a", random_adapter(config.base_shape(), ranks, seed=1, dtype=torch.bfloat16))
    tokens = [(11 * position) % 300 for position in range(70)]
    answers = []
    for others, chunk in ((0, 70), (0, 1), (3, 7), (20, 33), (40, 64)):
        cache = KVCache(config, 512, BLOCK_SIZE, OPS.weight_dtype)
        row = make_sequence(tokens, [0, 1, 2, 3, 4], "a")
        logits = []
        for start in range(0, 70, chunk):
            end = min(start + chunk, 70)
            beside = [make_sequence([5 + n] * (start + 1 + n), [*range(10 + 9 * n, 19 + 9 * n)], "a" if n % 2 else None)
                      for n in range(others)]  # fmt: skip
            parts = [Part(row, start, end), *(Part(each, 0, each.num_tokens) for each in beside)]
            logits.append(forward(model, cache, parts, bank)[0])
        answers.append(torch.cat(logits))

    assert all(torch.equal(answers[0], each) for each in answers[1:])


@pytest.mark.parametrize("hidden", [64, 104])
def test_adapters_add_the_same_bits_to_few_rows_and_to_many(ops: NativeOps, hidden: int) -> None:
    """A linear with an adapter of any rank: every row alone, some together, all of them."""
    linears = {name: (outputs, hidden) for name, (outputs, _) in SHAPE.linears.items()}
    shape = replace(SHAPE, linears=linears)
    draw = torch.Generator().manual_seed(4)
    weight, x = torch.randn(128, hidden, generator=draw), torch.randn(60, hidden, generator=draw)
    packed, bias = ops.pack_linear(weight), torch.randn(128, generator=draw)
    bank = LoraBank(shape, 1 << 24, torch.bfloat16)
    for rank in (1, 5, 16, 33, 64):
        ranks = {(0, name): rank for name in ("q_proj", "k_proj", "v_proj")}
        bank.place(f"r{rank}", random_adapter(shape, ranks, seed=rank, dtype=torch.bfloat16))
    for rank in (1, 5, 16, 33, 64):
        plan = ops.plan(batch_of([f"r{rank}"] * 60, [1] * 60, bank))
        wanted = ops.adapted_linear(x, packed, bias, plan, 0, QKV)
        for size in (1, 3, 7, 11, 29):
            for first in range(0, 60 - size, size):
                plan = ops.plan(batch_of([f"r{rank}"] * size, [1] * size, bank))
                got = ops.adapted_linear(x[first : first + size].contiguous(), packed, bias, plan, 0, QKV)
                assert torch.equal(got, wanted[first : first + size])


def test_threads_change_no_bit() -> None:
    """Thousands of small and large products with 1, 2 and 5 threads (more than cores) give the same bits each time."""
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(512, 96, generator=draw).bfloat16(), torch.randn(40, 96, generator=draw)
    packed = OPS.pack_linear(weight)
    wanted = [OPS.linear(x[:rows].contiguous(), packed) for rows in range(1, 41)]
    try:
        for num_threads in (1, 2, 5):
            OPS.set_threads(num_threads)
            for _ in range(25):
                got = [OPS.linear(x[:rows].contiguous(), packed) for rows in range(1, 41)]
                assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    finally:
        OPS.set_threads(torch.get_num_threads())


def test_without_a_compiler_plain_torch_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing can be built, the model still runs, and the log says why it is slow and what to install."""
    monkeypatch.setattr(native_build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-DNOT_BUILT_YET"))

    ops = create_ops("cpu", torch.bfloat16, 64, 16)

    assert isinstance(ops, CpuOps)
    assert "install g++" in caplog.text


def test_a_failing_compiler_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the compiler says is in the error; no half-written library stays."""
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-no-such-flag"))

    with pytest.raises(native_build.BuildError, match="no-such-flag"):
        native_build.load_library(tmp_path)

    assert not list(tmp_path.iterdir())


def test_what_an_old_compiler_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A processor newer than the compiler gets the best library that can be built, and the log says so."""
    best, *others = native_build.supported()
    unknown = replace(best, name="unknown", flags=("-munknown-instructions",))
    monkeypatch.setattr(native_build, "supported", lambda: (unknown, best, *others))

    library = native_build.load_library(tmp_path)

    assert "unknown" not in library._name
    assert "no native operations for unknown" in caplog.text
    assert not list(tmp_path.glob("*unknown*"))


def test_only_what_the_processor_has_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An old processor gets the instruction set that it has, an unknown one plain torch: no instruction is illegal."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(native_build, "CPU_INFO", info)
    monkeypatch.setattr(native_build.platform, "machine", lambda: "x86_64")
    found = []
    for flags in ("fpu sse2", "sse2 avx2 fma bmi2", "sse2 avx2 fma bmi2 avx512f", "sse2 avx512f avx512_bf16"):
        info.write_text(f"processor : 0\nmodel name : old\nflags : {flags}\n")
        found.append(native_build.supported()[0].name)
    monkeypatch.setattr(native_build.platform, "machine", lambda: "riscv64")

    assert found == ["sse2", "avx2", "avx2", "sse2"]
    with pytest.raises(native_build.BuildError, match="riscv64"):
        native_build.load_library(tmp_path)


def test_the_form_of_products_is_chosen_once(tmp_path: Path) -> None:
    """Whether the dot product of bf16 is the faster one is measured once and kept beside the library: a machine gives
    the same bits at every start."""
    if native_build.DOT not in native_build.supported():
        pytest.skip("this machine has no dot product of bf16")
    library = native_build.load_library(instruction_set=native_build.DOT)
    first = native_build._is_dot_faster(library, tmp_path)
    (note,) = tmp_path.glob("cpu-dot-*")

    note.write_text(str(int(not first)))

    assert native_build._is_dot_faster(library, tmp_path) is not first


def test_arm64_under_an_emulator(tmp_path: Path) -> None:
    """What this machine can't run is right too: built by a cross compiler, the operations for NEON equal naive loops in
    an emulated processor."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user-static")
    (neon,) = native_build.INSTRUCTION_SETS["aarch64"]
    flags = [flag for flag in native_build.FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    source = Path(__file__).with_name("native_check.cpp")
    program = tmp_path / "check"
    command = [compiler, *flags, *neon.flags, "-O1", "-static", f"-I{native_build.SOURCES}", str(source), "-o", program]
    subprocess.run(command, check=True, timeout=250)

    done = subprocess.run([emulator, program], capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stdout
    assert "all equal" in done.stdout
