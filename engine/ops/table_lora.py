"""Triton kernel of batched LoRA on embed_tokens and lm_head: all adapters of a batch in one launch (of lm_head, after
shrink), like those of linears (lora.py), but B lies as [O, R], and of embed_tokens A·x is a row of A.

Legend: T tokens, R rows of logits (Q: ranks), V vocabulary, O outputs, K parts of the sum over inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapters import loader
from adapters.spec import MODULES
from engine.batch import Segment
from engine.lora import LoraBank
from engine.ops.cards import Card
from engine.ops.device_rows import segment_array
from engine.ops.launch import RANK_BLOCK
from engine.ops.lora import BatchedLora, _fields, _scales
from engine.ops.work_list import TILE_FIELDS, WorkList

EMBEDDING, HEAD = MODULES.index("embed_tokens"), MODULES.index("lm_head")
_A, _B, _RANK, _FLAGS = (
    tl.constexpr(column) for column in (loader.OFFSET_A, loader.OFFSET_B, loader.RANK, loader.FLAGS)
)
_IS_REPLACED = tl.constexpr(loader.IS_WHOLE | loader.HAS_TOKENS)
_UNIT = tl.constexpr(loader.UNIT)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_RANK_BLOCK = tl.constexpr(RANK_BLOCK)


@triton.jit(do_not_specialize=["layer", "module", "z_tokens", "num_programs"])
def table_kernel(
    y_ptr, z_ptr, ids_ptr, tiles_ptr, counts_ptr, layer, module, y_stride, width, z_tokens, z_ranks, num_programs,
    SPLITS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_EMBEDDING: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """y[t', o] = g[o] · (y[t', o] + Σ_q z[t, q] · B[o, q]) + c[o], in place, for o < width. Of embed_tokens z[t] is
    A[ids[t]], A [V, Q], and t' = t; of lm_head it is Σ_k z[k, t] from shrink, and t' = ids[t]."""
    num_blocks = tl.cdiv(width, BLOCK)
    token_of = tl.arange(0, TILE_ROWS)
    rank_of = tl.arange(0, _RANK_BLOCK)
    for work in range(tl.program_id(0), tl.load(counts_ptr) * num_blocks, num_programs):
        block, tile = work % num_blocks, work // num_blocks
        tile_ptr = tiles_ptr + tile * _TILE_FIELDS
        fields = _fields(tile_ptr, layer, module)
        rank, flags = tl.load(fields + _RANK).to(tl.int32), tl.load(fields + _FLAGS)
        if (rank > 0) & ((flags & _IS_REPLACED) == 0):
            token = tl.load(tile_ptr) + token_of
            is_token = token_of < tl.load(tile_ptr + 1)
            ids = tl.load(ids_ptr + token, mask=is_token, other=0)
            buffer = tl.load(tile_ptr + 2).to(tl.pointer_type(DTYPE))
            a_first, b_first = tl.load(fields + _A) * _UNIT, tl.load(fields + _B) * _UNIT
            output = block * BLOCK + tl.arange(0, BLOCK)
            is_output = output < width
            products = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
            for start in range(0, rank, _RANK_BLOCK):
                at = start + rank_of
                has_z = is_token[:, None] & (at < rank)[None, :]
                z = tl.zeros([TILE_ROWS, _RANK_BLOCK], tl.float32)
                if IS_EMBEDDING:
                    a_at = a_first + ids[:, None] * rank + at[None, :]
                    z += tl.load(buffer + a_at, mask=has_z, other=0.0).to(tl.float32)
                else:
                    for k in range(SPLITS):
                        z_at = z_ptr + (k * z_tokens + token)[:, None] * z_ranks + at[None, :]
                        z += tl.load(z_at, mask=has_z, other=0.0)
                b_at = b_first + output.to(tl.int64)[:, None] * rank + at[None, :]
                b = tl.load(buffer + b_at, mask=is_output[:, None] & (at < rank)[None, :], other=0.0)
                products = tl.dot(z.to(DTYPE), tl.trans(b), products, input_precision=PRECISION)
            gain, shift = _scales(buffer, fields, flags, output, width)
            row = token if IS_EMBEDDING else ids
            y_at = y_ptr + row[:, None] * y_stride + output[None, :]
            has_y = is_token[:, None] & is_output[None, :]
            old = tl.load(y_at, mask=has_y, other=0.0).to(tl.float32)
            new = (old + products) * gain[None, :] + shift[None, :]
            tl.store(y_at, new.to(y_ptr.dtype.element_ty), mask=has_y)


class TableLora:
    """Launches it, for adapters of one dtype on one card. Nothing here waits for the card."""

    def __init__(self, dtype: torch.dtype, card: Card, linears: BatchedLora) -> None:
        self._card = card
        self._linears = linears
        self._constants: dict[str, Any] = {
            "DTYPE": getattr(tl, str(dtype).removeprefix("torch.")),
            "PRECISION": "ieee" if dtype == torch.float32 else None,
        }

    def embed(self, x_TH: Tensor, tokens_T: Tensor, segments: list[Segment], bank: LoraBank) -> None:
        """x[t] = g ∘ (x[t] + B·A[token t]) + c, in place, for the tokens of these segments."""
        found, max_rank = segment_array(segments, bank)
        work = WorkList(torch.from_numpy(found).to(x_TH.device), len(x_TH), max_rank, self._card)
        self._launch(x_TH, x_TH, tokens_T, work, (bank.num_layers, EMBEDDING), (x_TH.shape[1], 1))

    def head(
        self, logits_RV: Tensor, x_RH: Tensor, rows_R: Tensor, segments: list[Segment], bank: LoraBank
    ) -> None:  # fmt: skip
        """logits[r] = g ∘ (logits[r] + B·(A·x[r])) + c, in place, where row r is of a token rows[r] of these segments.
        Sorted by token, each segment's rows are one slice."""
        found, max_rank = segment_array(segments, bank)
        tokens_R, order_R = rows_R.sort()
        on_device = torch.from_numpy(found).to(x_RH.device)
        on_device[:, :2] = torch.searchsorted(tokens_R, on_device[:, :2].contiguous())
        work = WorkList(on_device, len(rows_R), max_rank, self._card)
        at = (bank.num_layers, HEAD)
        z_KSTR = self._linears.shrunk(x_RH[order_R], work, 1, at)
        self._launch(logits_RV, z_KSTR, order_R, work, at, (bank.vocab_size, z_KSTR.shape[0]))

    def _launch(
        self, y: Tensor, z: Tensor, ids: Tensor, work: WorkList, at: tuple[int, int], size: tuple[int, int]
    ) -> None:  # fmt: skip
        width, splits = size
        block = 64 if work.tile_rows > 16 else 128
        num_programs = min(self._card.num_programs, max(1, work.max_tiles) * -(-width // block))
        table_kernel[(num_programs,)](
            y, z, ids, work.tiles, work.counts, *at, y.stride(0), width, work.num_tokens, work.z_ranks, num_programs,
            SPLITS=splits, TILE_ROWS=work.tile_rows, BLOCK=block, IS_EMBEDDING=at[1] == EMBEDDING,
            num_warps=8 if work.tile_rows > 16 else 4, num_stages=2, **self._constants, **self._card.options,
        )  # fmt: skip
