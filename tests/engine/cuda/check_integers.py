"""Linears with integer weights under Triton's interpreter: what the kernels compute is float64's product with the
weights as kept, and what is kept is near to what was given. Run by test_cuda.py, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bench.gpu.inputs import called_again
from engine.kv_cache import KVCache
from engine.model.base_weights import ModelBase
from engine.model.config import ModelConfig
from engine.model.weights import load_model
from engine.ops.cards import Card
from engine.ops.cuda import CudaOps
from engine.ops.integer_weights import IntegerWeight, integer_weight
from engine.ops.launch import SLAB_ELEMENTS, IntegerShape
from engine.quantization import Quantization
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence
from tests.tiny import tiny_model

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_cuda.py"

OPS = CudaOps(torch.float32, 16, Card(24, programs_each=2, options={}), called_again)
KINDS = [Quantization(8, 128), Quantization(8, 32), Quantization(4, 128), Quantization(4, 32), Quantization(4, 96)]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}g{kind.group}")


@by_kind
@pytest.mark.parametrize("inputs", [48, pytest.param(320, marks=pytest.mark.long), 576])
def test_products_are_those_of_the_weights_as_kept(kind: Quantization, inputs: int) -> None:
    """Few tokens and many, with sums whole and in parts, outputs and inputs that fill no tile, a last group that is
    shorter: float64's product, with and without bias."""
    draw = torch.Generator().manual_seed(inputs)
    weight, bias = torch.randn(150, inputs, generator=draw), torch.randn(150, generator=draw)
    packed = integer_weight(weight, kind)
    kept = packed.widened().double()
    wide = torch.randn(133, inputs + 16, generator=draw)
    x = wide[:, :inputs]

    for tokens in (1, 5, 67, 133):
        got = OPS.linear(x[:tokens], packed, bias)
        wanted = x[:tokens].double() @ kept.t() + bias

        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert torch.allclose(OPS.linear(x[:tokens], packed), got - bias, atol=1e-4)


def test_every_path_is_taken() -> None:
    """What the test above relies on: its tokens take one part and several, and weights widened before."""
    card = Card(24)
    shapes = [IntegerShape.of(tokens, 150, 576, 64, card) for tokens in (5, 67, 133)]

    assert [shape and shape.splits for shape in shapes] == [2, 2, None]
    assert IntegerShape.of(5, 150, 48, 32, card) == IntegerShape(16, 64, 1)
    assert IntegerShape.of(32, 4096, 14336, 128, Card(132)) == IntegerShape(32, 64, 8)


def test_slabs_of_widened_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is widened in several slabs, the last of them smaller, gives the same product."""
    monkeypatch.setattr("engine.ops.launch.SLAB_ELEMENTS", 64 * 96)
    packed = integer_weight(torch.randn(150, 96), Quantization(4, 32))
    x = torch.randn(140, 96)

    assert IntegerShape.slab_outputs(96) == 64
    assert torch.allclose(OPS.linear(x, packed), x @ packed.widened().t(), atol=1e-4)
    assert SLAB_ELEMENTS * 2 <= 40 << 20


def test_sixteen_bits() -> None:
    """In 16 bits (fp16: the interpreter multiplies the bit patterns of bf16) all paths agree up to rounding."""
    ops = CudaOps(torch.float16, 16, Card(24, programs_each=2, options={}))
    for kind in (KINDS[0], KINDS[3]):
        packed = integer_weight(torch.randn(70, 256).half(), kind)
        x = torch.randn(133, 256).half()
        wanted = x.double() @ packed.widened().double().t()
        for tokens in (1, 133):
            got = ops.linear(x[:tokens], packed)
            assert (got - wanted[:tokens]).abs().max() <= 2e-3 * wanted.abs().max()


@pytest.mark.parametrize(
    ("kind", "limit"), [(Quantization(8, 128), 0.008), (Quantization(8, 32), 0.008), (Quantization(4, 32), 0.1)]
)  # fmt: skip
def test_what_is_kept_is_near(kind: Quantization, limit: float) -> None:
    """The relative error of a linear with Gaussian weights: at most 0.8 % in int8, 10 % in int4 with groups of 32."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 1024, generator=draw) * 0.02
    off = integer_weight(weight, kind).widened() - weight

    assert off.norm() <= limit * weight.norm()


@by_kind
def test_it_takes_what_the_plan_counts(kind: Quantization) -> None:
    """Bytes of numbers and scales are those of Quantization.num_bytes; ‖W[o]‖² is of the weights as kept; rows of
    zeros stay zeros."""
    weight = torch.randn(40, 576)
    weight[7] = 0
    packed = integer_weight(weight, kind)

    assert packed.numbers_OI.nbytes + packed.scales_GO.nbytes == kind.num_bytes(40, 576)
    assert torch.allclose(packed.squares(), packed.widened().square().sum(1), rtol=1e-5)
    assert not packed.widened()[7].any()


def test_a_model_of_integers(tmp_path: Path) -> None:
    """A model loaded with int4 computes what its weights as kept compute in plain torch, head in int8; DoRA's norms are
    of those weights."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=1))
    model = load_model(tmp_path, config, OPS, quantization=Quantization(4, 32))
    head = model.head.packed
    assert isinstance(head, IntegerWeight)
    assert head.quantization == Quantization(8, 32)
    plain = load_model(tmp_path, config, OPS)
    for mine, theirs in zip(plain.layers, model.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            getattr(mine, name).packed.copy_(getattr(theirs, name).packed.widened())
    plain.head.packed.copy_(head.widened())
    tokens = [(11 * position) % 300 for position in range(20)]
    found = []
    for each in (model, plain):
        row = make_sequence(tokens, [0, 1], None)
        parts = [Part(row, 0, 19), Part(row, 19, 20)]
        cache = KVCache(config, 8, BLOCK_SIZE, torch.float32)
        found.append(torch.cat([forward(each, cache, [part])[0] for part in parts]))

    assert (found[0] - found[1]).abs().max() <= 1e-4 * found[1].abs().max()
    outputs, inputs = config.linears["o_proj"]
    a, b = torch.randn(4, inputs), torch.randn(outputs, 4)
    kept = model.layers[0].o.packed.widened()
    got = torch.from_numpy(ModelBase(model).squared_norms(0, "o_proj", a.numpy(), b.numpy()))
    assert torch.allclose(got, (kept + b @ a).square().sum(1), rtol=1e-4)
