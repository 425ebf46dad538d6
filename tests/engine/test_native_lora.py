"""The native batched LoRA at every number of rows that an adapter may have in a batch, against naive loops."""

from __future__ import annotations

import pytest
import torch

from adapters.spec import BaseShape
from engine.lora import LoraBank
from engine.ops import LoraSlices
from engine.ops import compile as native_build
from engine.ops.native import NativeOps
from tests.engine.forward import random_adapter
from tests.engine.test_ops import QKV, batch_of, filled_bank, naive_lora, popularity

SHAPE = BaseShape(1, 8, 70, {"q_proj": (112, 70), "k_proj": (45, 70)})
SLICES: LoraSlices = ((0, 0, 112), (1, 112, 157))
"""Neither inputs nor outputs fill whole vectors."""


@pytest.fixture(params=native_build.supported(), ids=lambda each: each.name, scope="module")
def ops(request: pytest.FixtureRequest) -> NativeOps:
    """Of each instruction set that this machine can run."""
    return NativeOps(request.param)


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 8, 16, 17, 33])
def test_one_to_nine_rows_of_an_adapter(ops: NativeOps, rank: int) -> None:
    """However many rows an adapter has beside others, odd ranks too: what the naive loop gives, base rows untouched,
    and of every row the bits that it has alone."""
    bank = LoraBank(SHAPE, 1 << 22, torch.bfloat16)
    for number in range(1, 10):
        ranks = {(0, "q_proj"): rank, (0, "k_proj"): 1 + (rank + number) % 20}
        bank.place(f"a{number}", random_adapter(SHAPE, ranks, seed=number, dtype=torch.bfloat16))
    adapters = [None, None, *(f"a{number}" for number in range(1, 10) for _ in range(number))]
    batch = batch_of(adapters, [1] * len(adapters), bank)
    draw = torch.Generator().manual_seed(rank)
    x, y = torch.randn(len(adapters), 70, generator=draw), torch.randn(len(adapters), 157, generator=draw)
    got = y.clone()

    ops.lora(got, x, ops.plan(batch), 0, SLICES)

    as_read = x.bfloat16().float() if ops.rounds_activations else x
    tolerance = 2**-7 if ops.rounds_activations else 2e-5
    assert (got - naive_lora(y, as_read, batch, bank, 0, SLICES)).abs().max() <= tolerance
    assert torch.equal(got[:2], y[:2])
    for row, adapter in enumerate(adapters):
        alone = y[row : row + 1].clone()
        ops.lora(alone, x[row : row + 1].clone(), ops.plan(batch_of([adapter], [1], bank)), 0, SLICES)
        assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("kind", ["identical", "distinct", "uniform", "zipf"])
def test_one_call_is_two(ops: NativeOps, kind: str) -> None:
    """A linear with its adapters, where many rows of one have its part added on the way, gives the bits of the base's
    linear and then the adapters'."""
    bank = filled_bank(8, torch.bfloat16)
    batch = batch_of(popularity(kind, 24, 8), [1] * 24, bank)
    draw = torch.Generator().manual_seed(0)
    x, bias = torch.randn(24, 64, generator=draw), torch.randn(128, generator=draw)
    packed = ops.pack_linear(torch.randn(128, 64, generator=draw).bfloat16())
    plan = ops.plan(batch)
    wanted = ops.linear(x, packed, bias)
    ops.lora(wanted, x, plan, 1, QKV)

    assert torch.equal(ops.adapted_linear(x, packed, bias, plan, 1, QKV), wanted)
