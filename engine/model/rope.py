"""Rotary embeddings: the cosines and sines of a step that all layers read, with linear and Llama 3.1 scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """θ^(−2i/D) for i < D/2, scaled as the config says; fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Stretches wavelengths above original/low by `factor`, keeps those below original/high, blends between them."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(turns < rope.low_freq_factor, plain / rope.factor, plain)
    is_between = (turns >= rope.low_freq_factor) & (turns <= rope.high_freq_factor)
    return torch.where(is_between, blended, stretched)


def rotations(frequencies: Tensor, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [T, D] of these positions, repeated for both halves; sin is negated in the first half, so that
    rotate_half(x)·sin becomes swap_halves(x) times this."""
    angles = torch.outer(positions_T.float(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
