"""Quantization: how base weights are kept in fewer bits than 16. Knows no torch and no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config import ConfigError, EngineConfig

GROUP_UNIT = 32
SCALE_BYTES = 2
VERSION = 4
"""Of how weights are rounded and multiplied: KV that another one made isn't read."""
CAREFUL = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linears that are kept as Quantization.careful says, in every layer; down_proj is in the first and last
1 / CAREFUL_PART of them."""
CAREFUL_PART = 10


@dataclass(frozen=True)
class Quantization:
    """Weight-only: `group` neighbouring inputs of an output share a scale, and in 4 bits a lowest value (a row's last
    group may be shorter). Adapters and KV stay as they are."""

    bits: Literal[4, 8]
    group: int

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def is_calibrated(self) -> bool:
        """Whether rounding looks at what the inputs are: 8 bits lose too little for it."""
        return self.bits == 4

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Of numbers and scales."""
        return outputs * (-(-inputs * self.bits // 8) + -(-inputs // self.group) * SCALE_BYTES)

    def lowest_bytes(self, outputs: int, inputs: int) -> int:
        """Of the lowest values that a CPU keeps beside them."""
        return outputs * -(-inputs // self.group) * SCALE_BYTES if self.bits == 4 else 0

    def of(self, name: str, layer: int, num_layers: int) -> Quantization:
        """How this linear of a layer is kept."""
        ends = num_layers // CAREFUL_PART
        is_end = layer < ends or layer >= num_layers - ends
        return self.careful if name in CAREFUL or (name == "down_proj" and is_end) else self

    @property
    def careful(self) -> Quantization:
        """Of attention's linears, of the output head, and of what the outer layers' MLPs add: never less than int8.
        What is lost there weighs more than its bytes (docs/decisions/0008-weights-in-four-bits.md)."""
        return Quantization(8, self.group)


def quantization_of(config: EngineConfig) -> Quantization | None:
    """Raises ConfigError for a group that no kernel takes."""
    if config.quantization == "none":
        return None
    group = config.quantization_group
    if group < GROUP_UNIT or group % GROUP_UNIT:
        nearest = max(GROUP_UNIT, round(group / GROUP_UNIT) * GROUP_UNIT)
        raise ConfigError(f"--quantization-group {group} is not a multiple of {GROUP_UNIT}: use {nearest}")
    return Quantization(8 if config.quantization == "int8" else 4, group)
