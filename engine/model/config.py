"""ModelConfig: what a checkpoint's config.json says, with model families as rows of data. No torch: the gateway
reads it too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from adapters.spec import BaseShape
from engine.config import ConfigError

Rule = bool | str
"""A switch of a family: fixed, or the name of the config.json key that decides (absent = false)."""


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the common decoder. `window`: "all" layers slide by `sliding_window`, the
    `upper` ones from max_window_layers on where use_sliding_window is set, or "never"."""

    qkv_bias: Rule
    o_bias: Rule
    mlp_bias: Rule
    qk_norm: bool
    window: Literal["never", "all", "upper"]
    head_dim: int | None = None  # where config.json has none; None = hidden_size / heads


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("attention_bias", "attention_bias", "mlp_bias", qk_norm=False, window="never"),
    "MistralForCausalLM": Family(False, False, False, qk_norm=False, window="all"),
    "Qwen2ForCausalLM": Family(True, False, False, qk_norm=False, window="upper"),
    "Qwen3ForCausalLM": Family("attention_bias", "attention_bias", False, qk_norm=True, window="upper", head_dim=128),
}

ROPE_KINDS = ("default", "linear", "llama3")

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "layer_norm_eps": (None,),
}
"""Keys of config.json that would change the mathematics, with the values that don't."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. kind "linear" divides positions by `factor`; "llama3" divides low frequencies by it, keeps
    high ones and blends between the two wavelength limits (Llama 3.1)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of one of FAMILIES. `windows[i]` is layer i's sliding window, None for full attention."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    directory: str = ""

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """Reads <path>/config.json (and generation_config.json). Raises ConfigError for what Chorus can't run."""
        raw = _read_json(path / "config.json")
        generation_path = path / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        config = cls.from_dict(raw, name=path.resolve().name, fingerprint=fingerprint_of(path))
        eos = {*config.eos_token_ids, *_ids(generation.get("eos_token_id"))}
        return replace(config, eos_token_ids=tuple(sorted(eos)), directory=str(path.resolve()))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], name: str = "model", fingerprint: str = "") -> ModelConfig:
        """`raw` is a parsed config.json. Raises ConfigError for what Chorus can't run, naming key and value."""
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        for key, allowed in REFUSED.items():
            if raw.get(key) not in allowed:
                raise ConfigError(f"{name}: {key} = {raw[key]!r} is not supported (only {allowed[0]!r})")
        num_layers, hidden_size = _count(raw, "num_hidden_layers"), _count(raw, "hidden_size")
        num_heads = _count(raw, "num_attention_heads")
        num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
        head_dim = _count(raw, "head_dim", family.head_dim or hidden_size // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise ConfigError(f"{name}: {num_heads} heads, {num_kv_heads} KV heads of size {head_dim} don't divide")
        return cls(
            name=name,
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_count(raw, "vocab_size"),
            max_position=_count(raw, "max_position_embeddings"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw),
            qkv_bias=_switch(raw, family.qkv_bias),
            o_bias=_switch(raw, family.o_bias),
            mlp_bias=_switch(raw, family.mlp_bias),
            qk_norm=family.qk_norm,
            windows=_windows(raw, family, num_layers),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(sorted(_ids(raw.get("eos_token_id")))),
            fingerprint=fingerprint,
        )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Module name → (out_features, in_features) of one layer, in the order of adapters.spec.LINEARS."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (self.q_size, hidden),
            "k_proj": (self.kv_size, hidden),
            "v_proj": (self.kv_size, hidden),
            "o_proj": (hidden, self.q_size),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }

    @property
    def biases(self) -> tuple[str, ...]:
        """Linears that have a bias."""
        switches = (self.qkv_bias, self.qkv_bias, self.qkv_bias, self.o_bias, *[self.mlp_bias] * 3)
        return tuple(name for name, has_bias in zip(self.linears, switches, strict=True) if has_bias)

    def base_shape(self) -> BaseShape:
        """What an adapter must fit."""
        return BaseShape(
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            linears=self.linears,
            fingerprint=self.fingerprint,
            base_name=self.name,
            tie_word_embeddings=self.tie_word_embeddings,
            biases=self.biases,
            head_norm_size=self.head_dim if self.qk_norm else 0,
            weights_dir=self.directory,
        )


def fingerprint_of(path: Path) -> str:
    """A name for the weights and config in this directory: SHA-256 over config.json and, per weights file, its name,
    size, head and 64 evenly spaced pages (whole files would cost seconds per 10 GB at every start)."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for page in range(64):
                stream.seek(page * size // 64)
                digest.update(stream.read(4096))
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} holds no {path.name}: it is not a model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return raw


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    for name in named:
        if name in FAMILIES:
            return str(name)
    raise ConfigError(f"architecture {', '.join(map(str, named)) or 'unknown'} is not one of {', '.join(FAMILIES)}")


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} = {value!r} is not a positive integer")
    return value


def _switch(raw: Mapping[str, Any], rule: Rule) -> bool:
    return bool(raw.get(rule, False)) if isinstance(rule, str) else rule


def _windows(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Mistral slides in every layer; Qwen from max_window_layers on, or where layer_types says so."""
    if family.window == "never" or (family.window == "upper" and not raw.get("use_sliding_window")):
        return (None,) * num_layers
    window = raw.get("sliding_window", 4096)
    if window is None:
        return (None,) * num_layers
    if family.window == "all":
        return (int(window),) * num_layers
    first = int(raw.get("max_window_layers", num_layers))
    kinds = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(f"config.json: layer_types = {kinds!r} does not name {num_layers} sliding or full layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    fields = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"config.json: rope type {kind!r} is not one of {', '.join(ROPE_KINDS)}")
    theta = float(fields.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta)
    wanted = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    missing = [key for key in wanted if key not in fields]
    if missing:
        raise ConfigError(f"config.json: rope type {kind} without {', '.join(missing)}")
    original = fields.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    values = {key: float(fields[key]) for key in wanted}
    return RopeConfig(theta, kind, original_max_position=int(original), **values)


def _ids(value: Any) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)
