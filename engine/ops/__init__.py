"""Ops: the handful of functions between the model and the kernels, each with its equation.

Shape legend: T tokens of the step, H hidden size, N query heads, K key/value heads, D head size, I intermediate size,
O outputs of a linear, S sequences, R rank, B blocks. Implementations: reference (plain torch, the oracle).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.batch import ForwardBatch

LoraSlices = tuple[tuple[int, int, int], ...]
"""Adapted parts of one (possibly fused) linear: (module index in adapters.spec.LINEARS, first column, end column)."""


class Ops(Protocol):
    """The functions that a device implements. All are deterministic: equal inputs give equal bits."""

    def pack_linear(self, weight_OH: Tensor) -> Any:
        """A weight in the layout that `linear` likes best; made once at load, the original is dropped."""
        ...

    def linear(self, x_TH: Tensor, packed: Any, bias_O: Tensor | None = None) -> Tensor:
        """y[t] = W·x[t] + b."""
        ...

    def lora(self, y_TO: Tensor, x_TH: Tensor, batch: ForwardBatch, layer: int, slices: LoraSlices) -> None:
        """y[t, c0:c1] += B(A·x[t]) for each slice (m, c0, c1), in place, with A [R, H] and B [O, R] (scale folded
        in) those of token t's adapter for (layer, m). Rows without an adapter, and modules it lacks, are untouched."""
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """y = x / √(mean(x²) + eps) · w, in fp32 inside. The last dimension is normalised."""
        ...

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """r' = r + x; y = rms_norm(r'). Returns (y, r')."""
        ...

    def rope(self, q_TND: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates halves: q' = q·cos + rotate_half(q)·sin, the same for k (RoFormer, arXiv 2104.09864)."""
        ...

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """y = silu(x[:, :I]) · x[:, I:]."""
        ...

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
        """cache[0, slot[t]] = k[t]; cache[1, slot[t]] = v[t], with cache [2, B·block_size, K, D]."""
        ...

    def attention(self, q_TND: Tensor, cache: Tensor, batch: ForwardBatch, scale: float, window: int | None) -> Tensor:
        """o[t] = softmax(scale · q[t]·Kᵀ) V over the positions p ≤ position[t] of t's own sequence (and
        p > position[t] − window), K and V read through its block table. Query head n uses KV head n·K // N."""
        ...
