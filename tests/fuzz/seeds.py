"""Where fuzzing begins: sound inputs of every target, and the words that they are made of."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

OURS, THEIRS = b"\xff", b"\x00"
"""First byte: the frame is made by the target, or is part of the input."""

TENSORS = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": [1, 2],
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": [2, 1],
    "base_model.model.lm_head.base_layer.weight": [1],
}
CONFIGS: tuple[dict[str, Any], ...] = (
    {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"},
    {
        "peft_type": "LORA", "r": 4, "lora_alpha": 0.5, "target_modules": r".*layers\.[01]\.(q|v)_proj",
        "rank_pattern": {"q_proj": 8}, "alpha_pattern": {".*v_proj": 1e3}, "layers_to_transform": [0],
        "layers_pattern": "layers", "use_rslora": True, "modules_to_save": ["norm"], "trainable_token_indices": [1, 2],
    },
    {
        "peft_type": "LORA", "lora_alpha": 1, "target_modules": "all-linear", "exclude_modules": "lm_head",
        "use_dora": True, "init_lora_weights": "gaussian", "eva_config": None, "ensure_weight_tying": True,
    },
)  # fmt: skip
COMPANIONS: tuple[Any, ...] = (
    {"system_prompt": "Be brief.", "temperature": 0.5, "top_k": 40, "stop": ["END"], "max_tokens": 100, "seed": 1},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": [1, 2], "max_new_tokens": 9, "num_beams": 1},
    [[98, "[CALL]", False, False, False], [99, "[END]", True, False, False]],
)


def seeds(target: str) -> Iterator[bytes]:
    if target == "header":
        yield OURS + _header() + bytes(20)
        yield THEIRS + len(_header()).to_bytes(8, "little") + _header() + bytes(20)
        yield THEIRS + b"version https://git-lfs.github.com/spec/v1\n"
    elif target == "config":
        yield from (json.dumps(config).encode() for config in CONFIGS)
    elif target == "companions":
        yield from (bytes([number]) + json.dumps(found).encode() for number, found in enumerate(COMPANIONS))
    else:
        yield from _pickles()


def words(target: str) -> list[bytes]:
    """For the dictionary of the mutator."""
    if target == "header":
        names = [*TENSORS, "dtype", "shape", "data_offsets", "__metadata__", "F32", "BF16", "I64", "F8_E4M3"]
    elif target == "companions":
        names = [key for found in COMPANIONS if isinstance(found, dict) for key in found] + ["NaN", "1e999", "\ud800"]
    elif target == "config":
        names = [key for config in CONFIGS for key in config] + ["NaN", "1e999", "layer_replication", "\ud800"]
    else:
        calls = [b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"]
        return [*calls, b"cposix\nsystem\n", b"\x80\x02", b"X\x01\x00\x00\x00a", b"X\x07\x00\x00\x00storage", *_OPCODES]
    return [json.dumps(name).encode() for name in dict.fromkeys(names)] + [b"0", b"-1", b"18446744073709551616"]


_OPCODES = [bytes([code]) for code in b"()]}tsuQRb.NK\x85\x86\x87\x88\x89qhrj"]


def _header() -> bytes:
    entries, position = {}, 0
    for name, shape in TENSORS.items():
        size = 4
        for count in shape:
            size *= count
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    return json.dumps(entries).encode()


class _Storage(tuple[Any, ...]):
    """What a pickle refers to in place of a storage."""


class _Pickler(pickle._Pickler):  # type: ignore[name-defined, misc]
    def persistent_id(self, value: object) -> object:
        return tuple(value) if isinstance(value, _Storage) else None


def _pickles() -> Iterator[bytes]:
    """As torch.save writes a dictionary of one tensor, without torch; alone, and in its archive."""
    import torch
    from torch._utils import _rebuild_tensor_v2

    class _Tensor:
        def __reduce__(self) -> Any:
            storage = _Storage(("storage", torch.FloatStorage, "0", "cpu", 4))
            return _rebuild_tensor_v2, (storage, 0, (2, 2), (2, 1), False, OrderedDict())

    for protocol in (2, 4):
        target = io.BytesIO()
        _Pickler(target, protocol).dump({"a.weight": _Tensor()})
        yield OURS + target.getvalue()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("archive/data.pkl", target.getvalue())
        writer.writestr("archive/data/0", bytes(16))
    yield THEIRS + archive.getvalue()
