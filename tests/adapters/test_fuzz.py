"""Whatever a stranger sends, the answer is an AdapterError or a spec."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapters.config import canonical, parse_config
from adapters.spec import AdapterError, AdapterSpec
from adapters.storage import WEIGHTS_FILE
from adapters.validation import validate
from tests.adapters.files import LIMITS, SHAPE, config, pairs, raw, write

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_to_transform",
     "layers_pattern", "use_rslora", "use_dora", "bias", "peft_type", "init_lora_weights", "base_model_name_or_path",
     "modules_to_save", "task_type", "fan_in_fan_out", "zzz", "lora_bias", "trainable_token_indices",
     "ensure_weight_tying"]
)  # fmt: skip
LIKELY = st.one_of(
    JSON, st.integers(-2, 70), st.text("qkvo_proj.*+?()[]{}|\\^$0123456789layersmlp", max_size=12),
    st.lists(st.sampled_from(["q_proj", "v_proj", "mlp", "lm_head"]), max_size=3),
    st.dictionaries(st.text("qv_proj.*()[\\", max_size=8), st.one_of(st.integers(-1, 20), JSON), max_size=3),
)  # fmt: skip
DIMENSION = st.one_of(st.integers(-1, 130), st.integers(2**31, 2**70))
ENTRY = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "F64", "F4", ""]),
            "shape": st.lists(DIMENSION, max_size=4),
            "data_offsets": st.lists(st.one_of(st.integers(-1, 3000), st.integers(2**60, 2**70)), max_size=3),
        }
    ),
)
NAME = st.one_of(
    st.text(max_size=20),
    st.from_regex(
        r"\A(base_model\.model\.)?(model\.)?layers\.[0-9]{1,3}\.(self_attn|mlp)\.[a-z]{1,4}_proj\.lora_[AB](\.default)?\.weight\Z"
    ),
    st.from_regex(
        r"\A(base_model\.model\.)?(model\.)?(embed_tokens|lm_head|norm|layers\.[01]\.(self_attn\.(qkv|q)_proj|mlp\.up_proj|"
        r"input_layernorm))\.((base_layer\.|modules_to_save\.)?(weight|bias)|lora_(A|B)\.(weight|bias)|"
        r"lora_embedding_[AB]|lora_magnitude_vector|token_adapter\.trainable_tokens_delta)\Z"
    ),
)
bounded = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of re, on odd patterns


def outcome(tensors: Any, config_data: Any) -> AdapterSpec | AdapterError:
    with tempfile.TemporaryDirectory() as directory:
        try:
            return validate(write(Path(directory), tensors, config_data), SHAPE, LIMITS)
        except AdapterError as error:
            found = error
    assert found.code
    assert found.message.isascii()
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (write(tmp_path_factory.mktemp("w"), pairs(["q_proj"]), config()) / WEIGHTS_FILE).read_bytes()


@bounded
@given(changes=st.dictionaries(KEYS, LIKELY, max_size=3))
def test_configs(weights: bytes, changes: dict[str, Any]) -> None:
    """A sound adapter with up to three keys of its config replaced by anything."""
    data = json.dumps(config(("q_proj",)) | changes).encode()

    result = outcome(weights, data)

    if isinstance(result, AdapterSpec):
        assert len(result.modules) == 2
        assert all(module.rank == 4 and module.scale > 0 for module in result.modules)


@bounded
@given(st.binary(max_size=200))
@example(b'{"a": 1e999}')
@example(b'{"r": -0}')
def test_config_bytes(data: bytes) -> None:
    """Any bytes: an error, or a config."""
    with suppress(AdapterError):
        parse_config(data)


@bounded
@given(st.dictionaries(KEYS, LIKELY, max_size=6))
def test_what_is_accepted_is_stored_and_read_again(changes: dict[str, Any]) -> None:
    """The canonical spelling of every accepted config is accepted, means the same, and is its own spelling."""
    data = json.dumps(config() | changes).encode()
    try:
        accepted = parse_config(data)
    except AdapterError:
        return
    stored = canonical(data)
    assert parse_config(stored) == accepted
    assert canonical(stored) == stored


@bounded
@given(header=st.dictionaries(NAME, ENTRY, max_size=4), data=st.binary(max_size=64))
def test_headers(header: dict[str, Any], data: bytes) -> None:
    """Any JSON as header, any data behind it."""
    assert isinstance(outcome(raw(header, data), config(("q_proj",))), AdapterError)


@bounded
@given(st.binary(max_size=120), st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_header_bytes(data: bytes, length: int | None) -> None:
    """Any bytes, behind any length."""
    assert isinstance(outcome(raw(data, length=length), config(("q_proj",))), AdapterError)


@bounded
@given(position=st.integers(0, 1 << 20), value=st.integers(1, 255), cut=st.integers(0, 3))
def test_damaged_files(weights: bytes, position: int, value: int, cut: int) -> None:
    """A sound file with one byte changed and some cut off: refused, or still an adapter of the same shape."""
    damaged = bytearray(weights)
    damaged[position % len(damaged)] ^= value
    data = bytes(damaged[: len(damaged) - cut])

    result = outcome(data, config(("q_proj",)))

    if cut:
        assert isinstance(result, AdapterError)
    elif isinstance(result, AdapterSpec):
        assert [(module.layer, module.module, module.rank) for module in result.modules] == [
            (0, "q_proj", 4), (1, "q_proj", 4)
        ]  # fmt: skip
