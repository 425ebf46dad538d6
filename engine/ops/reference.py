"""ReferenceOps: every op in plain torch on any device. The oracle of the faster ones: simple, no Python per token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.adapter_view import LoraPart
from engine.batch import ForwardBatch
from engine.ops import KV_LIMIT, LoraSlices, Moments
from engine.ops.composed import ComposedOps
from engine.quantization import Quantization


class ReferenceOps(ComposedOps):
    """See engine.ops.Ops for the equations. Everything is kept in one dtype; sums are fp32 inside."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.weight_dtype = dtype
        self.activation_dtype = dtype
        self.adapter_dtype = dtype

    def pack_linear(
        self, weight_OH: Tensor, quantization: Quantization | None = None, moments: Moments | None = None
    ) -> Any:
        assert quantization is None, "create_ops refuses it"
        return weight_OH

    def linear(self, x_TH: Tensor, packed: Any, bias_O: Tensor | None = None) -> Tensor:
        return F.linear(x_TH, packed, bias_O)

    def lora(self, y_TO: Tensor, x_TH: Tensor, plan: Any, layer: int, slices: LoraSlices) -> None:
        for segment in plan.segments:
            assert plan.bank is not None
            x, y = x_TH[segment.start : segment.end], y_TO[segment.start : segment.end]
            for module, first, end in slices:
                part = plan.bank.pair(segment.slot, layer, module)
                if part is not None:
                    _adapt(y[:, first:end], x, part)

    def dense(self, x_TH: Tensor, weight_OH: Tensor) -> Tensor:
        return F.linear(x_TH, weight_OH.to(x_TH.dtype))

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide = x_TH.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return normal.to(x_TH.dtype) * weight_H

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual_TH = residual_TH + x_TH
        return self.rms_norm(residual_TH, weight_H, eps), residual_TH

    def rope(self, x_TJD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        swapped = x_TJD.roll(x_TJD.shape[-1] // 2, -1)
        return torch.addcmul(x_TJD * cos_TD.unsqueeze(1), swapped, sin_TD.unsqueeze(1))

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate, up = gate_up_T2I.chunk(2, -1)
        return F.silu(gate) * up

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
        for part, new in zip(cache, (k_TKD, v_TKD), strict=True):
            part.index_copy_(0, slots_T, new.nan_to_num().clamp_(-KV_LIMIT, KV_LIMIT).to(cache.dtype))

    def plan(self, batch: ForwardBatch) -> Any:
        return batch

    def attention(self, q_TND: Tensor, cache: Tensor, plan: Any, scale: float, window: int | None) -> Tensor:
        """Row by row: the whole context is read, the scores are one matrix."""
        num_groups = q_TND.shape[1] // cache.shape[2]
        blocks = cache.view(2, -1, plan.block_size, *cache.shape[2:])
        out_TND = torch.empty_like(q_TND)
        rows = zip(
            plan.starts_S.tolist(), plan.lengths_S.tolist(), plan.contexts_S.tolist(), plan.tables_SB, strict=True
        )
        for start, length, context, table in rows:
            table_B = torch.from_numpy(table).to(cache.device)
            k_CND, v_CND = (
                part[table_B].flatten(0, 1)[:context].float().repeat_interleave(num_groups, 1) for part in blocks
            )
            position_Q1 = torch.arange(context - length, context, device=cache.device).unsqueeze(1)
            key_C = torch.arange(context, device=cache.device)
            hidden_QC = (key_C > position_Q1) | (key_C <= position_Q1 - (window or context))
            scores = torch.einsum("qnd,cnd->nqc", q_TND[start : start + length].float() * scale, k_CND)
            weights = scores.masked_fill(hidden_QC, float("-inf")).softmax(-1)
            out_TND[start : start + length] = torch.einsum("nqc,cnd->qnd", weights, v_CND).to(q_TND.dtype)
        return out_TND.flatten(1)


def _adapt(y_TO: Tensor, x_TH: Tensor, part: LoraPart) -> None:
    """y = gain ∘ (y + B·A·x) + shift, in place."""
    if part.a_HR is not None and part.b_RO is not None:
        y_TO.addmm_(torch.mm(x_TH, part.a_HR), part.b_RO)
    if part.gain_O is not None:
        y_TO.mul_(part.gain_O)
    if part.shift_O is not None:
        y_TO.add_(part.shift_O)
