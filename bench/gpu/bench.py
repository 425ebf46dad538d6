"""Bench: where and at which size everything is measured. Record: one line of a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.spec import BaseShape
from engine.model.config import ModelConfig
from engine.ops import Ops


@dataclass(frozen=True)
class Bench:
    """Where and at which size everything is measured.

    bytes_s, flop_s   what the card reached for a copy and for a large product
    workloads         (rows, context, numbers of distinct adapters) of the engine's part
    """

    config: ModelConfig
    ops: Ops
    device: str
    dtype: torch.dtype
    bytes_s: float
    flop_s: float
    num_repeats: int
    prompt_tokens: int
    workloads: tuple[tuple[int, int, tuple[int, ...]], ...]

    @property
    def shape(self) -> BaseShape:
        return self.config.base_shape()

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=std)


@dataclass(frozen=True)
class Record:
    """One line of a table. Times and floors in milliseconds; what does not apply is None."""

    part: str
    name: str
    ms: float | None = None
    floor_ms: float | None = None
    rows_s: float | None = None
    kept: float | None = None
    most: float | None = None
    error: float | None = None
    baselines: dict[str, float] | None = None

    def __str__(self) -> str:
        text = f"{self.name:44}"
        if self.error is not None:
            text += f" error {self.error:.1e}"
        if self.ms is not None:
            text += f" {self.ms:9.3f} ms"
        if self.floor_ms is not None and self.ms is not None:
            text += f"  floor {self.floor_ms:8.3f} ms ({self.floor_ms / self.ms:4.0%})"
        if self.rows_s is not None:
            text += f"  {self.rows_s:9.0f} tok/s"
        if self.kept is not None and self.most is not None:
            text += f"  keeps {self.kept:.2f} of at most {self.most:.2f}"
        return text + "".join(f"  {name} {ms:.3f} ms" for name, ms in (self.baselines or {}).items())
