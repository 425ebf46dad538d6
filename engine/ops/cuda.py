"""CudaOps: the ops of an NVIDIA card. Products of 16-bit base weights are torch's (cuBLAS), the rest Triton kernels.

What the kernels compute is said in rows.py, attention.py, lora.py and integer_linear.py; how they are launched, in
launch.py. Nothing here
waits for the card, and no choice depends on what lies in the card's memory: a step can be captured in a CUDA graph and
replayed for another batch (graphs.py).
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import ForwardBatch
from engine.ops import KV_LIMIT, LoraSlices, Moments
from engine.ops import rows as row_kernels
from engine.ops.attention import PagedAttention
from engine.ops.cards import Card
from engine.ops.composed import ComposedOps
from engine.ops.device_rows import DeviceRows, Tiles, chunk_tiles
from engine.ops.graphs import CudaGraphs, GraphReplay, Recorder
from engine.ops.integer_linear import IntegerLinear
from engine.ops.integer_weights import IntegerWeight, integer_weight
from engine.ops.launch import num_warps, power_of_2
from engine.ops.lora import BatchedLora
from engine.ops.sampling import draw
from engine.ops.table_lora import TableLora
from engine.ops.work_list import WorkList
from engine.quantization import Quantization
from engine.sampler import Queued

Packed = Tensor | IntegerWeight

HEAD_BLOCK = 8
"""Heads that one program of rope turns."""

SILU_BLOCK = 1024


class CudaPlan:
    """Of one batch: its rows on the device, and the work of its adapters. Made where they are first asked for."""

    def __init__(self, batch: ForwardBatch, card: Card) -> None:
        self.batch = batch
        self.num_tokens = batch.num_tokens
        self._card = card
        self._chunks: dict[int, Tiles | None] = {}

    @cached_property
    def rows(self) -> DeviceRows:
        return DeviceRows.of(self.batch)

    @cached_property
    def work(self) -> WorkList | None:
        """None where no row has an adapter."""
        rows = self.rows
        if not len(rows.segments_GF):
            return None
        return WorkList(rows.segments_GF, self.num_tokens, rows.max_rank, self._card)

    def chunks(self, tokens_per_tile: int) -> Tiles | None:
        """Tiles of the rows of several tokens, made for the first layer that asks."""
        if tokens_per_tile not in self._chunks:
            self._chunks[tokens_per_tile] = chunk_tiles(self.batch, tokens_per_tile)
        return self._chunks[tokens_per_tile]

    def fixed(self, rows: DeviceRows) -> CudaPlan:
        """The plan of a decode step of as many rows as `rows` has, whatever they will be when it is run."""
        plan = CudaPlan(self.batch, self._card)
        plan.rows = rows
        plan.num_tokens = len(rows.starts_S)
        return plan


class CudaOps(ComposedOps):
    """See engine.ops.Ops for the equations. Weights, KV, activations and adapters in one dtype, sums in fp32."""

    def __init__(self, dtype: torch.dtype, block_size: int, card: Card, recorder: Recorder | None = None) -> None:
        matmul = torch.backends.cuda.matmul  # cuBLAS may otherwise add the parts of a sum in 16 bits
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
        self._recorder = recorder or CudaGraphs()
        self.weight_dtype = self.activation_dtype = self.adapter_dtype = dtype
        self._card = card
        self._integer_linear = IntegerLinear(dtype, card)
        self._lora = BatchedLora(dtype, card)
        self.table_lora = TableLora(dtype, card, self._lora)
        self._attention = PagedAttention(dtype, block_size, card)

    def pack_linear(
        self, weight_OH: Tensor, quantization: Quantization | None = None, moments: Moments | None = None
    ) -> Packed:
        return weight_OH if quantization is None else integer_weight(weight_OH, quantization)

    def squares(self, packed: Packed, weight_OH: Tensor) -> Tensor:
        return packed.squares() if isinstance(packed, IntegerWeight) else super().squares(packed, weight_OH)

    def linear(self, x_TH: Tensor, packed: Packed, bias_O: Tensor | None = None) -> Tensor:
        if isinstance(packed, IntegerWeight):
            return self._integer_linear(x_TH, packed, bias_O)
        return F.linear(x_TH, packed, bias_O)

    def dense(self, x_TH: Tensor, weight_OH: Tensor) -> Tensor:
        return F.linear(x_TH, weight_OH.to(x_TH.dtype))

    def lora(self, y_TO: Tensor, x_TH: Tensor, plan: CudaPlan, layer: int, slices: LoraSlices) -> None:
        if plan.work is not None:
            self._lora(y_TO, x_TH, plan.work, layer, slices)

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        width = x_TH.shape[-1]
        y = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
        num_inner, inner_stride = (1, 0) if x_TH.dim() == 2 else (x_TH.shape[1], x_TH.stride(1))
        block = power_of_2(width)
        row_kernels.rms_norm_kernel[(x_TH.shape[0] * num_inner,)](
            x_TH, weight_H, y, num_inner, x_TH.stride(0), inner_stride, width, eps, BLOCK=block,
            num_warps=num_warps(block), **self._card.options,
        )  # fmt: skip
        return y

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width = x_TH.shape[1]
        assert x_TH.is_contiguous(), "activations between two ops lie densely"
        assert residual_TH.is_contiguous(), "activations between two ops lie densely"
        y = torch.empty_like(x_TH)
        block = power_of_2(width)
        row_kernels.add_rms_norm_kernel[(len(x_TH),)](
            x_TH, residual_TH, weight_H, y, width, eps, BLOCK=block, num_warps=num_warps(block), **self._card.options
        )  # fmt: skip
        return y, residual_TH

    def rope(self, x_TJD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        num_tokens, num_heads, head_dim = x_TJD.shape
        y = torch.empty(x_TJD.shape, dtype=x_TJD.dtype, device=x_TJD.device)
        row_kernels.rope_kernel[(num_tokens, -(-num_heads // HEAD_BLOCK))](
            x_TJD, cos_TD, sin_TD, y, x_TJD.stride(0), num_heads, HALF=head_dim // 2,
            HALF_BLOCK=power_of_2(head_dim // 2), HEAD_BLOCK=HEAD_BLOCK, num_warps=2, **self._card.options,
        )  # fmt: skip
        return y

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        num_tokens, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
        y = torch.empty((num_tokens, width), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
        row_kernels.silu_mul_kernel[(num_tokens, -(-width // SILU_BLOCK))](
            gate_up_T2I, y, gate_up_T2I.stride(0), width, BLOCK=SILU_BLOCK, num_warps=4, **self._card.options
        )  # fmt: skip
        return y

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
        width = k_TKD.shape[1] * k_TKD.shape[2]
        block = power_of_2(width)
        row_kernels.write_kv_kernel[(len(k_TKD),)](
            k_TKD, v_TKD, cache, slots_T, k_TKD.stride(0), v_TKD.stride(0), cache.stride(0), width, KV_LIMIT,
            BLOCK=block, num_warps=num_warps(block), **self._card.options,
        )  # fmt: skip

    @property
    def draw(self) -> Queued:
        return Queued(draw)

    def plan(self, batch: ForwardBatch) -> CudaPlan:
        return CudaPlan(batch, self._card)

    def replay(self) -> GraphReplay:
        return GraphReplay(self._recorder)

    def attention(self, q_TND: Tensor, cache: Tensor, plan: CudaPlan, scale: float, window: int | None) -> Tensor:
        num_tokens, num_heads, head_dim = q_TND.shape
        group = num_heads // cache.shape[2]
        out_TO = torch.empty((num_tokens, num_heads * head_dim), dtype=q_TND.dtype, device=q_TND.device)
        rows, attend = plan.rows, self._attention
        if len(rows.decodes):
            shape = attend.decodes(head_dim, group, rows, cache.shape[2])
            attend(q_TND, cache, out_TO, rows, rows.decodes, shape, scale, window)
        shape = attend.chunks(head_dim, group)
        chunks = plan.chunks(shape.tile // group)
        if chunks is not None:
            attend(q_TND, cache, out_TO, rows, chunks, shape, scale, window)
        return out_TO
