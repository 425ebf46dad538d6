"""Weights in several files are put together before they are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.shards import INDEX_FILE, MAX_INDEX_BYTES, gather, has_weights
from adapters.spec import AdapterError, AdapterInvalid, AdapterTooLarge
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from adapters.validation import validate
from tests.adapters.files import LIMITS, SHAPE, config, pairs


def sharded(directory: Path, num_shards: int = 3) -> dict[str, torch.Tensor]:
    tensors = pairs()
    directory.mkdir()
    places = {name: f"adapter_model-{index % num_shards}.safetensors" for index, name in enumerate(tensors)}
    for shard in set(places.values()):
        part = {name: tensor.bfloat16() for name, tensor in tensors.items() if places[name] == shard}
        save_file(part, directory / shard)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    (directory / CONFIG_FILE).write_text(json.dumps(config()))
    return tensors


def test_shards_become_one_file(tmp_path: Path) -> None:
    """Every tensor arrives bit for bit, in a file that validates."""
    tensors = sharded(tmp_path / "a")
    assert has_weights(tmp_path / "a")

    (tmp_path / "b").mkdir()
    gather(tmp_path / "a", tmp_path / "b" / WEIGHTS_FILE)
    found = load_file(tmp_path / "b" / WEIGHTS_FILE)

    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.bfloat16().tolist() for name, tensor in tensors.items()
    }
    (tmp_path / "b" / CONFIG_FILE).write_text(json.dumps(config()))
    assert len(validate(tmp_path / "b", SHAPE, LIMITS).modules) == 14


@pytest.mark.parametrize("damage", ["gone", "cut", "moved", "outside", "no map", "not json", "nothing"])
def test_broken_shards_are_refused(tmp_path: Path, damage: str) -> None:
    """A missing or cut shard, a tensor that none holds, a path outside: refused, and nothing is written."""
    directory = tmp_path / "a"
    sharded(directory)
    index = json.loads((directory / INDEX_FILE).read_text())
    shard = directory / next(iter(index["weight_map"].values()))
    if damage == "gone":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "moved":
        index["weight_map"]["another.lora_A.weight"] = shard.name
    elif damage == "outside":
        index["weight_map"]["x"] = "../" + shard.name
    elif damage == "no map":
        index = {"weight_map": 3}
    text = "{" if damage == "not json" else json.dumps(index)
    (directory / INDEX_FILE).write_text(text)
    if damage == "nothing":
        (directory / INDEX_FILE).unlink()

    with pytest.raises(AdapterError) as caught:
        gather(directory, tmp_path / "out")

    assert isinstance(caught.value, AdapterInvalid)
    if damage in ("outside", "no map", "not json"):
        assert (caught.value.code, caught.value.param) == ("weights_invalid", INDEX_FILE)
    assert not (tmp_path / "out").exists()


def test_an_index_is_bounded(tmp_path: Path) -> None:
    """Nothing above 4 MiB is parsed; the error names the index."""
    sharded(tmp_path / "a")
    (tmp_path / "a" / INDEX_FILE).write_bytes(b" " * (MAX_INDEX_BYTES + 1))

    with pytest.raises(AdapterTooLarge) as caught:
        gather(tmp_path / "a", tmp_path / "out")

    assert (caught.value.code, caught.value.param) == ("header_too_large", INDEX_FILE)


def test_one_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Nobody could say which one counts."""
    sharded(tmp_path / "a", 2)
    one = tmp_path / "a" / "adapter_model-0.safetensors"
    (tmp_path / "a" / "adapter_model-1.safetensors").write_bytes(one.read_bytes())

    with pytest.raises(AdapterInvalid) as caught:
        gather(tmp_path / "a", tmp_path / "out")

    assert caught.value.code == "tensor_duplicate"
