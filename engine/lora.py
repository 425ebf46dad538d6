"""LoraBank: device memory of adapters at their true rank. Knows digests and slots, no names and no policy: what may
be placed or evicted is decided by adapters.residency."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapters.spec import BaseShape

if TYPE_CHECKING:
    from adapters.loader import PackedAdapter

LoraPair = tuple[Tensor, Tensor]
"""A [R, H] and B [R, O] of one (layer, module): views of the arena."""


class LoraBank:
    """One arena; an adapter is one contiguous extent of it and a directory of offsets. Not padded to any rank."""

    def __init__(
        self, shape: BaseShape, budget_bytes: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None: ...

    def place(self, digest: str, host: PackedAdapter) -> None:
        """Copies the adapter into the arena, compacting it first if the free bytes are scattered. Between steps only."""

    def evict(self, digest: str) -> None:
        """Frees the adapter's extent and slot. Between steps only."""

    def slot(self, digest: str) -> int:
        """The slot of a placed adapter."""
        raise NotImplementedError

    def pairs(self, slot: int, layer: int, module: int) -> LoraPair | None:
        """A and B of one linear, None where the adapter lacks it."""
        raise NotImplementedError
