"""ComposedOps: the ops that follow from others, for implementations that have nothing faster. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.ops import LoraSlices, Replay

if TYPE_CHECKING:
    from engine.ops import Ops
    from engine.ops.table_lora import TableLora
    from engine.sampler import Draw, Greedy, Queued

SQUARED_ELEMENTS = 1 << 17


class ComposedOps:
    """See engine.ops.Ops for the equations."""

    table_lora: TableLora | None = None

    def adapted_linear(
        self: Ops, x_TH: Tensor, packed: Any, bias_O: Tensor | None, plan: Any, layer: int, slices: LoraSlices
    ) -> Tensor:
        y_TO = self.linear(x_TH, packed, bias_O)
        self.lora(y_TO, x_TH, plan, layer, slices)
        return y_TO

    def squares(self, packed: Any, weight_OH: Tensor) -> Tensor:
        """A few rows at a time, so that what is widened stays in the cache."""
        step = max(1, SQUARED_ELEMENTS // weight_OH.shape[1])
        parts = (weight_OH[first : first + step] for first in range(0, len(weight_OH), step))
        return torch.cat([torch.linalg.vector_norm(part.float(), dim=1) for part in parts]).square_()

    @property
    def draw(self) -> Draw | Queued | None:
        """The sampler's own."""
        return None

    @property
    def greedy(self) -> Greedy | None:
        """The sampler's own."""
        return None

    def replay(self) -> Replay:
        return _call


def _call(body: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], plan: Any) -> tuple[Tensor, ...]:
    return body(*inputs, plan)
