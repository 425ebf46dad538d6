"""DeviceRows: what kernels must know of a batch's rows, as one int64 tensor on the device, so that a step costs one
copy. Knows no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch, Ints, Segment
from engine.lora import LoraBank

SEGMENT_FIELDS = 5
"""Of a segment: first token, token after the last, address of the adapter's buffer, of its directory, its largest rank.
One whose two tokens are equal is empty."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tokens that one program of attention takes: the row of each tile, and its first token within the row."""

    rows: Tensor
    firsts: Tensor

    def __len__(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Views of one tensor.

    starts_S, lengths_S, contexts_S   as in ForwardBatch
    decodes                           a tile for each row of one token
    segments_GF                       [G, SEGMENT_FIELDS]; G = 0 means that no row has an adapter
    tables                            width of the block tables, then [S, width]
    max_rank                          at least that of any segment
    """

    starts_S: Tensor
    lengths_S: Tensor
    decodes: Tiles
    contexts_S: Tensor
    segments_GF: Tensor
    tables: Tensor
    max_rank: int

    @property
    def table_width(self) -> int:
        """Blocks that a row may have, at most; of rows that stay where they are, as many as there is room for."""
        return (self.tables.shape[0] - 1) // max(1, self.starts_S.shape[0])

    @classmethod
    def of(cls, batch: ForwardBatch) -> DeviceRows:
        """A copy of the batch's rows on its device."""
        decodes = np.flatnonzero(batch.lengths_S == 1)
        segments, max_rank = segment_array(batch.segments, batch.bank)
        arrays = [
            batch.starts_S, batch.lengths_S, decodes, np.zeros_like(decodes), batch.contexts_S, segments.ravel(),
            *table_arrays(batch),
        ]  # fmt: skip
        sizes = [len(array) for array in arrays]
        packed = torch.from_numpy(np.concatenate(arrays)).to(batch.tokens_T.device, non_blocking=True)
        return cls.viewing(packed, [*sizes[:-2], sum(sizes[-2:])], max_rank)

    @classmethod
    def viewing(cls, packed: Tensor, sizes: list[int], max_rank: int) -> DeviceRows:
        """Of a tensor that holds its parts one after another, in the order of the fields."""
        starts, lengths, rows, firsts, contexts, segments, tables = torch.split(packed, sizes)
        return cls(
            starts, lengths, Tiles(rows, firsts), contexts, segments.view(-1, SEGMENT_FIELDS), tables, max_rank
        )  # fmt: skip


class FixedRows:
    """DeviceRows in memory that stays where it is: of decode steps of up to `size` rows, for CUDA graphs.

    Rows beyond the batch's are padding: they see no key, belong to no segment, and (by their slots) write nowhere. So
    are segments beyond the batch's: empty. Only what differs from step to step is copied, in one go.
    """

    def __init__(self, size: int, num_segments: int, table_width: int, max_rank: int, device: torch.device) -> None:
        self._size = size
        self._num_segments = num_segments
        sizes = [size] * 5 + [num_segments * SEGMENT_FIELDS, 1 + size * table_width]
        packed = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.rows = DeviceRows.viewing(packed, sizes, max_rank)
        torch.arange(size, out=self.rows.starts_S)
        torch.arange(size, out=self.rows.decodes.rows)
        self.rows.lengths_S.fill_(1)
        self._changing = packed[4 * size :]

    def take(self, batch: ForwardBatch) -> None:
        """Makes them those of a batch of decode rows."""
        contexts = np.zeros(self._size, np.int64)
        contexts[: batch.num_rows] = batch.contexts_S
        segments = np.zeros((self._num_segments, SEGMENT_FIELDS), np.int64)
        if self._num_segments:
            segments[: len(batch.segments)] = segment_array(batch.segments, batch.bank)[0]
        packed = np.concatenate([contexts, segments.ravel(), *table_arrays(batch)])
        self._changing[: len(packed)].copy_(torch.from_numpy(packed), non_blocking=True)


def table_arrays(batch: ForwardBatch) -> tuple[Ints, Ints]:
    return np.array([batch.tables_SB.shape[1]], np.int64), batch.tables_SB.ravel()


def segment_array(segments: Sequence[Segment], bank: LoraBank | None) -> tuple[Ints, int]:
    """[G, SEGMENT_FIELDS], and the largest rank. Addresses are good until the bank changes, between steps."""
    if not segments:
        return np.zeros((0, SEGMENT_FIELDS), np.int64), 0
    assert bank is not None
    placed = [bank.placed(segment.slot) for segment in segments]
    rows = [
        (segment.start, segment.end, each.buffer.data_ptr(), each.directory.data_ptr(), each.rank)
        for segment, each in zip(segments, placed, strict=True)
    ]
    return np.array(rows, np.int64), max(each.rank for each in placed)


def chunk_tiles(batch: ForwardBatch, tokens_per_tile: int) -> Tiles | None:
    """Tiles of the rows of several tokens; None where there are none."""
    rows = np.flatnonzero(batch.lengths_S > 1)
    if not len(rows):
        return None
    counts = -(-batch.lengths_S[rows] // tokens_per_tile)
    firsts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    packed = np.concatenate((np.repeat(rows, counts), firsts * tokens_per_tile))
    on_device = torch.from_numpy(packed).to(batch.tokens_T.device, non_blocking=True)
    return Tiles(*on_device.view(2, -1).unbind())
