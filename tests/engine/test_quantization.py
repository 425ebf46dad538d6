"""Quantised base weights: how exact they are, what they take, what they leave as it is, and what is refused."""

from __future__ import annotations

import argparse
import difflib
import heapq
import inspect
import math
import statistics
from asyncio import base_events
from email import message
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.batch import build_batch
from engine.config import ConfigError, EngineConfig
from engine.kv_cache import KVCache
from engine.llm import LLM
from engine.lora import LoraBank
from engine.memory_plan import plan_memory
from engine.model.base_weights import ModelBase
from engine.model.calibration import MAX_ROWS, ROW_TOKENS, TEXT, Calibration, calibration_rows, moments_of
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import load_model
from engine.ops import create_ops
from engine.ops.native import FORMATS, NativeOps, PackedLinear
from engine.params import SamplingParams
from engine.quantization import Quantization
from engine.text import Tokenizer
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence, random_adapter, step_of
from tests.engine.test_native import OPS, ops
from tests.tiny import tiny_model

__all__ = ["ops"]  # the fixture: each instruction set

DEMO = Path("data/models/smollm2-135m-instruct")
KINDS = [Quantization(8, 128), Quantization(8, 32), Quantization(4, 128), Quantization(4, 32)]
NUM_TOKENS = 768
ROWS = torch.randint(0, 290, (4, 64), generator=torch.Generator().manual_seed(3))
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}-{kind.group}")


def unpacked(ops: NativeOps, packed: PackedLinear, inputs: int) -> Tensor:
    """[O, I]: what it multiplies, column by column."""
    return ops.linear(torch.eye(inputs), packed).t()


def as_numbers(x: Tensor, group: int) -> Tensor:
    """Activations as products with quantised weights read them: 16-bit numbers, a scale per row and group."""
    parts = []
    for part in x.double().split(group, 1):
        scale = part.abs().amax(1, keepdim=True).clamp_min(1e-30) / 32767
        parts.append((part / scale).round() * scale)
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("kind", "limit"), [(KINDS[0], 0.008), (KINDS[3], 0.10)], ids=["int8", "int4-groups-of-32"])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536)])
def test_the_error_of_a_linear(ops: NativeOps, kind: Quantization, limit: float, outputs: int, inputs: int) -> None:
    """On Gaussian weights the result is off by at most 0.8 % (int8, groups of 128) and 10 % (int4, groups of 32)."""
    draw = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=draw).bfloat16()
    x = torch.randn(64, inputs, generator=draw)

    got = ops.linear(x, ops.pack_linear(weight, kind)).double()

    wanted = x.double() @ weight.double().t()
    assert (got - wanted).norm() / wanted.norm() <= limit


@by_kind
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 576), (33, 70), (5, 1)])
def test_rows_and_their_bits(ops: NativeOps, kind: Quantization, outputs: int, inputs: int) -> None:
    """Any number of rows, any shape: the product with the weights as they were rounded, plus the bias; and each row's
    bits are those that it has alone."""
    draw = torch.Generator().manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs, generator=draw).bfloat16(), torch.randn(outputs, generator=draw)
    x = torch.randn(41, inputs, generator=draw)
    packed = ops.pack_linear(weight, kind)
    kept = unpacked(ops, packed, inputs).double()
    alone = torch.cat([ops.linear(row[None].contiguous(), packed, bias) for row in x])

    for rows in (1, 2, 4, 5, 12, 13, 41):
        got = ops.linear(x[:rows].contiguous(), packed, bias)

        assert torch.equal(got, alone[:rows])
        wanted = as_numbers(x[:rows], kind.group) @ kept.t() + bias
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
        assert torch.allclose(got.double(), x[:rows].double() @ kept.t() + bias, atol=5e-3)


def test_what_is_not_finite_stays_so(ops: NativeOps) -> None:
    """A row with an infinity or a NaN has no finite result, and leaves others alone."""
    packed = ops.pack_linear(torch.randn(32, 128).bfloat16(), KINDS[2])
    x = torch.randn(6, 128)
    x[1, 40], x[4, 127] = math.inf, math.nan

    is_finite = ops.linear(x, packed).isfinite()

    assert is_finite[[0, 2, 3, 5]].all()
    assert not is_finite[[1, 4]].any()


@by_kind
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 200), (33, 576)])
def test_errors_are_made_up_for(ops: NativeOps, kind: Quantization, outputs: int, inputs: int) -> None:
    """With the inputs' moments, rounding leaves clearly less error in the outputs for inputs of that kind."""
    draw = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=draw).bfloat16()
    x = torch.randn(2048, 24, generator=draw) @ torch.randn(24, inputs, generator=draw)
    x += 0.3 * torch.randn(x.shape, generator=draw)
    wanted = x[1024:].double() @ weight.double().t()

    known = (None, moments_of(x[:1024]))
    plain, made_up = ((ops.linear(x[1024:], ops.pack_linear(weight, kind, each)) - wanted).norm() for each in known)

    assert made_up <= 0.75 * plain


@by_kind
def test_norms_are_those_of_the_weights_as_kept(ops: NativeOps, kind: Quantization) -> None:
    """‖W[o]‖², which DoRA divides by, is of what is multiplied."""
    weight = torch.randn(70, 200).bfloat16()
    packed = ops.pack_linear(weight, kind)

    assert torch.allclose(ops.squares(packed, weight), unpacked(ops, packed, 200).square().sum(1), rtol=1e-4)


@pytest.mark.parametrize("calibration", [None, Calibration(ROWS)], ids=["plain", "calibrated"])
def test_adapters_are_measured_against_the_quantised_base(calibration: Calibration | None, tmp_path: Path) -> None:
    """‖W + B·A‖² for DoRA is computed with the base that the engine has, not with the checkpoint's."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=1))
    model = load_model(tmp_path, config, OPS, quantization=KINDS[2], calibration=calibration)
    outputs, inputs = config.linears["o_proj"]
    a, b = torch.randn(4, inputs).bfloat16().float(), torch.randn(outputs, 4)

    got = torch.from_numpy(ModelBase(model).squared_norms(0, "o_proj", a.numpy(), b.numpy()))

    kept = unpacked(OPS, model.layers[0].o.packed, inputs)
    assert torch.allclose(got, (kept + b @ a).square().sum(1), rtol=1e-3)


def test_adapters_are_added_in_bf16(tmp_path: Path) -> None:
    """On a quantised base a row's logits have the same bits alone and in chunks, and its adapter is felt as on bf16."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=2))
    bank = LoraBank(config.base_shape(), 1 << 22, OPS.adapter_dtype)
    ranks = {(layer, name): 8 for layer in range(2) for name in ("q_proj", "v_proj", "down_proj")}
    bank.place("a", random_adapter(config.base_shape(), ranks, seed=1, dtype=torch.bfloat16))
    tokens = [(11 * position) % 300 for position in range(40)]
    found = {}
    for kind in (None, KINDS[1], KINDS[3]):
        model = load_model(tmp_path, config, OPS, quantization=kind)
        for adapter, chunk in ((None, 40), ("a", 40), ("a", 7)):
            cache, row = KVCache(config, 8, BLOCK_SIZE, OPS.weight_dtype), make_sequence(tokens, [0, 1, 2], adapter)
            parts = [Part(row, start, min(start + chunk, 40)) for start in range(0, 40, chunk)]
            found[kind, adapter, chunk] = torch.cat([forward(model, cache, [part], bank)[0] for part in parts])
        assert torch.equal(found[kind, "a", 40], found[kind, "a", 7])

    change = found[None, "a", 40] - found[None, None, 40]
    for kind, limit in ((KINDS[1], 0.25), (KINDS[3], 0.8)):
        off = found[kind, "a", 40] - found[kind, None, 40] - change
        assert off.norm() <= limit * change.norm()


def test_calibrated_layers(tmp_path: Path) -> None:
    """Every layer is quantised, in the bits of its kind, by what it reads; on inputs without a pattern no worse than to
    the nearest."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=3))
    tokens = [(7 * position) % 290 for position in range(48)]
    found = []
    for kind, calibration in ((None, None), (KINDS[2], None), (KINDS[2], Calibration(ROWS))):
        model = load_model(tmp_path, config, OPS, quantization=kind, calibration=calibration)
        formats = [(each.qkv.packed.weights.format, each.down.packed.weights.format) for each in model.layers]
        assert formats == [(FORMATS[8 if kind else None], FORMATS[4 if kind else None])] * 3
        cache = KVCache(config, 3, BLOCK_SIZE, OPS.weight_dtype)
        found.append(forward(model, cache, [Part(make_sequence(tokens, [0, 1, 2]), 0, 48)])[0])

    assert not torch.equal(found[2], found[1])
    assert (found[2] - found[0]).norm() < 1.1 * (found[1] - found[0]).norm()


def test_rows_to_calibrate_by() -> None:
    """As many whole rows as the text has in a tokenizer, at most MAX_ROWS."""
    assert calibration_rows(list(range(3 * ROW_TOKENS + 5))).tolist()[2][-1] == 3 * ROW_TOKENS - 1
    assert calibration_rows([1] * 100_000).shape == (MAX_ROWS, ROW_TOKENS)


def test_what_is_kept_in_eight_bits(tmp_path: Path) -> None:
    """Attention's linears everywhere, down_proj in the first and last tenth of the layers; nothing else."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=20))
    layers = load_model(tmp_path, config, OPS, quantization=KINDS[2]).layers

    assert {each.qkv.packed.weights.format for each in layers} == {FORMATS[8]}
    assert {each.o.packed.weights.format for each in layers} == {FORMATS[8]}
    assert {each.gate_up.packed.weights.format for each in layers} == {FORMATS[4]}
    in_eight = [index for index, each in enumerate(layers) if each.down.packed.weights.format == FORMATS[8]]
    assert in_eight == [0, 1, 18, 19]


@by_kind
def test_the_plan_counts_what_is_kept(kind: Quantization, tmp_path: Path) -> None:
    """The memory plan's figure for weights is what the packed weights take, within the padding of tiles."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=11))
    model = load_model(tmp_path, config, OPS, quantization=kind)
    linears = [linear for layer in model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    taken = sum(linear.packed.data.nbytes for linear in (*linears, model.head)) + model.embedding_VH.nbytes

    plan = plan_memory(
        EngineConfig(model=tmp_path, device="cpu", quantization=kind.name, quantization_group=kind.group), config
    )

    assert plan.weights_bytes <= taken <= plan.weights_bytes * 1.03
    assert plan.weights_name == f"bfloat16+{kind.name}g{kind.group}" in str(plan)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"dtype": "float32"}, "--dtype bfloat16"), ({"quantization_group": 100}, "--quantization-group 100.*use 96"),
     ({"block_size": 32}, "blocks of 16")],
)  # fmt: skip
def test_what_no_kernel_can_is_refused_by_name(settings: dict[str, object], named: str, tmp_path: Path) -> None:
    """A combination that can't run is an error at start that says what is missing."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=1))
    asked = EngineConfig(**{"model": tmp_path, "device": "cpu", "quantization": "int4", **settings})  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=named):
        prepare(asked, config)


def prepare(asked: EngineConfig, config: ModelConfig) -> None:
    plan = plan_memory(asked, config)
    create_ops("cpu", plan.dtype, config.head_dim, plan.block_size, plan.quantization)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_offline(quantization: str, tmp_path: Path) -> None:
    """LLM(quantization=…) writes, and equal runs give equal tokens."""
    tiny_model(tmp_path, num_layers=2)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, quantization=quantization, max_model_len=64) as llm:  # type: ignore[arg-type]
        first, second = (llm.generate([5, 6, 7], params)[0] for _ in range(2))

        assert first.token_ids == second.token_ids
        assert llm.ready.quantization == quantization


def texts() -> dict[str, str]:
    """Of kinds that models read, none of which int4 is calibrated by."""
    from pydoc_data.topics import topics

    chapters = sorted(topics, key=lambda name: len(topics[name]))[-12:]
    modules = (statistics, argparse, heapq, difflib, base_events, message)
    return {
        "novel": (Path(__file__).parent / "prose.txt").read_text("utf-8"),
        "reference": topics["exceptions"] + topics["formatstrings"],
        "licence": Path("LICENSE").read_text("utf-8"),
        **{name: topics[name] for name in chapters},
        **{module.__name__: inspect.getsource(module) for module in modules},
    }


@pytest.mark.demo_model
@pytest.mark.parametrize(("kind", "limit"), [(KINDS[0], 1.01), (KINDS[2], 1.06)], ids=["int8", "int4"])
def test_perplexity(kind: Quantization, limit: float) -> None:
    """In groups of 128, against bf16's: the mean over several texts."""
    plain, quantised = perplexities(None), perplexities(kind)
    ratios = {name: quantised[name] / plain[name] for name in plain}

    assert sum(ratios.values()) / len(ratios) <= limit, ratios


def perplexities(kind: Quantization | None) -> dict[str, float]:
    config, tokenizer = ModelConfig.from_dir(DEMO), Tokenizer(DEMO)
    calibration = None
    if kind is not None and kind.is_calibrated:
        calibration = Calibration(calibration_rows(tokenizer.encode(TEXT.read_text("utf-8"))))
    model = load_model(DEMO, config, OPS, quantization=kind, calibration=calibration)
    return {name: perplexity(model, tokenizer.encode(text)[:NUM_TOKENS]) for name, text in texts().items()}


def perplexity(model: Transformer, tokens: list[int]) -> float:
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    cache = KVCache(model.config, num_blocks, BLOCK_SIZE, OPS.weight_dtype)
    row = make_sequence(tokens, list(range(num_blocks)))
    batch = build_batch(step_of([Part(row, 0, len(tokens))]), None, BLOCK_SIZE)
    logits = model.logits(model.forward(batch, cache), batch, torch.arange(len(tokens) - 1))
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])))
