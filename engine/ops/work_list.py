"""The work of batched LoRA, listed on the device: which adapter meets which tokens, and how many blocks of rank it has.

The list's length is a number in the device's memory, which kernels read in their loops. So the host waits for nothing,
no grid spans slots, tokens or ranks that are not there, and one CUDA graph serves every mix of adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cards import Card
from engine.ops.device_rows import SEGMENT_FIELDS
from engine.ops.launch import RANK_BLOCK, LoraShape, num_warps, power_of_2

TILE_FIELDS = 4
"""A tile: first token, number of tokens, address of the adapter's buffer, of its directory. In int64."""

ITEM_FIELDS = 2
"""An item: a tile's index, and which block of the rank. In int32."""

_SEGMENT_FIELDS = tl.constexpr(SEGMENT_FIELDS)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_RANK_BLOCK = tl.constexpr(RANK_BLOCK)


@triton.jit(do_not_specialize=["num_segments"])
def work_list_kernel(
    segments_ptr, num_segments, tiles_ptr, items_ptr, counts_ptr, NUM_SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr
):  # fmt: skip
    """Cuts segments [S, 5] into tiles [.., 4] of at most TILE_ROWS tokens, and tiles into items [.., 2] of RANK_BLOCK
    ranks; counts [2] says how many there are of both. One program: segments are few, their order is kept."""
    index = tl.arange(0, NUM_SEGMENTS)
    is_in = index < num_segments
    segment = segments_ptr + index * _SEGMENT_FIELDS
    first = tl.load(segment, mask=is_in, other=0)
    end = tl.load(segment + 1, mask=is_in, other=0)
    buffer = tl.load(segment + 2, mask=is_in, other=0)
    directory = tl.load(segment + 3, mask=is_in, other=0)
    rank = tl.load(segment + 4, mask=is_in, other=0)
    num_tiles = (end - first + TILE_ROWS - 1) // TILE_ROWS
    num_blocks = (rank + _RANK_BLOCK - 1) // _RANK_BLOCK
    num_items = num_tiles * num_blocks
    first_tile = tl.cumsum(num_tiles, 0) - num_tiles
    first_item = tl.cumsum(num_items, 0) - num_items
    tl.store(counts_ptr, tl.sum(num_tiles, 0).to(tl.int32))
    tl.store(counts_ptr + 1, tl.sum(num_items, 0).to(tl.int32))
    for step in range(0, tl.max(num_tiles, 0)):
        has_tile = is_in & (step < num_tiles)
        start = first + step * TILE_ROWS
        tile = tiles_ptr + (first_tile + step) * _TILE_FIELDS
        tl.store(tile, start, mask=has_tile)
        tl.store(tile + 1, tl.minimum(end - start, TILE_ROWS), mask=has_tile)
        tl.store(tile + 2, buffer, mask=has_tile)
        tl.store(tile + 3, directory, mask=has_tile)
        for block in range(0, tl.max(num_blocks, 0)):
            has_item = has_tile & (block < num_blocks)
            item = items_ptr + (first_item + step * num_blocks + block) * _ITEM_FIELDS
            tl.store(item, (first_tile + step).to(tl.int32), mask=has_item)
            tl.store(item + 1, tl.full([NUM_SEGMENTS], block, tl.int32), mask=has_item)


class WorkList:
    """The list of one batch, in memory for the worst mix of its rows.

    tile_rows             tokens of a tile, at most
    max_tiles, max_items  as many as there can be of them
    z_ranks               width of a row of A·x: the largest rank, in whole blocks
    tiles, items, counts  on the device, see above
    """

    def __init__(self, segments_GF: Tensor, num_tokens: int, max_rank: int, card: Card) -> None:
        num_segments, device = len(segments_GF), segments_GF.device
        self.num_tokens = num_tokens
        self.tile_rows = LoraShape.tile_rows(num_tokens)
        self.max_tiles = min(num_tokens, num_tokens // self.tile_rows + num_segments)
        self.max_items = self.max_tiles * -(-max_rank // RANK_BLOCK)
        self.z_ranks = -(-max_rank // RANK_BLOCK) * RANK_BLOCK
        self.tiles = torch.empty(max(1, self.max_tiles) * TILE_FIELDS, dtype=torch.int64, device=device)
        self.items = torch.empty(max(1, self.max_items) * ITEM_FIELDS, dtype=torch.int32, device=device)
        self.counts = torch.empty(2, dtype=torch.int32, device=device)
        work_list_kernel[(1,)](
            segments_GF, num_segments, self.tiles, self.items, self.counts, NUM_SEGMENTS=power_of_2(num_segments),
            TILE_ROWS=self.tile_rows, num_warps=num_warps(8 * num_segments), **card.options,
        )  # fmt: skip
