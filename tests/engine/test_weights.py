"""load_model: shards, tied heads, and every tensor accounted for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import ConfigError
from engine.kv_cache import KVCache
from engine.model.config import ModelConfig
from engine.model.weights import load_model
from engine.ops import create_ops
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence


def logits(path: Path) -> Tensor:
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, create_ops("cpu", torch.float32, 16, 16))
    cache = KVCache(config, 4, BLOCK_SIZE, torch.float32)
    return forward(model, cache, [Part(make_sequence(list(range(3, 30)), [0, 1]), 0, 27)])[0]


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of the checkpoint whose tensors `change` has altered."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def test_shards_are_one_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    """A checkpoint in several files gives the bits of the same in one."""
    shutil.copytree(tiny_llama, tmp_path / "sharded")
    tensors = load_file(tiny_llama / "model.safetensors")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + index % 3}-of-00003.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name, where in weight_map.items() if where == file}
        save_file(part, tmp_path / "sharded" / file)
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    assert torch.equal(logits(tmp_path / "sharded"), logits(tiny_llama))


def test_a_tied_head_is_the_embedding(tiny_llama: Path, tmp_path: Path) -> None:
    """With tie_word_embeddings the head is the embedding table, whether or not the file repeats it."""

    def tie(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    untied = changed(tiny_llama, tmp_path / "untied", tie)
    repeated = changed(untied, tmp_path / "repeated", lambda tensors: None)
    tied = changed(untied, tmp_path / "tied", lambda tensors: tensors.__delitem__("lm_head.weight"))
    for path in (repeated, tied):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    assert torch.equal(logits(tied), logits(untied))
    assert torch.equal(logits(repeated), logits(untied))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}),
            "model.layers.2.mlp.up_proj.weight",
        ),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}), "q_proj.bias"),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), "model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "int8"),
    ],
)
def test_every_tensor_is_accounted_for(
    tiny_llama: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], named: str
) -> None:
    """A tensor that is missing, left over, of another shape or dtype stops the load and is named."""
    with pytest.raises(ConfigError, match=named):
        logits(changed(tiny_llama, tmp_path / "model", change))


def test_constants_of_old_exporters_are_ignored(tiny_llama: Path, tmp_path: Path) -> None:
    """rotary_emb.inv_freq is a constant, not a weight."""

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert torch.equal(logits(changed(tiny_llama, tmp_path / "old", add)), logits(tiny_llama))


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
def test_damaged_or_missing_files_are_refused(tiny_llama: Path, tmp_path: Path, content: bytes | None) -> None:
    """An empty file, an LFS pointer or no file at all is a ConfigError that says where."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    if content is not None:
        (tmp_path / "model" / "model.safetensors").write_bytes(content)

    with pytest.raises(ConfigError, match=str(tmp_path)):
        logits(tmp_path / "model")


def test_a_broken_index_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """An index that isn't one, or that names a file that is not there, is a ConfigError."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    for text in ("[]", "{}", '{"weight_map": {"a": "gone.safetensors"}}'):
        index.write_text(text)
        with pytest.raises(ConfigError):
            logits(tmp_path / "model")
