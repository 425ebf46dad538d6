"""Which module a tensor belongs to, and as what: the names that PEFT and its relatives give. Knows no shapes.

A name is <prefix><module>.<tail>: "base_model.model.model.layers.0.self_attn.q_proj" and "lora_A.weight". What wraps a
model in training (compilers, FSDP, checkpointing, vision-language models) leaves words in it that mean nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from adapters.header import Tensor
from adapters.spec import LINEARS, MODULES, NO_LAYER, AdapterInvalid, AdapterUnsupported, shown

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Names of linears that stand for several of ours, in the order of their rows."""

_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"))
_NAME = re.compile(
    r"(?P<prefix>(?:(?:base_model|model|language_model)\.)*)"
    r"(?P<module>layers\.(?P<layer>\d{1,5})\.(?:self_attn\.(?P<attn>[qkvo]_proj|qkv_proj|[qk]_norm)"
    r"|mlp\.(?P<mlp>(?:gate|up|down|gate_up)_proj)|(?P<norm>(?:input|post_attention)_layernorm))"
    r"|(?P<own>embed_tokens|norm|lm_head))\.(?P<tail>.+)"
)
_LINEAR = (
    ("a", re.compile(r"lora_A(?:\.default)?\.weight")),
    ("b", re.compile(r"lora_B(?:\.default)?\.weight")),
    ("lora_bias", re.compile(r"lora_B(?:\.default)?\.bias")),
    ("magnitude", re.compile(r"lora_magnitude_vector(?:\.default)?(?:\.weight)?")),
)
_BIAS = (("bias", re.compile(r"(?:base_layer\.)?bias")),)
_WHOLE = (("weight", re.compile(r"(?:modules_to_save(?:\.default)?\.)?weight")),)
_TABLE = (
    ("weight", re.compile(r"weight")),
    ("saved", re.compile(r"modules_to_save(?:\.default)?\.weight")),
    ("copy", re.compile(r"(?:token_adapter\.)?base_layer\.weight|original_module\.weight")),
    ("tokens", re.compile(r"(?:token_adapter\.)?trainable_tokens_delta(?:\.default)?")),
)
_EMBEDDING = (
    ("a", re.compile(r"lora_embedding_A(?:\.default)?")),
    ("b", re.compile(r"lora_embedding_B(?:\.default)?")),
    _LINEAR[3],
)
_REASONS: tuple[tuple[str, str, str], ...] = (
    (r"([wW]qkv|query_key_value|c_attn)\.", "unsupported_fused", "fused linears of this layout are not supported"),
    (r"modules_to_save|base_layer|_proj\.weight$|norm\.", "unsupported_modules_to_save",
     "only norms, embed_tokens and lm_head can be replaced whole"),
)  # fmt: skip
"""What a tensor that we have no place for tells us: pattern, code, message."""


@dataclass(frozen=True)
class Found:
    """The tensors of one module, by what they are: "a", "b", "magnitude", "bias", "lora_bias", "weight", "tokens",
    "copy", or "saved": "weight" once more. `module` is one of MODULES or FUSED; `path` is its name as PEFT knew it in
    training."""

    layer: int
    module: str
    path: str
    parts: dict[str, Tensor]

    @property
    def is_lora(self) -> bool:
        return not self.parts.keys().isdisjoint(("a", "b", "magnitude", "lora_bias"))

    @property
    def first(self) -> Tensor:
        return next(iter(self.parts.values()))


def collect(tensors: Iterable[Tensor]) -> list[Found]:
    """Every tensor has its place, all layers under one prefix. In the order of (layer, module), the model's own last.

    Raises AdapterInvalid, AdapterUnsupported, naming the tensors.
    """
    found: dict[tuple[int, str], Found] = {}
    prefixes: dict[str, str] = {}
    unknown = []
    for tensor in tensors:
        match = _NAME.fullmatch(_unwrapped(tensor.name))
        module = "" if match is None else match["attn"] or match["mlp"] or match["norm"] or match["own"]
        kind = None if match is None else _kind(module, match["tail"])
        if match is None or kind is None:
            unknown.append(tensor.name)
            continue
        if match["layer"] is not None:
            prefixes.setdefault(match["prefix"], tensor.name)
        layer = NO_LAYER if match["layer"] is None else int(match["layer"])
        place = found.setdefault((layer, module), Found(layer, module, _path(match), {}))
        if kind in place.parts:
            _twice(tensor, place.parts[kind])
        place.parts[kind] = tensor
    for place in found.values():
        if "saved" in place.parts and "weight" not in place.parts:
            place.parts["weight"] = place.parts.pop("saved")
    if unknown:
        _refuse(unknown)
    if len(prefixes) > 1:
        first, second = list(prefixes.values())[:2]
        raise AdapterInvalid("tensor_unknown", f"names of two kinds: {shown(first)} and {shown(second)}", second)
    _check_fused(found)
    return [found[place] for place in sorted(found, key=_order)]


def listed(names: Iterable[str], most: int = 5) -> str:
    """Names from a stranger, for a message."""
    every = [shown(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _unwrapped(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _path(match: re.Match[str]) -> str:
    key = match["prefix"] + match["module"]
    return key.removeprefix("base_model.").removeprefix("model.") if key.startswith("base_model.") else key


def _kind(module: str, tail: str) -> str | None:
    kinds: tuple[tuple[str, re.Pattern[str]], ...]
    if module == "embed_tokens":
        kinds = (*_EMBEDDING, *_TABLE)
    elif module == "lm_head":
        kinds = (*_LINEAR, *_TABLE)
    else:
        kinds = (*_LINEAR, *_BIAS) if module in LINEARS or module in FUSED else _WHOLE
    return next((kind for kind, pattern in kinds if pattern.fullmatch(tail)), None)


def _order(place: tuple[int, str]) -> tuple[float, int]:
    layer, module = place
    return (float("inf") if layer == NO_LAYER else layer, MODULES.index(FUSED.get(module, (module,))[0]))


def _check_fused(found: Mapping[tuple[int, str], Found]) -> None:
    for (layer, module), whole in found.items():
        for member in FUSED.get(module, ()):
            if (layer, member) in found:
                _twice(found[layer, member].first, whole.first)


def _twice(tensor: Tensor, other: Tensor) -> NoReturn:
    raise AdapterInvalid(
        "tensor_duplicate", f"{shown(tensor.name)} and {shown(other.name)} are of the same module", tensor.name
    )


def _refuse(names: list[str]) -> NoReturn:
    for pattern, code, reason in _REASONS:
        for name in names:
            if re.search(pattern, name):
                raise AdapterUnsupported(code, f"{reason}: {listed(names)}", name)
    raise AdapterInvalid("tensor_unknown", f"tensors that fit no module of the base: {listed(names)}", names[0])
