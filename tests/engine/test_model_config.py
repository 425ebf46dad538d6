"""ModelConfig: families as rows, scaling, windows, and refusals that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from engine.model.config import FAMILIES, ModelConfig
from tests.tiny import tiny_config, tiny_model


def raw(**changes: Any) -> dict[str, Any]:
    return {**tiny_config(), **changes}


def test_a_checkpoint_directory_is_read(tiny_llama: Path) -> None:
    """Sizes, end-of-sequence ids and the base shape come from the directory's files."""
    config = ModelConfig.from_dir(tiny_llama)

    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.eos_token_ids == (2,)
    shape = config.base_shape()
    assert shape.linears["k_proj"] == (32, 64)
    assert shape.linears["down_proj"] == (64, 128)
    assert (shape.base_name, shape.num_layers) == ("tiny-llama", 2)


def test_eos_ids_of_both_files_end_an_answer(tmp_path: Path) -> None:
    """generation_config.json may add ends of turn that config.json lacks."""
    directory = tiny_model(tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))

    assert ModelConfig.from_dir(directory).eos_token_ids == (2, 7, 9)


def test_fingerprint_follows_weights_and_config(tmp_path: Path) -> None:
    """Equal checkpoints share a fingerprint; other weights or another config change it."""
    one = ModelConfig.from_dir(tiny_model(tmp_path / "one"))
    same = ModelConfig.from_dir(tiny_model(tmp_path / "same"))
    other_weights = ModelConfig.from_dir(tiny_model(tmp_path / "weights", seed=5))
    other_config = ModelConfig.from_dir(tiny_model(tmp_path / "config", max_len=1024))

    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, other_weights.fingerprint, other_config.fingerprint}) == 3


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "MixtralForCausalLM", None])
def test_unknown_architectures_are_refused_with_the_list(architecture: str | None) -> None:
    """A model that Chorus can't run is refused by name, and the message lists those that it can."""
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_dict(raw(architectures=[architecture] if architecture else None))

    assert all(name in str(refusal.value) for name in FAMILIES)
    assert (architecture or "unknown") in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "KV heads"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(changes: dict[str, Any], named: str) -> None:
    """Nothing that Chorus doesn't compute is silently left out: the error names the key."""
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_dict(raw(**changes))


def test_sliding_windows_follow_the_family() -> None:
    """Mistral slides everywhere, Llama never, Qwen only where it says so."""
    mistral = raw(architectures=["MistralForCausalLM"], sliding_window=32)
    qwen = raw(architectures=["Qwen2ForCausalLM"], sliding_window=32, use_sliding_window=True, max_window_layers=1)

    assert ModelConfig.from_dict(mistral).windows == (32, 32)
    assert ModelConfig.from_dict({**mistral, "sliding_window": None}).windows == (None, None)
    assert ModelConfig.from_dict(raw(sliding_window=32)).windows == (None, None)
    assert ModelConfig.from_dict(qwen).windows == (None, 32)
    assert ModelConfig.from_dict({**qwen, "use_sliding_window": False}).windows == (None, None)
    assert ModelConfig.from_dict({**qwen, "layer_types": ["sliding_attention", "full_attention"]}).windows == (32, None)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    """rope_theta + rope_scaling (before transformers 5) equal rope_parameters."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    old = raw(rope_theta=500000.0, rope_scaling=scaling)
    del old["rope_parameters"]
    new = raw(rope_parameters={**scaling, "rope_theta": 500000.0})

    assert ModelConfig.from_dict(old).rope == ModelConfig.from_dict(new).rope
    assert ModelConfig.from_dict(new).rope.kind == "llama3"


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_directory_without_a_config_is_refused(tmp_path: Path, content: str | None) -> None:
    """No config.json, or one that isn't an object, is a ConfigError that says where."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
