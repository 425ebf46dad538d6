"""adapter_config.json: every key is understood, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.config import MAX_CONFIG_BYTES, canonical, parse_config
from adapters.spec import AdapterError, AdapterInvalid, AdapterTooLarge, AdapterUnsupported
from tests.adapters.files import config


def parse(**changes: Any) -> Any:
    return parse_config(json.dumps(config(**changes)).encode())


def refused(data: bytes) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        parse_config(data)
    return caught.value


@pytest.mark.parametrize(
    "extra",
    [
        {"eva_config": None, "corda_config": None, "trainable_token_indices": None, "exclude_modules": None},
        {"lora_bias": False, "bias": None, "zzz_future": None},
        {"zzz_future": False, "another": 0, "third": [], "fourth": {}, "fifth": ""},
        {"megatron_core": "megatron.core", "loftq_config": {}, "qalora_group_size": 16, "ensure_weight_tying": True},
        {"auto_mapping": {"unsloth_fixed": True}, "runtime_config": {"ephemeral_gpu_offload": False}},
        {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"init_lora_weights": "eva"},
        {"init_lora_weights": "Orthogonal"}, {"lora_dropout": 0.1, "revision": "main", "peft_version": "9.9.9"},
    ],
)  # fmt: skip
def test_known_and_idle_keys_are_accepted(extra: dict[str, Any]) -> None:
    """AL-14: keys of older and newer PEFTs at their defaults, and switches of training only, change nothing."""
    assert parse(**extra).alpha == 8.0


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ({"layer_replication": [[0, 2], [1, 3]]}, "unsupported_option"),
        ({"alora_invocation_tokens": [1, 2]}, "unsupported_option"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "unsupported_option"),
        ({"use_qalora": True}, "unsupported_option"),
        ({"use_bdlora": {"nblocks": 2}}, "unsupported_option"),
        ({"kasa_config": {"beta": 1e-4}}, "unsupported_option"),
        ({"megatron_config": {"a": 1}}, "unsupported_option"),
        ({"zzz_future": "on"}, "unsupported_option"),
        ({"lora_bias": True, "use_dora": True}, "unsupported_option"),
        ({"lora_bias": True, "bias": "all"}, "unsupported_option"),
        ({"init_lora_weights": "pissa"}, "unsupported_init"),
        ({"init_lora_weights": "pissa_niter_16"}, "unsupported_init"),
        ({"init_lora_weights": "olora"}, "unsupported_init"),
        ({"init_lora_weights": "loftq"}, "unsupported_init"),
        ({"init_lora_weights": "corda"}, "unsupported_init"),
        ({"init_lora_weights": "lora_ga"}, "unsupported_init"),
        ({"peft_type": "IA3"}, "unsupported_peft_type"),
    ],
)
def test_what_alters_the_mathematics_is_refused_by_name(extra: dict[str, Any], code: str) -> None:
    """AL-08, AL-10, AL-14, AL-26: an active switch that we don't apply is refused with a stable code and its key."""
    with pytest.raises(AdapterUnsupported) as caught:
        parse(**extra)

    assert caught.value.code == code
    assert caught.value.param == next(iter(extra))
    assert next(iter(extra)) in caught.value.message


@pytest.mark.parametrize(
    "extra",
    [
        {"r": "16"}, {"r": 16.0}, {"r": 0}, {"r": -1}, {"r": True}, {"r": [8]}, {"lora_alpha": 0},
        {"lora_alpha": None}, {"lora_alpha": "16"}, {"lora_alpha": -1}, {"lora_alpha": 10**400}, {"lora_alpha": True},
        {"use_rslora": "yes"}, {"use_rslora": 1}, {"peft_type": None}, {"peft_type": ["LORA"]}, {"bias": 1},
        {"init_lora_weights": 1.5}, {"target_modules": 3}, {"target_modules": [1]}, {"target_modules": {"q_proj": 1}},
        {"layers_to_transform": "0"}, {"layers_to_transform": [True]}, {"layers_to_transform": [-1]},
        {"layers_to_transform": [0.0]}, {"rank_pattern": ["q_proj"]}, {"base_model_name_or_path": 7},
        {"bias": "some"}, {"use_dora": 1}, {"lora_bias": "yes"}, {"ensure_weight_tying": 1}, {"modules_to_save": 3},
        {"modules_to_save": [None]}, {"modules_to_save": ["norm"] * 300}, {"trainable_token_indices": "1"},
        {"trainable_token_indices": [-1]}, {"trainable_token_indices": [1.0]}, {"trainable_token_indices": [1, 1]},
        {"trainable_token_indices": {"embed_tokens": 1}}, {"trainable_token_indices": [True]},
        {"task_type": {"": None, "0": None}}, {"task_type": 3}, {"fan_in_fan_out": "yes"},
    ],
)  # fmt: skip
def test_wrong_types_name_their_field(extra: dict[str, Any]) -> None:
    """AL-15: no value is converted or replaced by a default; the error names the field."""
    with pytest.raises(AdapterInvalid) as caught:
        parse(**extra)

    assert (caught.value.code, caught.value.param) == ("config_invalid", next(iter(extra)))


def test_pattern_values_are_as_strict_as_the_plain_ones() -> None:
    """AL-15: rank_pattern and alpha_pattern hold ranks and alphas."""
    with pytest.raises(AdapterInvalid, match=r"rank_pattern\.q_proj"):
        parse(rank_pattern={"q_proj": "4"})
    with pytest.raises(AdapterInvalid, match=r"alpha_pattern\.q_proj"):
        parse(alpha_pattern={"q_proj": 0})


def test_a_missing_alpha_is_not_invented() -> None:
    """AL-15: without lora_alpha nobody knows the scale; without r the tensors do, and the status says so."""
    without_alpha = {name: value for name, value in config().items() if name != "lora_alpha"}
    without_rank = {name: value for name, value in config().items() if name != "r"}

    assert refused(json.dumps(without_alpha).encode()).param == "lora_alpha"
    parsed = parse_config(json.dumps(without_rank).encode())
    assert parsed.rank is None
    assert "r is missing" in parsed.warnings[0]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b'"LORA"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b'{"r": 8,}', b'{"r": NaN}',
        b'{"lora_alpha": Infinity}', b'{"lora_dropout": 1e999}',
        b'{"r": 8, "r": 16}', b"[" * 30_000, b'{"a":' * 10_000, b'{"r": 1} x',
        b'{"r": ' + b"9" * 5000 + b"}",
    ],
    ids=range(16),
)  # fmt: skip
def test_broken_json_is_one_clear_error(data: bytes) -> None:
    """AL-15: a list, a byte order mark, a trailing comma, duplicate keys, NaN, deep nesting: config_invalid."""
    assert refused(data).code == "config_invalid"


def test_config_size_is_bounded() -> None:
    """A config above 64 KiB is refused, also one that only its stored spelling makes so large."""
    for data in (b" " * (MAX_CONFIG_BYTES + 1), json.dumps(config(revision="é" * 30_000), ensure_ascii=False).encode()):
        with pytest.raises(AdapterTooLarge) as caught:
            parse_config(data)
        assert caught.value.code == "config_too_large"


def test_text_of_strangers_is_shown_safely() -> None:
    """Names in messages are ASCII, escaped and bounded, so that logs, headers and JSON can carry them."""
    error = refused(json.dumps(config(**{"x\n\u202e\ud800" + "y" * 500: True})).encode())

    assert error.message.isascii()
    assert "\n" not in error.message
    assert error.param is not None
    assert len(error.param) < 200


def test_canonical_spelling_ignores_order_and_spaces() -> None:
    """Equal configs have equal bytes, and so equal digests."""
    assert canonical(b'{"b": [1, 2.5],\n "a": "\xc3\xa9"}') == canonical(b'{"a":"\\u00e9","b":[1,2.5]}')
    assert canonical(b'{"a": 1}') != canonical(b'{"a": 1.0}')
