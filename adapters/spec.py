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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linears of a decoder layer."""

NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
"""Norms of a decoder layer."""

TABLES = ("embed_tokens", "lm_head")
"""What has a row for every token of the vocabulary."""

MODULES = (*LINEARS, *NORMS, "norm", *TABLES)
"""All that an adapter may change, in the order of its directory (its `module` index). The last three are the model's
own: they belong to no layer, and stand in one more row after those of the layers."""

NO_LAYER = -1
"""The layer of what belongs to no layer: the last row of a directory."""


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """An adapter as the engine knows it. `digest` is 64 hex digits; `size_bytes` is what it takes when packed;
    `num_added` tokens follow the base's vocabulary in its own."""

    digest: str
    rank: int = 0
    size_bytes: int = 0
    num_added: int = 0


class NewToken(msgspec.Struct, frozen=True, array_like=True):
    """A token that the base's tokenizer lacks. `special`: not shown in texts. `lstrip`, `rstrip`: it takes the white
    space before or after it along."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class BaseShape:
    """What an adapter must fit, read from the base model's config.json.

    linears: module name (of LINEARS) → (out_features, in_features), the same in every layer.
    biases: linears that have a bias.  head_norm_size: of q_norm and k_norm, 0 = there are none.
    weights_dir: where the base's own weights lie, "" = unknown: copies of them can't be compared.
    num_added: of the tokens, those that an adapter brings; the base's own come first.
    """

    num_layers: int
    vocab_size: int
    hidden_size: int
    linears: Mapping[str, tuple[int, int]]
    fingerprint: str = ""
    base_name: str = ""
    tie_word_embeddings: bool = False
    biases: tuple[str, ...] = ()
    head_norm_size: int = 0
    weights_dir: str = ""
    num_added: int = 0

    def grown(self, num_added: int) -> BaseShape:
        """As an adapter with so many tokens of its own sees it."""
        return replace(self, vocab_size=self.vocab_size + num_added, num_added=num_added) if num_added else self

    def size(self, module: str) -> tuple[int, int]:
        """(outputs, inputs) of one of MODULES; a norm is (width, 1)."""
        if module in self.linears:
            return self.linears[module]
        if module in TABLES:
            size = (self.hidden_size, self.vocab_size)
            return size if module == "embed_tokens" else size[::-1]
        return (self.head_norm_size if module in ("q_norm", "k_norm") else self.hidden_size), 1

    def has(self, module: str) -> bool:
        """The base has such a module, in its layers or beside them."""
        if module in ("q_norm", "k_norm"):
            return self.head_norm_size > 0
        return module in self.linears if module in LINEARS else module in MODULES


@dataclass(frozen=True)
class ModuleSpec:
    """What an adapter does to one module, by the names of tensors in its weights file ("" = not that).

    layer, module     of MODULES; NO_LAYER for the model's own
    rank, scale       of LoRA (rank 0 = none); scale is alpha/r, or alpha/√r for rsLoRA
    first_row         of B, magnitude and biases, where one tensor serves several modules (fused names)
    magnitude         of DoRA
    bias, lora_bias   replaces the base's bias; is added to B·A·x before it is scaled
    weight            replaces the whole module (norms, embed_tokens, lm_head)
    tokens            rows that replace those of `token_ids` (embed_tokens, lm_head)
    added             its last rows are those of new tokens (embed_tokens, lm_head)
    """

    layer: int
    module: str
    rank: int = 0
    scale: float = 1.0
    tensor_a: str = ""
    tensor_b: str = ""
    first_row: int = 0
    magnitude: str = ""
    bias: str = ""
    lora_bias: str = ""
    weight: str = ""
    tokens: str = ""
    token_ids: tuple[int, ...] = ()
    added: str = ""

    @property
    def tensors(self) -> list[str]:
        """Names of all that it is made of."""
        a_and_b = (self.tensor_a, self.tensor_b)
        rest = (self.magnitude, self.bias, self.lora_bias, self.weight, self.tokens, self.added)
        return [name for name in (*a_and_b, *rest) if name]

    def has_shift(self, shape: BaseShape) -> bool:
        """Something is added besides B·A·x: a bias, or what the gain must not scale."""
        return bool(self.bias or self.lora_bias or (self.magnitude and self.module in shape.biases))


@dataclass(frozen=True)
class AdapterSpec:
    """A validated adapter: every tensor of its file belongs to `modules`, or is a copy of the base's own weights."""

    modules: tuple[ModuleSpec, ...]
    rank: int  # the largest of the modules
    target_modules: tuple[str, ...]  # of MODULES, in that order
    num_tensors: int
    packed_bytes: int  # in the engine, at 2 bytes per element
    base_model: str | None = None
    warnings: tuple[str, ...] = field(default=())
    num_added: int = 0  # tokens beyond the base's vocabulary
    new_tokens: tuple[NewToken, ...] = ()  # what texts they stand for, as far as the adapter's tokenizer says


ALIGNMENT = 32
"""Elements: every tensor of a packed adapter begins at a multiple of it (64 bytes at 2 bytes per element)."""


def aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def extents(module: ModuleSpec, shape: BaseShape, itemsize: int) -> Iterator[tuple[str, int]]:
    """What is stored of a module, in order: (part, elements of `itemsize` bytes). Vectors are fp32, ids int64. `shape`
    has grown by the adapter's own tokens."""
    outputs, inputs = shape.size(module.module)
    if module.rank:
        yield "a", module.rank * inputs
        yield "b", module.rank * outputs
    if module.weight:
        yield "weight", outputs * (4 // itemsize) if inputs == 1 else outputs * inputs
    if module.tokens:
        yield "tokens", len(module.token_ids) * shape.hidden_size
        yield "token_ids", len(module.token_ids) * (8 // itemsize)
    if module.added:
        yield "added", shape.num_added * shape.hidden_size
    if module.magnitude:
        yield "gain", outputs * (4 // itemsize)
    if module.has_shift(shape):
        yield "shift", outputs * (4 // itemsize)


def packed_elements(modules: Iterable[ModuleSpec], shape: BaseShape, itemsize: int = 2) -> int:
    """Elements of the packed buffer, each part aligned."""
    return sum(aligned(count) for module in modules for _, count in extents(module, shape, itemsize))


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
