"""Triton kernels that treat each row by itself: RMSNorm, rotary embedding, SiLU·mul, the write of keys and values.

Every program owns whole rows, so nothing is shared and nothing is reduced between programs. Sums are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_inner"])
def rms_norm_kernel(
    x_ptr, weight_ptr, y_ptr, num_inner, outer_stride, inner_stride, width, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """y[i, j] = x[i, j] / √(mean(x[i, j]²) + eps) · w for x [I, J, H] with any strides of I and J, y contiguous; one
    program per (i, j). The quotient is rounded to x's type before it is multiplied, as Llama's own code does."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in = column < width
    start = (row // num_inner) * outer_stride + (row % num_inner) * inner_stride
    x = tl.load(x_ptr + start + column, mask=is_in, other=0.0)
    wide = x.to(tl.float32)
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0)
    tl.store(y_ptr + row * width + column, (normal.to(x.dtype) * weight).to(x.dtype), mask=is_in)


@triton.jit
def add_rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, y_ptr, width, eps, BLOCK: tl.constexpr):
    """r' = r + x, in place; y = rms_norm(r'). All [T, H], contiguous; one program per row."""
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_in = column < width
    x = tl.load(x_ptr + start + column, mask=is_in, other=0.0)
    residual = tl.load(residual_ptr + start + column, mask=is_in, other=0.0)
    added = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
    tl.store(residual_ptr + start + column, added, mask=is_in)
    wide = added.to(tl.float32)
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0)
    tl.store(y_ptr + start + column, (normal.to(x.dtype) * weight).to(x.dtype), mask=is_in)


@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, token_stride, num_heads, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """y[t, j] = x[t, j] · cos[t] + swap_halves(x[t, j]) · sin[t] for x [T, J, 2·HALF] with any stride of T, y
    contiguous, cos and sin [T, 2·HALF]; one program per token and HEAD_BLOCK heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    is_in = (head < num_heads) & (column < HALF)
    angle = token * 2 * HALF + column
    cos_1 = tl.load(cos_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)
    source = x_ptr + token * token_stride + head * (2 * HALF) + column
    first, second = tl.load(source, mask=is_in, other=0.0), tl.load(source + HALF, mask=is_in, other=0.0)
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    target = y_ptr + (token * num_heads + head) * (2 * HALF) + column
    tl.store(target, (wide_1 * cos_1 + wide_2 * sin_1).to(first.dtype), mask=is_in)
    tl.store(target + HALF, (wide_2 * cos_2 + wide_1 * sin_2).to(first.dtype), mask=is_in)


@triton.jit
def silu_mul_kernel(x_ptr, y_ptr, row_stride, width, BLOCK: tl.constexpr):
    """y[t, i] = silu(x[t, i]) · x[t, I + i] for x [T, 2·I]; one program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    gate = tl.load(x_ptr + row * row_stride + column, mask=is_in, other=0.0)
    up = tl.load(x_ptr + row * row_stride + width + column, mask=is_in, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(y_ptr + row * width + column, silu * up, mask=is_in)


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, cache_ptr, slots_ptr, k_stride, v_stride, values_offset, width, limit, BLOCK: tl.constexpr
):  # fmt: skip
    """cache[0, slot[t]] = k[t]; cache[1, slot[t]] = v[t], K·D numbers each, finite ones only (± limit, NaN as 0); one
    program per token. A token whose slot is negative (a padding row) writes nowhere."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in = column < tl.where(slot >= 0, width, 0)
    target = cache_ptr + slot * width + column
    key = tl.load(k_ptr + token * k_stride + column, mask=is_in, other=0.0).to(tl.float32)
    value = tl.load(v_ptr + token * v_stride + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(target, _finite(key, limit).to(cache_ptr.dtype.element_ty), mask=is_in)
    tl.store(target + values_offset, _finite(value, limit).to(cache_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _finite(value, limit):
    value = tl.where(value == value, value, 0.0)
    return tl.minimum(tl.maximum(value, -limit), limit)
