"""adapter_config.json: understood whole, or refused by the name of the key. Knows no tensors and no files.

Switches fall into four groups: those that we apply, those that only matter in training, those that must be off, and
unknown ones, which must be off too (null, false, 0 or empty), since they might alter the mathematics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from adapters.spec import AdapterInvalid, AdapterTooLarge, AdapterUnsupported, shown
from adapters.strict_json import parse_object

MAX_CONFIG_BYTES = 64 << 10
MAX_ALPHA = 1e6
MAX_SAVED = 256

T = TypeVar("T")

_APPLIED = frozenset(
    ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
     "layers_to_transform", "layers_pattern", "peft_type", "base_model_name_or_path", "init_lora_weights", "bias",
     "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "ensure_weight_tying")
)  # fmt: skip
_TRAINING_ONLY = frozenset(
    ("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
     "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
     "runtime_config", "ephemeral_gpu_offload")
)  # fmt: skip
BIASES = ("none", "lora_only", "all")
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Ways to initialise A and B that leave the base weights as they are; all others need a base that we don't have."""


@dataclass(frozen=True)
class LoraConfig:
    """The part of adapter_config.json that decides what is computed. `rank` None = the file doesn't say."""

    rank: int | None
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    use_dora: bool
    bias: str
    lora_bias: bool
    modules_to_save: tuple[str, ...]
    token_ids: Mapping[str, tuple[int, ...]]
    ties_weights: bool
    base_model: str | None
    warnings: tuple[str, ...]

    def scale(self, alpha: float, rank: int) -> float:
        """What B·A is multiplied by: alpha/r, or alpha/√r for rank-stabilised LoRA (arXiv 2312.03732)."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(data: bytes) -> LoraConfig:
    """Raises AdapterInvalid, AdapterUnsupported or AdapterTooLarge, naming the key."""
    raw = _Fields(_parse(data))
    _spelled(raw)
    _check_kind(raw)
    _check_switches(raw)
    rank_pattern = raw.mapping("rank_pattern", _rank)
    return LoraConfig(
        rank=None if raw.get("r") is None else _rank("r", raw["r"]),
        alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
        use_rslora=raw.boolean("use_rslora"),
        rank_pattern=rank_pattern,
        alpha_pattern=raw.mapping("alpha_pattern", _alpha),
        target_modules=raw.names("target_modules"),
        exclude_modules=raw.names("exclude_modules"),
        layers=raw.layers("layers_to_transform"),
        layers_pattern=raw.patterns("layers_pattern"),
        use_dora=raw.boolean("use_dora"),
        bias=raw.text("bias") or "none",
        lora_bias=raw.boolean("lora_bias"),
        modules_to_save=_saved(raw),
        token_ids=_token_ids(raw),
        ties_weights=raw.boolean("ensure_weight_tying"),
        base_model=raw.text("base_model_name_or_path"),
        warnings=_warnings(raw),
    )


def _parse(data: bytes) -> dict[str, Any]:
    _check_size(data)
    try:
        return parse_object(data)
    except ValueError as error:
        _invalid(None, shown(str(error)))


def canonical(data: bytes) -> bytes:
    """The one spelling of this config: keys sorted, no spaces, ASCII. Equal meaning gives equal bytes."""
    return _spelled(_parse(data))


def _spelled(value: dict[str, Any]) -> bytes:
    """Stored and read again in this spelling, which may be longer than the one that came: the limit holds for both."""
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    _check_size(data)
    return data


def _check_size(data: bytes) -> None:
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterTooLarge(
            "config_too_large", f"adapter_config.json has {len(data)} bytes, at most {MAX_CONFIG_BYTES} are allowed"
        )


def _invalid(param: str | None, problem: str) -> NoReturn:
    subject = "adapter_config.json" if param is None else f"adapter_config.json: {shown(param)}"
    raise AdapterInvalid("config_invalid", f"{subject} {problem}", param)


def _rank(param: str, value: object) -> int:
    if type(value) is not int or value < 1:
        _invalid(param, "must be a positive integer")
    return value


def _alpha(param: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= MAX_ALPHA:  # type: ignore[operator]
        _invalid(param, f"must be a number above 0 and at most {MAX_ALPHA:g}")
    return float(value)  # type: ignore[arg-type]


def _check_kind(raw: _Fields) -> None:
    kind = raw.get("peft_type")
    if not isinstance(kind, str):
        _invalid("peft_type", 'must be "LORA"')
    if kind != "LORA":
        raise AdapterUnsupported("unsupported_peft_type", f"peft_type {shown(kind)} is not supported", "peft_type")
    init = raw.get("init_lora_weights")
    if not (init is None or isinstance(init, (bool, str))):
        _invalid("init_lora_weights", "must be true, false or a name")
    if (init.lower() if isinstance(init, str) else init) not in _PLAIN_INITS:
        raise AdapterUnsupported(
            "unsupported_init",
            f"init_lora_weights {shown(str(init))} changes the base weights, which are shared by all adapters here; "
            "convert the adapter to plain LoRA (peft: save_pretrained(path_initial_model_for_weight_conversion=...))",
            "init_lora_weights",
        )
    bias = raw.get("bias")
    if bias is not None and bias not in BIASES:
        _invalid("bias", f"must be one of {', '.join(BIASES)}")


def _check_switches(raw: _Fields) -> None:
    if raw.get("lora_bias") and (raw.get("use_dora") or raw.get("bias") not in (None, "none")):
        raise AdapterUnsupported(
            "unsupported_option", "lora_bias beside use_dora or bias is not supported, nor does PEFT allow it",
            "lora_bias",
        )  # fmt: skip
    for key, value in raw.items():
        if key in _APPLIED or key in _TRAINING_ONLY or not value:
            continue
        raise AdapterUnsupported(
            "unsupported_option", f"the option {shown(key)} in adapter_config.json is not supported", key
        )


def _saved(raw: _Fields) -> tuple[str, ...]:
    names = raw.patterns("modules_to_save")
    if len(names) > MAX_SAVED:
        _invalid("modules_to_save", f"must name at most {MAX_SAVED} modules")
    return names


def _token_ids(raw: _Fields) -> Mapping[str, tuple[int, ...]]:
    """Module → ids of the tokens that have rows of their own; a plain list means those of embed_tokens."""
    key = "trainable_token_indices"
    value = raw.get(key)
    if isinstance(value, list):
        value = {"embed_tokens": value}
    if not (value is None or isinstance(value, dict)):
        _invalid(key, "must be a list of token ids, or an object of such lists")
    found: dict[str, tuple[int, ...]] = {}
    for path, ids in (value or {}).items():
        if not isinstance(ids, list) or any(type(index) is not int or index < 0 for index in ids):
            _invalid(key, "must hold lists of token ids")
        name = path.rpartition(".")[2]
        if len(set(ids)) != len(ids) or name in found:
            _invalid(key, "names a token twice")
        found[name] = tuple(ids)
    return found


def _warnings(raw: _Fields) -> tuple[str, ...]:
    found = []
    if raw.get("r") is None:
        found.append("r is missing: ranks are those of the tensors")
    if raw.boolean("fan_in_fan_out"):
        found.append("fan_in_fan_out is ignored: the base has no transposed linears")
    task = raw.text("task_type")
    if task not in (None, "CAUSAL_LM"):
        found.append(f"task_type is {shown(task)}, not CAUSAL_LM")
    return tuple(found)


class _Fields(dict[str, Any]):
    """The raw object with strictly typed access; null and missing mean the same."""

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            _invalid(key, "must be true or false")
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            _invalid(key, "must be a string")
        return value

    def mapping(self, key: str, convert: Callable[[str, object], T]) -> Mapping[str, T]:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            _invalid(key, "must be an object")
        return {pattern: convert(f"{key}.{pattern}", entry) for pattern, entry in (value or {}).items()}

    def names(self, key: str) -> str | tuple[str, ...]:
        value = self.get(key)
        if isinstance(value, str):
            return value
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            _invalid(key, "must be a string or a list of strings")
        return tuple(value or ())

    def patterns(self, key: str) -> tuple[str, ...]:
        """Names, where one string is a list of one."""
        names = self.names(key)
        return ((names,) if names else ()) if isinstance(names, str) else names

    def layers(self, key: str) -> frozenset[int] | None:
        value = self.get(key)
        indexes = [value] if type(value) is int else value
        if indexes is None or indexes == []:
            return None
        if not isinstance(indexes, list) or any(type(index) is not int or index < 0 for index in indexes):
            _invalid(key, "must be a layer index or a list of them")
        return frozenset(indexes)
