"""Triton kernels of batched LoRA: y[t] = g ∘ (y[t] + B·(A·x[t])) + c, with A, B, g, c those of token t's adapter.

Two launches for all adapters of a (fused) linear, whatever the mix: shrink, z = A·x, and expand. Both walk the work
list (work_list.py) with as many programs as the card holds, by real segments and real ranks; a tile of one token takes
a path of vector products, one of more takes the tensor cores, side by side in the same launch. No atomics: the parts of
a split sum lie side by side and are added in one order, so equal inputs give equal bits. Why not one fused launch:
docs/decisions/0005-lora-on-a-card-takes-two-launches.md.

Legend: T tokens, H inputs of the linear, O its outputs, S slices (its modules), R rank, K parts of the sum over H.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapters import loader
from adapters.spec import MODULES
from engine.ops import LoraSlices
from engine.ops.cards import Card
from engine.ops.launch import RANK_BLOCK, LoraShape
from engine.ops.work_list import ITEM_FIELDS, TILE_FIELDS, WorkList

_A, _B, _RANK, _FLAGS, _BIAS, _G = (
    tl.constexpr(column)
    for column in (
        loader.OFFSET_A, loader.OFFSET_B, loader.RANK, loader.FLAGS, loader.OFFSET_BIAS, loader.OFFSET_G,
    )
)  # fmt: skip
_HAS_G, _HAS_BIAS = tl.constexpr(loader.HAS_G), tl.constexpr(loader.HAS_BIAS)
_IS_REPLACED = tl.constexpr(loader.IS_WHOLE | loader.HAS_TOKENS)
_UNIT = tl.constexpr(loader.UNIT)
_ROW_FIELDS = tl.constexpr(loader.NUM_FIELDS)
_NUM_MODULES = tl.constexpr(len(MODULES))
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_RANK_BLOCK = tl.constexpr(RANK_BLOCK)


@triton.jit
def _fields(tile_ptr, layer, module):
    """Where the directory's row of (layer, module) lies."""
    directory = tl.load(tile_ptr + 3).to(tl.pointer_type(tl.int64))
    return directory + (layer * _NUM_MODULES + module) * _ROW_FIELDS


@triton.jit(do_not_specialize=["layer", "first_module", "splits", "z_tokens", "num_programs"])
def shrink_kernel(
    x_ptr, z_ptr, tiles_ptr, items_ptr, counts_ptr, layer, first_module, x_stride, num_inputs, splits, z_tokens,
    z_ranks, num_programs, NUM_SLICES: tl.constexpr, SLICE_BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_AWAITED: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """z[k, s, t, r] = Σ_h A_s[r, h] · x[t, h] over the k-th part of H, fp32. x [T, H], z [K, S, T, R]; A_s [R, H] in
    the adapter's buffer. The slices' A are one matrix here: x is read once for all of them."""
    if IS_AWAITED:
        tl.extra.cuda.gdc_launch_dependents()
    NUM_ROWS: tl.constexpr = SLICE_BLOCK * _RANK_BLOCK
    row = tl.arange(0, NUM_ROWS)
    slice_of, rank_of = row // _RANK_BLOCK, row % _RANK_BLOCK
    column = tl.arange(0, BLOCK)
    token_of = tl.arange(0, TILE_ROWS)
    length = tl.cdiv(tl.cdiv(num_inputs, BLOCK), splits) * BLOCK
    for work in range(tl.program_id(0), tl.load(counts_ptr + 1) * splits, num_programs):
        part, item = work % splits, work // splits
        tile_ptr = tiles_ptr + tl.load(items_ptr + _ITEM_FIELDS * item) * _TILE_FIELDS
        rank = tl.load(items_ptr + _ITEM_FIELDS * item + 1) * _RANK_BLOCK + rank_of
        fields = _fields(tile_ptr, layer, first_module + slice_of)
        has_row = slice_of < NUM_SLICES
        has_row &= (tl.load(fields + _FLAGS, mask=has_row, other=0) & _IS_REPLACED) == 0
        has_row &= rank < tl.load(fields + _RANK, mask=has_row, other=0)
        first, num_tokens = tl.load(tile_ptr), tl.load(tile_ptr + 1)
        buffer = tl.load(tile_ptr + 2).to(tl.pointer_type(DTYPE))
        a_row = tl.load(fields + _A, mask=has_row, other=0) * _UNIT + rank.to(tl.int64) * num_inputs
        begin = part * length
        end = _limit(tl.minimum(begin + length, num_inputs), IS_ALIGNED)
        z_row = z_ptr + ((part * NUM_SLICES + slice_of).to(tl.int64) * z_tokens + first) * z_ranks + rank
        if num_tokens == 1:
            x_row = x_ptr + first * x_stride
            sums = tl.zeros([NUM_ROWS, BLOCK], tl.float32)
            for start in range(begin, end, BLOCK):
                at = start + column
                a = _matrix(buffer, a_row[:, None] + at[None, :], has_row[:, None] & (at < end)[None, :], IS_ALIGNED)
                x = tl.load(x_row + at, mask=at < end, other=0.0)
                sums += a.to(tl.float32) * x.to(tl.float32)[None, :]
            tl.store(z_row, tl.sum(sums, 1), mask=has_row)
        else:
            is_token = token_of < num_tokens
            x_rows = x_ptr + (first + token_of)[:, None] * x_stride
            products = tl.zeros([TILE_ROWS, NUM_ROWS], tl.float32)
            for start in range(begin, end, BLOCK):
                at = start + column
                a = _matrix(buffer, a_row[:, None] + at[None, :], has_row[:, None] & (at < end)[None, :], IS_ALIGNED)
                x = tl.load(x_rows + at[None, :], mask=is_token[:, None] & (at < end)[None, :], other=0.0)
                products = tl.dot(x.to(DTYPE), tl.trans(a), products, input_precision=PRECISION)
            z_at = z_row[None, :] + token_of[:, None] * z_ranks
            tl.store(z_at, products, mask=is_token[:, None] & has_row[None, :])


@triton.jit(do_not_specialize=["layer", "first_module", "num_slices", "z_tokens", "num_programs"])
def expand_kernel(
    y_ptr, z_ptr, tiles_ptr, counts_ptr, layer, first_module, y_stride, num_slices, z_tokens, z_ranks,
    num_programs, first_0, end_0, end_1, end_2, SPLITS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    IS_ALIGNED: tl.constexpr, AWAITS: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """y[t, o] = g[o] · (y[t, o] + Σ_r (Σ_k z[k, s, t, r]) · B_s[r, o]) + c[o], in place, for the columns o of each
    slice s, which lie side by side. B_s [R, O]; where the adapter has no g it is 1, no c, 0. A module that it lacks is
    not touched."""
    blocks_0 = tl.cdiv(end_0 - first_0, BLOCK)
    blocks_1 = tl.cdiv(end_1 - end_0, BLOCK)
    num_blocks = blocks_0 + blocks_1 + tl.cdiv(end_2 - end_1, BLOCK)
    num_works = tl.load(counts_ptr) * num_blocks
    if AWAITS:
        tl.extra.cuda.gdc_wait()  # from here on, all that shrink wrote is seen
    token_of = tl.arange(0, TILE_ROWS)
    rank_of = tl.arange(0, _RANK_BLOCK)
    part_of = tl.arange(0, SPLITS)
    for work in range(tl.program_id(0), num_works, num_programs):
        block, tile = work % num_blocks, work // num_blocks
        tile_ptr = tiles_ptr + tile * _TILE_FIELDS
        slice_index = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
        slice_first = tl.where(slice_index == 0, first_0, tl.where(slice_index == 1, end_0, end_1))
        slice_end = tl.where(slice_index == 0, end_0, tl.where(slice_index == 1, end_1, end_2))
        skipped = tl.where(slice_index == 0, 0, tl.where(slice_index == 1, blocks_0, blocks_0 + blocks_1))
        fields = _fields(tile_ptr, layer, first_module + slice_index)
        rank, flags = tl.load(fields + _RANK).to(tl.int32), tl.load(fields + _FLAGS)
        if ((rank > 0) | (flags != 0)) & ((flags & _IS_REPLACED) == 0):
            first, num_tokens = tl.load(tile_ptr), tl.load(tile_ptr + 1)
            buffer = tl.load(tile_ptr + 2).to(tl.pointer_type(DTYPE))
            b_first = tl.load(fields + _B) * _UNIT
            width = _limit(slice_end - slice_first, IS_ALIGNED)
            output = (block - skipped) * BLOCK + tl.arange(0, BLOCK)
            is_output = output < width
            part = (part_of * num_slices + slice_index).to(tl.int64) * z_tokens * z_ranks
            if num_tokens == 1:
                y_row = y_ptr + first * y_stride + slice_first + output
                sums = tl.zeros([BLOCK], tl.float32)
                for start in range(0, rank, _RANK_BLOCK):
                    at = start + rank_of
                    z_at = z_ptr + part[:, None] + (first * z_ranks + at)[None, :]
                    z = tl.sum(tl.load(z_at, mask=(at < rank)[None, :], other=0.0), 0)
                    b_at = b_first + at.to(tl.int64)[:, None] * width + output[None, :]
                    b = _matrix(buffer, b_at, (at < rank)[:, None] & is_output[None, :], IS_ALIGNED)
                    sums += tl.sum(b.to(tl.float32) * z[:, None], 0)
                gain, shift = _scales(buffer, fields, flags, output, width)
                old_row = tl.load(y_row, mask=is_output, other=0.0).to(tl.float32)
                tl.store(y_row, ((old_row + sums) * gain + shift).to(y_ptr.dtype.element_ty), mask=is_output)
            else:
                is_token = token_of < num_tokens
                products = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
                for start in range(0, rank, _RANK_BLOCK):
                    at = start + rank_of
                    has_z = is_token[:, None] & (at < rank)[None, :]
                    z_at = z_ptr + slice_index.to(tl.int64) * z_tokens * z_ranks + (
                        (first + token_of)[:, None] * z_ranks + at[None, :])  # fmt: skip
                    z = tl.zeros([TILE_ROWS, _RANK_BLOCK], tl.float32)
                    for k in range(SPLITS):
                        z += tl.load(z_at + k * num_slices * z_tokens * z_ranks, mask=has_z, other=0.0)
                    b_at = b_first + at.to(tl.int64)[:, None] * width + output[None, :]
                    b = _matrix(buffer, b_at, (at < rank)[:, None] & is_output[None, :], IS_ALIGNED)
                    products = tl.dot(z.to(DTYPE), b, products, input_precision=PRECISION)
                y_at = y_ptr + (first + token_of)[:, None] * y_stride + (slice_first + output)[None, :]
                has_y = is_token[:, None] & is_output[None, :]
                gain, shift = _scales(buffer, fields, flags, output, width)
                old = tl.load(y_at, mask=has_y, other=0.0).to(tl.float32)
                new = (old + products) * gain[None, :] + shift[None, :]
                tl.store(y_at, new.to(y_ptr.dtype.element_ty), mask=has_y)


@triton.jit
def _limit(end, IS_ALIGNED: tl.constexpr):
    """Says of a row's end what the compiler can't see: masks change only at multiples of 16."""
    if IS_ALIGNED:
        end = tl.multiple_of(end, 16)
    return end


@triton.jit
def _matrix(buffer, at, mask, IS_ALIGNED: tl.constexpr):
    """Elements of an adapter's matrix; where its rows are multiples of 16 wide, they begin at multiples of 32 bytes."""
    elements = buffer + at
    if IS_ALIGNED:
        elements = tl.max_contiguous(tl.multiple_of(elements, [1, 16]), [1, 16])
    return tl.load(elements, mask=mask, other=0.0)


@triton.jit
def _scales(buffer, fields, flags, output, width):
    """g and c of some outputs: fp32, whatever the buffer's type; 1 and 0 where the adapter has none."""
    gain_ptr = (buffer + tl.load(fields + _G) * _UNIT).to(tl.pointer_type(tl.float32), bitcast=True)
    shift_ptr = (buffer + tl.load(fields + _BIAS) * _UNIT).to(tl.pointer_type(tl.float32), bitcast=True)
    gain = tl.load(gain_ptr + output, mask=output < tl.where((flags & _HAS_G) != 0, width, 0), other=1.0)
    shift = tl.load(shift_ptr + output, mask=output < tl.where((flags & _HAS_BIAS) != 0, width, 0), other=0.0)
    return gain, shift


class BatchedLora:
    """Launches both kernels, for adapters of one dtype on one card."""

    def __init__(self, dtype: torch.dtype, card: Card) -> None:
        self._card = card
        self._constants: dict[str, Any] = {
            "DTYPE": getattr(tl, str(dtype).removeprefix("torch.")),
            "PRECISION": "ieee" if dtype == torch.float32 else None,
            "num_warps": 4,
        }

    def __call__(self, y_TO: Tensor, x_TH: Tensor, work: WorkList, layer: int, slices: LoraSlices) -> None:
        """y[t, c0:c1] = g ∘ (y[t, c0:c1] + B(A·x[t])) + c for each slice (module, c0, c1), in place."""
        modules, ends = [module for module, _, _ in slices], [end for _, _, end in slices]
        assert modules == list(range(modules[0], modules[0] + len(modules))), "a linear's modules follow one another"
        assert [first for _, first, _ in slices[1:]] == ends[:-1], "and so do their columns"
        shape = LoraShape.of(len(slices), x_TH.shape[1], work.num_tokens)
        z_KSTR = self.shrunk(x_TH, work, len(slices), (layer, modules[0]), is_awaited=self._card.is_hopper_or_later)
        self._expand(y_TO, z_KSTR, work, shape, (layer, modules[0]), slices)

    def shrunk(
        self, x_TH: Tensor, work: WorkList, num_slices: int, at: tuple[int, int], is_awaited: bool = False
    ) -> Tensor:
        """z = A·x, in parts, of `num_slices` modules from (layer, module) on; is_awaited: what is launched next may
        begin before it ends."""
        num_inputs, card = x_TH.shape[1], self._card
        shape = LoraShape.of(num_slices, num_inputs, work.num_tokens)
        z_KSTR = torch.empty(
            (shape.splits, num_slices, work.num_tokens, work.z_ranks), dtype=torch.float32, device=x_TH.device
        )
        if not work.max_items:
            return z_KSTR
        num_programs = min(card.num_programs, work.max_items * shape.splits)
        shrink_kernel[(num_programs,)](
            x_TH, z_KSTR, work.tiles, work.items, work.counts, *at, x_TH.stride(0), num_inputs, shape.splits,
            work.num_tokens, work.z_ranks, num_programs, NUM_SLICES=z_KSTR.shape[1], SLICE_BLOCK=shape.slice_block,
            TILE_ROWS=work.tile_rows, BLOCK=shape.shrink_block,
            IS_ALIGNED=num_inputs % loader.UNIT == 0, IS_AWAITED=is_awaited, num_stages=3, **self._constants,
            **card.options,
        )  # fmt: skip
        return z_KSTR

    def _expand(
        self, y_TO: Tensor, z_KSTR: Tensor, work: WorkList, shape: LoraShape, at: tuple[int, int], slices: LoraSlices
    ) -> None:
        widths, card = [end - first for _, first, end in slices], self._card
        num_blocks = sum(-(-width // shape.expand_block) for width in widths)
        num_programs = min(card.num_programs, work.max_tiles * num_blocks)
        ends = [end for _, _, end in slices] + [slices[-1][2]] * (3 - len(slices))
        expand_kernel[(num_programs,)](
            y_TO, z_KSTR, work.tiles, work.counts, *at, y_TO.stride(0), len(slices), work.num_tokens, work.z_ranks,
            num_programs, slices[0][1], *ends, SPLITS=shape.splits, TILE_ROWS=work.tile_rows,
            BLOCK=shape.expand_block, IS_ALIGNED=all(width % loader.UNIT == 0 for width in widths),
            AWAITS=card.is_hopper_or_later, num_stages=2, **self._constants, **card.options, **card.dependent_options,
        )  # fmt: skip
