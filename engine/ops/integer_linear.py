"""Triton kernels of linears whose weights lie in 8 or 4 bits (integer_weights.py).

Few tokens: the weights' bytes are the limit, so a program takes them to registers as they lie and multiplies the
numbers there; the sum over the inputs is cut into parts where outputs alone would not occupy the card, and a second
kernel adds the parts in one order. Many tokens: the products are the limit, so slabs of the weight are widened, small
enough to stay in the card's L2 cache, and cuBLAS multiplies them. Why not torch's own:
docs/decisions/0007-integer-weights-on-a-card.md.

Legend: T tokens, I inputs, O outputs, K parts of the sum over I.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cards import Card
from engine.ops.integer_weights import IntegerWeight
from engine.ops.launch import IntegerShape

SUM_BLOCK = 1024
WIDEN_OUTPUTS = 32


@triton.jit(do_not_specialize=["num_tokens"])
def integer_linear_kernel(
    x_ptr, numbers_ptr, scales_ptr, bias_ptr, y_ptr, num_tokens, num_inputs, num_outputs, row_bytes, x_stride, group,
    BITS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """y[t, o] = Σ_i s[i // group, o] · n[o, i] · x[t, i] + b[o]; with K > 1, y [K, T, O] fp32 are the sums' parts,
    without b. Grid (blocks of O, K, tiles of T). x [T, I] with any stride of T; outputs are the rows of the product,
    as widened numbers are in registers."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_output, is_token = output < num_outputs, token < num_tokens
    num_chunks = tl.cdiv(num_inputs, CHUNK)
    chunks_each = tl.cdiv(num_chunks, SPLITS)
    numbers_row = numbers_ptr + output.to(tl.int64)[:, None] * row_bytes
    x_row = x_ptr + token.to(tl.int64)[None, :] * x_stride
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for chunk in range(part * chunks_each, tl.minimum(part * chunks_each + chunks_each, num_chunks)):
        first = chunk * CHUNK
        scale = tl.load(scales_ptr + first // group * num_outputs + output, mask=is_output, other=0.0)
        if BITS == 8:
            at = first + tl.arange(0, CHUNK)
            numbers = tl.load(numbers_row + at[None, :], mask=is_output[:, None], other=0)
            x = tl.load(x_row + at[:, None], mask=is_token[None, :] & (at < num_inputs)[:, None], other=0.0)
            product = tl.dot(numbers.to(DTYPE), x.to(DTYPE), input_precision=PRECISION)
        else:
            half = tl.arange(0, CHUNK // 2)
            both = tl.load(numbers_row + (chunk * (CHUNK // 2) + half)[None, :], mask=is_output[:, None], other=0)
            at = first + half
            x = tl.load(x_row + at[:, None], mask=is_token[None, :] & (at < num_inputs)[:, None], other=0.0)
            low = (both & 15).to(tl.int8) - 8
            product = tl.dot(low.to(DTYPE), x.to(DTYPE), input_precision=PRECISION)
            at += CHUNK // 2
            x = tl.load(x_row + at[:, None], mask=is_token[None, :] & (at < num_inputs)[:, None], other=0.0)
            high = (both >> 4).to(tl.int8) - 8
            product = tl.dot(high.to(DTYPE), x.to(DTYPE), product, input_precision=PRECISION)
        sums += product * scale.to(tl.float32)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    row = (part * num_tokens + token).to(tl.int64) * num_outputs
    y_at = y_ptr + row[None, :] + output[:, None]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def sum_parts_kernel(
    parts_ptr, bias_ptr, y_ptr, num_tokens, num_outputs, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y[t, o] = Σ_k parts[k, t, o] + b[o]. Grid (T, blocks of O)."""
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = output < num_outputs
    sums = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        at = parts_ptr + (part * num_tokens + token) * num_outputs + output
        sums += tl.load(at, mask=is_output, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * num_outputs + output, sums.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["first_output"])
def widen_kernel(
    numbers_ptr, scales_ptr, weight_ptr, first_output, end_output, num_inputs, num_outputs, row_bytes, group,
    BITS: tl.constexpr, CHUNK: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """weight[o − first, i] = s[i // group, o] · n[o, i] for the outputs from first to end. Grid (blocks of them, chunks
    of I)."""
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = (first_output + place).to(tl.int64)
    is_output = output < end_output
    chunk = tl.program_id(1)
    scale = tl.load(scales_ptr + chunk * CHUNK // group * num_outputs + output, mask=is_output, other=0.0)
    scale = scale.to(tl.float32)[:, None]
    target = weight_ptr + place.to(tl.int64)[:, None] * num_inputs
    if BITS == 8:
        at = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        numbers = tl.load(numbers_ptr + output[:, None] * row_bytes + at, mask=is_output[:, None], other=0)
        is_in = is_output[:, None] & (at < num_inputs)
        tl.store(target + at, (numbers.to(tl.float32) * scale).to(weight_ptr.dtype.element_ty), mask=is_in)
    else:
        half = tl.arange(0, CHUNK // 2)[None, :]
        source = numbers_ptr + output[:, None] * row_bytes + chunk * (CHUNK // 2) + half
        both = tl.load(source, mask=is_output[:, None], other=0)
        low, high = ((both & 15).to(tl.int8) - 8).to(tl.float32), ((both >> 4).to(tl.int8) - 8).to(tl.float32)
        at = chunk * CHUNK + half
        is_in = is_output[:, None] & (at < num_inputs)
        tl.store(target + at, (low * scale).to(weight_ptr.dtype.element_ty), mask=is_in)
        at += CHUNK // 2
        is_in = is_output[:, None] & (at < num_inputs)
        tl.store(target + at, (high * scale).to(weight_ptr.dtype.element_ty), mask=is_in)


class IntegerLinear:
    """Launches the kernels, for activations of one dtype on one card."""

    def __init__(self, dtype: torch.dtype, card: Card) -> None:
        self._card = card
        self._dtype = dtype
        self._constants: dict[str, Any] = {
            "DTYPE": getattr(tl, str(dtype).removeprefix("torch.")),
            "PRECISION": "ieee" if dtype == torch.float32 else None,
        }

    def __call__(self, x_TI: Tensor, weight: IntegerWeight, bias_O: Tensor | None) -> Tensor:
        """y[t] = W·x[t] + b."""
        shape = IntegerShape.of(len(x_TI), weight.num_outputs, weight.num_inputs, weight.chunk, self._card)
        y_TO = torch.empty((len(x_TI), weight.num_outputs), dtype=self._dtype, device=x_TI.device)
        if not len(x_TI):
            return y_TO
        if shape is None:
            self._multiply_widened(x_TI, weight, y_TO)
            return y_TO if bias_O is None else y_TO.add_(bias_O)
        if shape.splits == 1:
            self._multiply(x_TI, weight, bias_O, y_TO, shape)
            return y_TO
        parts = torch.empty((shape.splits, *y_TO.shape), dtype=torch.float32, device=x_TI.device)
        self._multiply(x_TI, weight, None, parts, shape)
        sum_parts_kernel[(len(x_TI), -(-weight.num_outputs // SUM_BLOCK))](
            parts, y_TO if bias_O is None else bias_O, y_TO, len(x_TI), weight.num_outputs, SPLITS=shape.splits,
            HAS_BIAS=bias_O is not None, BLOCK=SUM_BLOCK, num_warps=4, **self._card.options,
        )  # fmt: skip
        return y_TO

    def _multiply(
        self, x_TI: Tensor, weight: IntegerWeight, bias_O: Tensor | None, y: Tensor, shape: IntegerShape
    ) -> None:
        assert x_TI.stride(1) == 1, "the inputs of a token lie densely"
        grid = (-(-weight.num_outputs // shape.outputs), shape.splits, -(-len(x_TI) // shape.tokens))
        integer_linear_kernel[grid](
            x_TI, weight.numbers_OI, weight.scales_GO, y if bias_O is None else bias_O, y, len(x_TI),
            weight.num_inputs, weight.num_outputs, weight.numbers_OI.shape[1], x_TI.stride(0),
            weight.quantization.group, BITS=weight.quantization.bits, CHUNK=weight.chunk, SPLITS=shape.splits,
            TOKENS=shape.tokens, OUTPUTS=shape.outputs, HAS_BIAS=bias_O is not None,
            num_warps=8 if shape.tokens > 32 else 4, num_stages=3 if shape.tokens > 32 else 4,
            **self._constants, **self._card.options,
        )  # fmt: skip

    def _multiply_widened(self, x_TI: Tensor, weight: IntegerWeight, y_TO: Tensor) -> None:
        """A slab of outputs after another, through one scratch."""
        num_inputs, num_chunks = weight.num_inputs, -(-weight.num_inputs // weight.chunk)
        slab = min(weight.num_outputs, IntegerShape.slab_outputs(num_inputs))
        scratch = torch.empty((slab, num_inputs), dtype=self._dtype, device=x_TI.device)
        for first in range(0, weight.num_outputs, slab):
            end = min(first + slab, weight.num_outputs)
            widen_kernel[(-(-(end - first) // WIDEN_OUTPUTS), num_chunks)](
                weight.numbers_OI, weight.scales_GO, scratch, first, end, num_inputs, weight.num_outputs,
                weight.numbers_OI.shape[1], weight.quantization.group, BITS=weight.quantization.bits,
                CHUNK=weight.chunk, OUTPUTS=WIDEN_OUTPUTS, num_warps=4, **self._card.options,
            )  # fmt: skip
            torch.mm(x_TI, scratch[: end - first].t(), out=y_TO[:, first:end])
