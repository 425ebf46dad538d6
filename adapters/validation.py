"""Is it sound: reads adapter_config.json and the safetensors header itself, then scans the values. numpy, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapters.spec import AdapterSpec, BaseShape


@dataclass(frozen=True)
class Limits:
    """What an adapter may cost. `max_bytes` is of the weights file; cpu_s and memory_bytes of the subprocess."""

    max_rank: int = 64
    max_bytes: int = 1 << 30
    max_header_bytes: int = 4 << 20
    memory_bytes: int = 1 << 30
    cpu_s: int = 30


def validate(directory: Path, shape: BaseShape, limits: Limits) -> AdapterSpec:
    """The whole check, in this process. Raises AdapterError; returns what the adapter is."""
    raise NotImplementedError


async def validate_in_subprocess(directory: Path, shape: BaseShape, limits: Limits) -> AdapterSpec:
    """The same in a child process without our environment, with bounded memory and time."""
    raise NotImplementedError
