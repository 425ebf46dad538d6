"""ForwardBatch: the tensors of one step. Knows no policy: it lays out what the scheduler decided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step import Row, Step

if TYPE_CHECKING:
    from engine.lora import LoraBank

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a batch use the adapter in `slot` of the bank."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """T tokens of S rows. Rows are sorted by adapter, base rows first, so that every adapter's tokens, and the base's,
    are one slice: batched LoRA needs no permutation, and no path can touch a base row.

    tokens_T      ids to compute
    positions_T   their positions in their sequences
    slots_T       where their KV goes: block · block_size + offset
    starts_S      first token of each row;  lengths_S  its number of tokens
    contexts_S    positions of the row's sequence that have KV once this step has written its own
    tables_SB     block table, filled with block 0 where a row has fewer blocks
    logit_rows    indices into T whose logits are wanted, in the order of the step's rows
    logit_counts  how many of them each row of the step has (the sampled position is a row's last)
    segments      adapter slices, ascending; tokens before the first belong to the base
    bank          where the adapters lie; None = a model without adapters
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    starts_S: Ints
    lengths_S: Ints
    contexts_S: Ints
    tables_SB: Ints
    block_size: int
    logit_rows: Tensor
    logit_counts: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    bank: LoraBank | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def num_rows(self) -> int:
        return len(self.starts_S)


class BatchBuilder:
    """Lays out one step after the other. While the same rows decode, a step differs from the one before by a position
    per row: the rest is laid out only when a row comes, goes or is stripped, or an adapter moves."""

    def __init__(self, bank: LoraBank | None, block_size: int, device: torch.device | str = "cpu") -> None:
        self._bank = bank
        self._block_size = block_size
        self._device = device
        self._last: _Decode | None = None

    def build(self, step: Step) -> ForwardBatch:
        """See build_batch; what it returns is never written to again."""
        batch = None if self._last is None else self._last.advance(step.rows, self._bank, self._device)
        if batch is None:
            batch = build_batch(step, self._bank, self._block_size, self._device)
            self._last = _Decode.of(step.rows, self._bank, batch)
        return batch


class _Decode:
    """A batch of rows that decode, and what it was made of. A sequence's table is a new list whenever it does not just
    get longer."""

    def __init__(self, rows: list[Row], order: list[int], slots: list[int], batch: ForwardBatch) -> None:
        self._sequences = [row.sequence for row in rows]
        self._order = order
        self._slots = slots
        self._tables = [row.sequence.blocks for row in rows]
        self._batch = batch

    @classmethod
    def of(cls, rows: tuple[Row, ...], bank: LoraBank | None, batch: ForwardBatch) -> _Decode | None:
        if not rows or any(row.num_tokens != 1 or not row.samples for row in rows):
            return None
        slots = [_slot(row, bank) for row in rows]
        order = _order(rows, slots)
        return cls([rows[index] for index in order], order, [slots[index] for index in order], batch)

    def advance(self, rows: tuple[Row, ...], bank: LoraBank | None, device: torch.device | str) -> ForwardBatch | None:
        """The batch of these rows, None if they are not the same ones a position further."""
        last = self._batch
        if len(rows) != len(self._order):
            return None
        sorted_rows = [rows[index] for index in self._order]
        if any(row.sequence is not sequence for row, sequence in zip(sorted_rows, self._sequences, strict=True)):
            return None
        positions_S: Ints = last.contexts_S
        is_same = (
            all(row.num_tokens == 1 and row.samples for row in sorted_rows)
            and [row.start for row in sorted_rows] == positions_S.tolist()
            and [_slot(row, bank) for row in sorted_rows] == self._slots
            and all(map(is_, (row.sequence.blocks for row in sorted_rows), self._tables))
        )
        tables_SB = _grown(last.tables_SB, self._tables, positions_S, last.block_size) if is_same else None
        if tables_SB is None:
            return None
        blocks_S = tables_SB[last.starts_S, positions_S // last.block_size]
        self._batch = replace(
            last,
            tokens_T=_tensor(_tokens(sorted_rows, len(rows)), device),
            positions_T=_tensor(positions_S, device),
            slots_T=_tensor(blocks_S * last.block_size + positions_S % last.block_size, device),
            contexts_S=positions_S + 1,
            tables_SB=tables_SB,
        )
        return self._batch


def _grown(tables_SB: Ints, blocks: list[list[int]], positions_S: Ints, block_size: int) -> Ints | None:
    """With the blocks that these positions are the first of; None if the table is too narrow."""
    begun = np.flatnonzero(positions_S % block_size == 0).tolist()
    if begun and int(positions_S.max()) >= tables_SB.shape[1] * block_size:
        return None
    if begun:
        tables_SB = tables_SB.copy()
    for row in begun:
        index = int(positions_S[row]) // block_size
        tables_SB[row, index] = blocks[row][index]
    return tables_SB


def build_batch(step: Step, bank: LoraBank | None, block_size: int, device: torch.device | str = "cpu") -> ForwardBatch:
    """Lays out a step; every adapter of its rows must be resident in `bank`. Python per row, numpy per token."""
    rows = step.rows
    adapter_S = [_slot(row, bank) for row in rows]
    order = _order(rows, adapter_S)
    sorted_rows = [rows[index] for index in order]
    lengths_S = np.array([row.num_tokens for row in sorted_rows], np.int64)
    begins_S = np.array([row.start for row in sorted_rows], np.int64)
    ends_S = np.cumsum(lengths_S)
    starts_S = ends_S - lengths_S
    row_T = np.repeat(np.arange(len(rows)), lengths_S)
    positions_T = np.arange(len(row_T)) - starts_S[row_T] + begins_S[row_T]
    contexts_S = begins_S + lengths_S
    tables_SB = _block_tables(sorted_rows, contexts_S, block_size)
    slots_T = tables_SB[row_T, positions_T // block_size] * block_size + positions_T % block_size
    logit_rows, logit_counts = _logit_rows(rows, starts_S[np.argsort(np.array(order, np.int64))])
    return ForwardBatch(
        tokens_T=_tensor(_tokens(sorted_rows, len(row_T)), device),
        positions_T=_tensor(positions_T, device),
        slots_T=_tensor(slots_T, device),
        starts_S=starts_S,
        lengths_S=lengths_S,
        contexts_S=contexts_S,
        tables_SB=tables_SB,
        block_size=block_size,
        logit_rows=_tensor(logit_rows, device),
        logit_counts=logit_counts,
        segments=_segments([adapter_S[index] for index in order], starts_S, ends_S),
        bank=bank,
    )


def _order(rows: tuple[Row, ...], slots: list[int]) -> list[int]:
    """By adapter, base rows first; of one adapter, rows of one token first."""
    return sorted(range(len(rows)), key=lambda index: (slots[index], rows[index].num_tokens > 1))


def _slot(row: Row, bank: LoraBank | None) -> int:
    """The row's slot in the bank, -1 for the base."""
    if row.sequence.adapter is None:
        return -1
    assert bank is not None, "an adapter row without a bank"
    return bank.slot(row.sequence.adapter.digest)


def _tokens(rows: list[Row], num_tokens: int) -> Ints:
    parts = (row.sequence.tokens[row.start : row.start + row.num_tokens] for row in rows)
    return np.fromiter(chain.from_iterable(parts), np.int64, num_tokens)


def _block_tables(rows: list[Row], contexts_S: Ints, block_size: int) -> Ints:
    counts = -(-contexts_S // block_size)
    tables = np.zeros((len(rows), int(counts.max(initial=0))), np.int64)
    for table, row, count in zip(tables, rows, counts, strict=True):
        table[:count] = row.sequence.blocks[:count]
    return tables


def _segments(slots: list[int], starts_S: Ints, ends_S: Ints) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for slot, start, end in zip(slots, starts_S.tolist(), ends_S.tolist(), strict=True):
        if slot < 0:
            continue
        if segments and segments[-1].slot == slot:
            segments[-1] = Segment(slot, segments[-1].start, end)
        else:
            segments.append(Segment(slot, start, end))
    return tuple(segments)


def _logit_rows(rows: tuple[Row, ...], starts: Ints) -> tuple[Ints, tuple[int, ...]]:
    """Prompt positions whose successor is in the prompt, where prompt logprobs are asked; then the sampled one."""
    found: list[int] = []
    counts = []
    for row, start in zip(rows, starts.tolist(), strict=True):
        before = len(found)
        if row.sequence.params.prompt_logprobs is not None:
            found.extend(range(start, start + min(row.num_tokens, row.sequence.num_prompt - 1 - row.start)))
        if row.samples:
            found.append(start + row.num_tokens - 1)
        counts.append(len(found) - before)
    return np.array(found, np.int64), tuple(counts)


def _tensor(array: Ints, device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
