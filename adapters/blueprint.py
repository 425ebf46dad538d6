"""Blueprints: what the config and the header of a weights file say of the packed adapter, worked out once for all that
have the same. Adapters of one training run differ in their values only."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from adapters.config import MAX_CONFIG_BYTES
from adapters.header import open_regular
from adapters.spans import Span
from adapters.spec import BaseShape, ModuleSpec
from adapters.storage import CONFIG_FILE
from adapters.validation import Inspected

MAX_BLUEPRINTS = 16
"""Kept, the most recently used; each takes about 2 kB per module that its adapter changes."""
MAX_HEADER_BYTES = 4 << 20
"""A longer header is read, but its blueprint is not kept."""


@dataclass(frozen=True, eq=False)
class Blueprint:
    """found     what is in the file
    shape        of the base, with the adapter's own tokens
    directory    of the packed adapter; shared by all that have this blueprint
    num_elements of its buffer
    spans        A and B of linears
    rest         all other parts: (module, part, first element in the buffer, number of elements)
    """

    found: Inspected
    shape: BaseShape
    directory: torch.Tensor
    num_elements: int
    spans: list[Span]
    rest: list[tuple[ModuleSpec, str, int, int]]


class Blueprints:
    """draw: makes one from the directory of an adapter and its open weights file. Used by several threads."""

    def __init__(self, draw: Callable[[Path, FileIO], Blueprint]) -> None:
        self._draw = draw
        self._kept: OrderedDict[bytes, Blueprint] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, directory: Path, weights: FileIO) -> Blueprint:
        """Raises what `draw` does."""
        key = _key(directory, weights)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        weights.seek(0)
        drawn = self._draw(directory, weights)
        with self._lock:
            if key:
                self._kept[key] = drawn
            if len(self._kept) > MAX_BLUEPRINTS:
                self._kept.popitem(last=False)
        return drawn


def _key(directory: Path, weights: FileIO) -> bytes:
    """Equal for equal configs, headers and lengths of data; b"" for what is too long to be kept."""
    with open_regular(directory / CONFIG_FILE) as file:
        config = file.read(MAX_CONFIG_BYTES + 1)
    start = weights.read(8)
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES or len(config) > MAX_CONFIG_BYTES:
        return b""
    size = os.fstat(weights.fileno()).st_size
    parts = (len(config).to_bytes(8, "little"), size.to_bytes(8, "little"), config, start, weights.read(length))
    return hashlib.sha256(b"".join(parts)).digest()
