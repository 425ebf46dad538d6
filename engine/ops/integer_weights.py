"""IntegerWeight: a linear's weight in 8 or 4 bits as the CUDA kernels read it, and how it is made. Knows no kernel.

A weight is number · scale of its group of inputs. Numbers are exact in bf16 and fp16, so products take them as they
are, and the scale is applied to the sum of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quantization import Quantization

CHUNKS = (128, 64, 32)
NUM_CANDIDATES = 24
"""Scales that are tried for a group of int4."""

SLAB_ELEMENTS = 1 << 24
"""Of a weight that are widened at a time."""


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """numbers_OI  int8 [O, I'], or uint8 [O, I'/2]: of each `chunk` of inputs the first half in the low nibbles, the
                   second in the high ones, 8 more than the number; I' is I, filled with zeros to whole chunks
    scales_GO      bf16, of each group of inputs
    chunk          inputs that lie together and share a scale: divides the group
    """

    numbers_OI: Tensor
    scales_GO: Tensor
    quantization: Quantization
    num_inputs: int
    chunk: int

    @property
    def num_outputs(self) -> int:
        return self.numbers_OI.shape[0]

    def squares(self) -> Tensor:
        """‖W[o]‖² [O]."""
        step = max(1, SLAB_ELEMENTS // self.num_inputs)
        firsts = range(0, self.num_outputs, step)
        return torch.cat([torch.linalg.vector_norm(self.widened(first, first + step), dim=1) for first in firsts]) ** 2

    def widened(self, first: int = 0, end: int | None = None) -> Tensor:
        """W[first:end] in fp32, exactly what the numbers and scales say."""
        packed = self.numbers_OI[first:end]
        numbers = packed
        if self.quantization.bits == 4:
            halves = packed.view(len(packed), -1, 1, self.chunk // 2)
            numbers = torch.cat((halves & 15, halves >> 4), 2).to(torch.int8).flatten(1) - 8
        scales = self.scales_GO[:, first:end].t().float().repeat_interleave(self.quantization.group, 1)
        return numbers[:, : self.num_inputs].float() * scales[:, : self.num_inputs]


def integer_weight(weight_OI: Tensor, quantization: Quantization) -> IntegerWeight:
    """Of the scales that give a group's largest weight the largest number, or (int4) one a little beyond it, that with
    the least squared error; it may be negative, as there are more negative numbers than positive ones."""
    num_inputs = weight_OI.shape[1]
    is_whole = [size for size in CHUNKS if quantization.group % size == 0 and num_inputs % size == 0]
    chunk = is_whole[0] if is_whole else CHUNKS[-1]
    step = max(1, SLAB_ELEMENTS // num_inputs)
    firsts = range(0, len(weight_OI), step)
    slabs = [_quantised(weight_OI[first : first + step], quantization, chunk) for first in firsts]
    numbers, scales = (torch.cat(parts) for parts in zip(*slabs, strict=True))
    return IntegerWeight(numbers, scales.t().contiguous(), quantization, num_inputs, chunk)


def _quantised(weight_OI: Tensor, quantization: Quantization, chunk: int) -> tuple[Tensor, Tensor]:
    """Numbers as they lie, and scales [O, G]."""
    num_outputs, num_inputs = weight_OI.shape
    group = quantization.group
    groups_OGI = F.pad(weight_OI.float(), (0, -num_inputs % group)).view(num_outputs, -1, group)
    scales_OG = _best_scales(groups_OGI, quantization.bits)
    numbers = _numbers(groups_OGI, scales_OG, quantization.bits).flatten(1)
    numbers = numbers[:, : -(-num_inputs // chunk) * chunk].to(torch.int8)
    if quantization.bits == 4:
        low, high = (numbers + 8).to(torch.uint8).view(num_outputs, -1, 2, chunk // 2).unbind(2)
        numbers = (low | high << 4).flatten(1)
    return numbers, scales_OG


def _best_scales(groups_OGI: Tensor, bits: int) -> Tensor:
    lowest = -8.0 if bits == 4 else -127.0
    largest = groups_OGI.gather(2, groups_OGI.abs().argmax(2, keepdim=True))[:, :, 0]
    best = (largest / lowest).bfloat16()
    if bits == 8:
        return best
    least = torch.full_like(largest, torch.inf)
    for index in range(NUM_CANDIDATES):
        scale = (largest * (1 - 0.02 * index) / lowest).bfloat16()
        found = _numbers(groups_OGI, scale, bits) * scale.float()[:, :, None]
        error = (groups_OGI - found).square_().sum(2)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _numbers(groups_OGI: Tensor, scales_OG: Tensor, bits: int) -> Tensor:
    lowest, highest = (-8, 7) if bits == 4 else (-127, 127)
    scale = scales_OG.float()[:, :, None]
    return torch.where(scale == 0, 0.0, groups_OGI / scale).round_().clamp_(lowest, highest)
