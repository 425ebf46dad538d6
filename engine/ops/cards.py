"""Card: what the kernels must know of a GPU, and which GPUs are refused, by name. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config import ConfigError

OLDEST = (8, 0)
"""Compute capability of Ampere: the first with bf16 and asynchronous copies."""

LARGE_MEMORY_BYTES = 160 << 10

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Card:
    """num_processors      streaming multiprocessors
    programs_each          persistent programs per multiprocessor
    memory_bytes           shared memory that a program may have
    is_hopper_or_later     products of whole warp groups; a launch may begin before the one that it depends on has ended
    options                of every launch
    """

    num_processors: int
    programs_each: int = 4
    memory_bytes: int = 99 << 10
    is_hopper_or_later: bool = False
    options: dict[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": True})

    @property
    def num_programs(self) -> int:
        return self.num_processors * self.programs_each

    @property
    def has_large_memory(self) -> bool:
        return self.memory_bytes >= LARGE_MEMORY_BYTES

    @property
    def dependent_options(self) -> dict[str, Any]:
        return {"launch_pdl": True} if self.is_hopper_or_later else {}


MEMORY_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10,
                (10, 0): 227 << 10, (10, 3): 227 << 10, (12, 0): 99 << 10, (12, 1): 99 << 10}  # fmt: skip
"""Shared memory of one program by compute capability (CUDA programming guide, table of technical specifications)."""


def card_of(device: str) -> Card:
    """The card behind "cuda" or "cuda:N". Raises ConfigError where there is none, or it is too old."""
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device}: no CUDA device is usable here; use --device cpu")
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    check_capability(properties.name, capability)
    return make_card(capability, properties.multi_processor_count)


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Raises ConfigError for a card older than Ampere."""
    if capability < OLDEST:
        raise ConfigError(
            f"{name} (compute capability {capability[0]}.{capability[1]}) is too old: the CUDA kernels need "
            f"{OLDEST[0]}.{OLDEST[1]} or later (Ampere: A100, A10, RTX 30); use --device cpu"
        )


def check_head_dim(head_dim: int) -> None:
    """Raises ConfigError for heads that attention has no tile for."""
    if head_dim % 2 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ConfigError(f"head size {head_dim}: the CUDA kernels do even sizes from 16 to {MAX_HEAD_DIM}")


def make_card(capability: tuple[int, int], num_processors: int) -> Card:
    return Card(
        num_processors,
        memory_bytes=MEMORY_BYTES.get(capability, 99 << 10),
        is_hopper_or_later=capability >= (9, 0),
    )
