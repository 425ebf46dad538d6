"""Ops: the handful of functions between the model and the kernels, each with its equation.

Shape legend: T tokens of the step, H inputs of a linear, O its outputs, I intermediate size, N query heads, K key/value
heads, D head size, S rows (sequences), R rank, B blocks. Implementations: reference (plain torch, the oracle), cpu
(plain torch, made for a CPU), native (csrc/), cuda (Triton).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.config import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.batch import ForwardBatch
    from engine.ops.table_lora import TableLora
    from engine.quantization import Quantization
    from engine.sampler import Draw, Greedy, Queued

log = logging.getLogger(__name__)

LoraSlices = tuple[tuple[int, int, int], ...]
"""Adapted parts of one (possibly fused) linear: (module index in adapters.spec.MODULES, first column, end column)."""


@dataclass(frozen=True)
class Moments:
    """What a linear's inputs are like: the mean of x·xᵀ, damped, and U, upper triangular, with UᵀU its inverse. Both
    fp32, dense."""

    moments_HH: Tensor
    factor_HH: Tensor


class Replay(Protocol):
    """Calls `body(*inputs, plan)`, which runs nothing but ops, or does the same from what it recorded for inputs and
    plan of this shape. The outputs are good until the next call."""

    def __call__(
        self, body: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], plan: Any
    ) -> tuple[Tensor, ...]: ...


class Ops(Protocol):
    """The functions that a device implements. All are deterministic: equal inputs give equal bits.

    weight_dtype       as which weights are read, and KV is kept
    activation_dtype   of everything between two ops
    adapter_dtype      as which adapters are loaded and placed
    """

    weight_dtype: torch.dtype
    activation_dtype: torch.dtype
    adapter_dtype: torch.dtype

    @property
    def table_lora(self) -> TableLora | None:
        """LoRA of embed_tokens and lm_head of all adapters of a batch; None where one after another will do."""
        ...

    def pack_linear(
        self, weight_OH: Tensor, quantization: Quantization | None = None, moments: Moments | None = None
    ) -> Any:
        """A weight in the layout that `linear` likes best; made once at load, the original is dropped. Quantised only
        by ops that were created for it: to the nearest; or, with moments of the inputs, so that little of the error is
        left in the outputs."""
        ...

    def squares(self, packed: Any, weight_OH: Tensor) -> Tensor:
        """‖W[o]‖² [O], fp32, of the weight as `linear` multiplies it; `weight_OH` is what was packed."""
        ...

    def linear(self, x_TH: Tensor, packed: Any, bias_O: Tensor | None = None) -> Tensor:
        """y[t] = W·x[t] + b."""
        ...

    def lora(self, y_TO: Tensor, x_TH: Tensor, plan: Any, layer: int, slices: LoraSlices) -> None:
        """y[t, c0:c1] = g ∘ (y[t, c0:c1] + B(A·x[t])) + c for each slice (m, c0, c1), in place, with A [R, H], B [O, R]
        (scale folded in), g and c those of token t's adapter for (layer, m); most adapters have no g and no c. Rows
        without an adapter, and modules it lacks, are untouched."""
        ...

    def adapted_linear(
        self, x_TH: Tensor, packed: Any, bias_O: Tensor | None, plan: Any, layer: int, slices: LoraSlices
    ) -> Tensor:
        """`linear`, then `lora` on its result."""
        ...

    def dense(self, x_TH: Tensor, weight_OH: Tensor) -> Tensor:
        """y[t] = W·x[t], with W as it lies in an adapter (row-major, adapter_dtype): what single adapters bring along
        for embed_tokens and lm_head."""
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """y = x / √(mean(x²) + eps) · w, in fp32 inside. The last dimension is normalised."""
        ...

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """r' = r + x; y = rms_norm(r'). Returns (y, r'); both inputs may be overwritten."""
        ...

    def rope(self, x_TJD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """y = x·cos + swap_halves(x)·sin over all J heads, with sin negated in its first half, which makes it
        q·cos + rotate_half(q)·sin (RoFormer, arXiv 2104.09864)."""
        ...

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """y = silu(x[:, :I]) · x[:, I:]."""
        ...

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
        """cache[0, slot[t]] = k[t]; cache[1, slot[t]] = v[t], with cache [2, B·block_size, K, D].

        Only finite numbers are kept (±KV_LIMIT, NaN as 0): whoever reads a block's unused slots through a mask
        multiplies what lies there by 0, and 0 · NaN would carry one tenant's overflow into another's answer."""
        ...

    def plan(self, batch: ForwardBatch) -> Any:
        """Whatever `attention` and `lora` need to know about the batch, computed once for all layers."""
        ...

    @property
    def draw(self) -> Draw | Queued | None:
        """How the sampler draws, where there is a faster way than its own."""
        ...

    @property
    def greedy(self) -> Greedy | None:
        """How the sampler finds the likeliest tokens, where there is a faster way than its own."""
        ...

    def replay(self) -> Replay:
        """What runs the layers of one model on one KV cache, step after step."""
        ...

    def attention(self, q_TND: Tensor, cache: Tensor, plan: Any, scale: float, window: int | None) -> Tensor:
        """o[t] = softmax(scale · q[t]·Kᵀ) V over the positions p ≤ position[t] of t's own sequence (and
        p > position[t] − window), K and V read through its block table. Query head n uses KV head n·K // N.
        Returns [T, N·D]."""
        ...


KV_LIMIT = 65504.0
"""Keys and values are clamped to ± this (the largest fp16): far above what sound weights produce."""


def create_ops(
    device: str, dtype: torch.dtype, head_dim: int, block_size: int, quantization: Quantization | None = None
) -> Ops:
    """The fastest ops for a device ("cpu", "cuda", "cuda:0", …) and a model: on a card the Triton kernels; on a CPU the
    native ones in bf16, where a compiler is at hand, else plain torch. Raises ConfigError where a card can't do it, and
    where a CPU's can't multiply quantised weights."""
    from engine.ops.cpu import CpuOps

    native = _native_ops(dtype, head_dim, block_size) if device == "cpu" else None
    if native is not None:
        return native
    if device != "cpu":
        return _cuda_ops(device, dtype, head_dim, block_size)
    if quantization is not None:
        raise ConfigError(
            f"--quantization {quantization.name} needs a card, or the native CPU operations: --dtype bfloat16, a "
            f"C++ compiler, a head size that is a multiple of 16 and blocks of 16; here it is {device}, {dtype}, "
            f"{head_dim} and {block_size}"
        )
    return CpuOps(dtype)


def _cuda_ops(device: str, dtype: torch.dtype, head_dim: int, block_size: int) -> Ops:
    from engine.ops.cards import card_of, check_head_dim

    card = card_of(device)
    check_head_dim(head_dim)
    try:
        from engine.ops.cuda import CudaOps
    except ImportError as error:
        raise ConfigError(f"device {device} needs Triton, which comes with torch's CUDA builds: {error}") from error
    return CudaOps(dtype, block_size, card)


def _native_ops(dtype: torch.dtype, head_dim: int, block_size: int) -> Ops | None:
    from engine.ops import native
    from engine.ops.compile import BuildError

    if not native.supports(dtype, head_dim, block_size):
        return None
    try:
        return native.NativeOps()
    except BuildError as error:
        log.warning("plain torch instead of the native CPU operations, several times slower: %s", error)
        return None
