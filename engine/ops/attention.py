"""Triton kernels of paged attention: chunks of any length, decode rows split over their context, sliding windows.

A tile is some tokens of one row, with all query heads that share a KV head: they are the rows of one product, so each
key and value is read once per tile. Keys and values are found through the row's block table. Decode rows, of which
there may be few with long contexts, are cut into parts by key, each with its own softmax; a second kernel joins the
parts in a fixed order. Flash attention's running maximum and sum (arXiv 2205.14135), flash decoding's parts.

Legend: T tokens, S rows, N query heads, K KV heads, D head size, G = N / K, P parts, B blocks of a row's table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cards import Card
from engine.ops.device_rows import DeviceRows, Tiles
from engine.ops.launch import AttentionShape, power_of_2

LOG2_E = 1.4426950408889634


@triton.jit
def attention_kernel(
    q_ptr, cache_ptr, out_ptr, parts_ptr, stats_ptr, tile_rows_ptr, tile_firsts_ptr, starts_ptr, lengths_ptr,
    contexts_ptr, tables_ptr, q_stride, values_offset, num_kv_heads, scale_log2, window, part_blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o[t] = softmax(scale · q[t]·Kᵀ) V over the positions p ≤ position[t] of t's row (and p > position[t] − window,
    where there is one). Grid (tiles, K, P).

    q [T, N, D] with any stride of T, cache [2, slots, K, D], out [T, N, D]. With P > 1, which is for rows of one
    token, parts [tiles, N, P, D] gets the weighted values and stats [2, tiles, N, P] the maximum (of base-2 scores) and
    the sum of each part; of a part without keys, only these, −∞ and 0. A part has at least part_blocks · BLOCK keys.
    """
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first = tl.load(tile_rows_ptr + tile), tl.load(tile_firsts_ptr + tile).to(tl.int32)
    start, length = tl.load(starts_ptr + row), tl.load(lengths_ptr + row).to(tl.int32)
    context = tl.load(contexts_ptr + row).to(tl.int32)
    TOKENS: tl.constexpr = TILE // GROUP
    index = tl.arange(0, TILE)
    token, head = first + index // GROUP, kv_head * GROUP + index % GROUP
    is_query = (index < TOKENS * GROUP) & (token < length)
    position = context - length + token
    column = tl.arange(0, HEAD_BLOCK)
    is_column = column < HEAD_DIM
    q_at = (start + token)[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(q_ptr + q_at, mask=is_query[:, None] & is_column[None, :], other=0.0)

    end = tl.minimum(context, context - length + first + TOKENS)
    begin = tl.where(window > 0, tl.maximum(context - length + first - window + 1, 0), 0) // BLOCK * BLOCK
    keys_per_part = tl.maximum(tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), PARTS), part_blocks) * BLOCK
    begin += part * keys_per_part
    end = tl.minimum(end, begin + keys_per_part)
    biggest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, HEAD_BLOCK], tl.float32)
    table_ptr = tables_ptr + 1 + row * tl.load(tables_ptr)
    for first_key in range(begin, end, BLOCK):
        key = first_key + tl.arange(0, BLOCK)
        is_key = key < end
        page = tl.load(table_ptr + key // PAGE, mask=is_key, other=0)
        slot = page * PAGE + key % PAGE
        at = (slot * num_kv_heads + kv_head) * HEAD_DIM
        k = tl.load(
            cache_ptr + at[None, :] + column[:, None], mask=is_key[None, :] & is_column[:, None], other=0.0
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        is_seen &= (window <= 0) | (key[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        bigger = tl.maximum(biggest, tl.max(scores, 1))
        safe = tl.where(bigger == float("-inf"), 0.0, bigger)  # nothing seen yet: −inf − −inf is no number
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(biggest - safe)
        v = tl.load(
            cache_ptr + values_offset + at[:, None] + column[None, :],
            mask=is_key[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        total = total * decay + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * decay[:, None], input_precision=PRECISION)
        biggest = bigger

    has_out = is_query[:, None] & is_column[None, :]
    num_heads = num_kv_heads * GROUP
    if PARTS == 1:
        out = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # a padding row sees nothing
        out_at = ((start + token)[:, None] * num_heads + head[:, None]) * HEAD_DIM + column[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=has_out)
    else:
        at = (tile.to(tl.int64) * num_heads + head) * PARTS + part
        has_sums = has_out & (index < tl.where(begin < end, TILE, 0))[:, None]
        tl.store(parts_ptr + at[:, None] * HEAD_DIM + column[None, :], sums, mask=has_sums)
        tl.store(stats_ptr + at, biggest, mask=is_query)
        tl.store(stats_ptr + tl.num_programs(0) * num_heads * PARTS + at, total, mask=is_query)


@triton.jit
def join_parts_kernel(
    parts_ptr, stats_ptr, out_ptr, tile_rows_ptr, starts_ptr, num_heads, HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """o[t, n] = Σ_p 2^(m_p − max m) · parts[t, n, p] / Σ_p 2^(m_p − max m) · sum_p. Grid (tiles, N): rows of one
    token."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(starts_ptr + tl.load(tile_rows_ptr + tile)).to(tl.int64)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, HEAD_BLOCK)
    at = (tile * num_heads + head) * PARTS + part
    biggest = tl.load(stats_ptr + at)
    total = tl.load(stats_ptr + tl.num_programs(0) * num_heads * PARTS + at)
    top = tl.max(biggest, 0)
    weight = tl.exp2(biggest - tl.where(top == float("-inf"), 0.0, top))
    is_part = biggest > float("-inf")  # what lies in the others is no number of ours
    sums = tl.load(
        parts_ptr + at[:, None] * HEAD_DIM + column[None, :],
        mask=is_part[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    whole = tl.sum(weight * total, 0)
    out = tl.sum(weight[:, None] * sums, 0) / tl.where(whole == 0.0, 1.0, whole)
    out_at = (start * num_heads + head) * HEAD_DIM + column
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


class PagedAttention:
    """Launches both kernels, for one dtype and block size on one card."""

    def __init__(self, dtype: torch.dtype, block_size: int, card: Card) -> None:
        self._block_size = block_size
        self._card = card
        self._precision = "ieee" if dtype == torch.float32 else None

    def decodes(self, head_dim: int, group: int, rows: DeviceRows, num_kv_heads: int) -> AttentionShape:
        max_keys = rows.table_width * self._block_size
        return AttentionShape.of_decodes(group, head_dim, len(rows.decodes) * num_kv_heads, max_keys, self._card)

    def chunks(self, head_dim: int, group: int) -> AttentionShape:
        return AttentionShape.of_chunks(group, head_dim, self._card)

    def __call__(
        self, q_TND: Tensor, cache: Tensor, out_TO: Tensor, rows: DeviceRows, tiles: Tiles, shape: AttentionShape,
        scale: float, window: int | None,
    ) -> None:  # fmt: skip
        """Fills the tiles' tokens of out [T, N·D]."""
        num_heads, head_dim = q_TND.shape[1:]
        num_kv_heads = cache.shape[2]
        parts, stats = out_TO, out_TO  # not touched where there is one part
        if shape.parts > 1:
            size = len(tiles) * num_heads * shape.parts
            both = torch.empty(size * (head_dim + 2), dtype=torch.float32, device=out_TO.device)
            parts, stats = both.split((size * head_dim, size * 2))
        attention_kernel[(len(tiles), num_kv_heads, shape.parts)](
            q_TND, cache, out_TO, parts, stats, tiles.rows, tiles.firsts, rows.starts_S, rows.lengths_S,
            rows.contexts_S, rows.tables, q_TND.stride(0), cache.stride(0), num_kv_heads, scale * LOG2_E, window or 0,
            shape.part_blocks, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
            HEAD_BLOCK=max(16, power_of_2(head_dim)),
            PAGE=self._block_size, TILE=shape.tile, BLOCK=shape.block, PARTS=shape.parts, PRECISION=self._precision,
            num_warps=shape.num_warps, num_stages=shape.num_stages, **self._card.options,
        )  # fmt: skip
        if shape.parts > 1:
            join_parts_kernel[(len(tiles), num_heads)](
                parts, stats, out_TO, tiles.rows, rows.starts_S, num_heads, HEAD_DIM=head_dim,
                HEAD_BLOCK=power_of_2(head_dim), PARTS=shape.parts, num_warps=2, **self._card.options,
            )  # fmt: skip
