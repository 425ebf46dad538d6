"""What an adapter is: its digest (AdapterRef), its parsed adapter_config.json (AdapterSpec), the base it must fit
(BaseShape). Knows no storage, no names, no torch.

    AdapterError           anything wrong with an adapter; has .code (stable, documented), .message, .param
    ├── AdapterInvalid     the files can't be an adapter of this base: bad header, shapes, values, config
    ├── AdapterUnsupported sound, but asks for something that Chorus does not do
    ├── AdapterTooLarge    above a limit (bytes, rank)
    └── AdapterMissing     the store does not have it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linears of a decoder layer, in the order of an adapter's directory (its `module` index)."""


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """An adapter as the engine knows it. `digest` is 64 hex digits; `size_bytes` is what it takes when packed."""

    digest: str
    rank: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class BaseShape:
    """What an adapter must fit, read from the base model's config.json.

    linears: module name (of LINEARS) → (out_features, in_features), the same in every layer.
    """

    num_layers: int
    vocab_size: int
    hidden_size: int
    linears: Mapping[str, tuple[int, int]]
    fingerprint: str = ""
    base_name: str = ""
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class ModuleSpec:
    """One adapted linear: layer, module (of LINEARS), its true rank, its scale (alpha/r, or alpha/√r for rsLoRA),
    and the names of its tensors in the weights file."""

    layer: int
    module: str
    rank: int
    scale: float
    tensor_a: str
    tensor_b: str


@dataclass(frozen=True)
class AdapterSpec:
    """A validated adapter: every tensor of its file belongs to exactly one of `modules`."""

    modules: tuple[ModuleSpec, ...]
    rank: int  # the largest of the modules
    target_modules: tuple[str, ...]  # of LINEARS, in that order
    num_tensors: int
    packed_bytes: int  # in the engine, at 2 bytes per element
    base_model: str | None = None
    warnings: tuple[str, ...] = field(default=())


ALIGNMENT = 32
"""Elements: every tensor of a packed adapter begins at a multiple of it (64 bytes at 2 bytes per element)."""


def aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def packed_elements(modules: Iterable[ModuleSpec], shape: BaseShape) -> int:
    """Elements of the packed buffer: A [r, in] and B [r, out] of every module, each aligned."""
    return sum(
        aligned(module.rank * shape.linears[module.module][1]) + aligned(module.rank * shape.linears[module.module][0])
        for module in modules
    )


def shown(text: str, limit: int = 160) -> str:
    """Text from a stranger, fit for a message or a log line: ASCII, control characters escaped, bounded."""
    escaped = json.dumps(text)[1:-1]
    return escaped if len(escaped) <= limit else escaped[:limit] + "..."


class AdapterError(Exception):
    """Something is wrong with an adapter. `code` is stable and documented; `param` names the key or tensor."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = None if param is None else shown(param)


class AdapterInvalid(AdapterError):
    """The files can't be an adapter of this base model."""


class AdapterUnsupported(AdapterError):
    """Sound, but it asks for something that Chorus does not do (and will not silently leave out)."""


class AdapterTooLarge(AdapterError):
    """Above a limit: bytes of the upload, bytes of the config, rank."""


class AdapterMissing(AdapterError):
    """The store does not have this digest."""
