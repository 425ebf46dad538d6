"""adapter_model.bin on the client: the same numbers as PyTorch reads, and nothing of it is ever executed."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from adapters.header import open_regular
from adapters.pickled import read_tensors
from adapters.shards import PICKLE_FILE, gather
from adapters.spec import AdapterError
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from adapters.validation import validate
from tests.adapters.files import LIMITS, SHAPE, config, pairs, write


def saved(directory: Path, value: Any, **options: Any) -> Path:
    directory.mkdir(exist_ok=True)
    torch.save(value, directory / PICKLE_FILE, **options)
    (directory / CONFIG_FILE).write_text(json.dumps(config()))
    return directory


def converted(directory: Path) -> dict[str, torch.Tensor]:
    target = directory / "converted.safetensors"
    gather(directory, target, on_client=True)
    return load_file(target)


def refusal(directory: Path) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        gather(directory, directory / "converted.safetensors", on_client=True)
    assert not (directory / "converted.safetensors").exists()
    return caught.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrap", [dict, OrderedDict])
def test_the_numbers_are_pytorchs(tmp_path: Path, dtype: torch.dtype, wrap: Callable[..., Any]) -> None:
    """Bit for bit what torch.load gives, for every dtype, and the adapter then passes the door."""
    tensors = {name: tensor.to(dtype) for name, tensor in pairs().items()}

    found = converted(saved(tmp_path, wrap(tensors)))

    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    os.replace(tmp_path / "converted.safetensors", tmp_path / WEIGHTS_FILE)
    assert len(validate(tmp_path, SHAPE, LIMITS).modules) == 14


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_views_parameters_and_state_dicts(tmp_path: Path, protocol: int) -> None:
    """Slices of one storage, parameters, and a module's state dict with its metadata."""
    flat = torch.arange(24, dtype=torch.float32)
    module = torch.nn.Linear(3, 2)
    state = module.state_dict()
    state["view"] = flat[4:10].view(2, 3)
    state["scalar"] = flat[3]
    state["parameter"] = torch.nn.Parameter(torch.ones(2))

    found = converted(saved(tmp_path, state, pickle_protocol=protocol))

    assert all(torch.equal(found[name], value.detach()) for name, value in state.items())


def test_safetensors_win(tmp_path: Path) -> None:
    """AL-21: where both formats lie side by side, the pickle isn't even opened."""
    write(tmp_path, pairs(), config())
    (tmp_path / PICKLE_FILE).write_bytes(b"no archive at all")

    assert len(converted(tmp_path)) == 28


def test_a_server_never_converts(tmp_path: Path) -> None:
    """Without `on_client` a directory with nothing but a pickle has no weights."""
    with pytest.raises(AdapterError) as caught:
        gather(saved(tmp_path, pairs()), tmp_path / "out")

    assert caught.value.code == "file_missing"


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def _archive(path: Path, data: bytes, **others: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for name, content in others.items():
            archive.writestr(f"archive/data/{name}", content)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_nothing_is_executed(tmp_path: Path, protocol: int) -> None:
    """AL-21: a pickle that would run a command is refused by the name of what it asks for; the canary never appears."""
    canary = tmp_path / "canary"
    directory = saved(tmp_path / "a", {})
    for value in (_Touch(canary), {"a": _Touch(canary)}, {"a": torch.ones(2), "b": _Touch(canary)}):
        _archive(directory / PICKLE_FILE, pickle.dumps(value, protocol))
        assert "nothing of it was executed" in refusal(directory).message
    torch.save({"a": _Touch(canary)}, directory / PICKLE_FILE)
    assert "nothing of it was executed" in refusal(directory).message

    assert not canary.exists()


def test_archives_that_lie_are_refused(tmp_path: Path) -> None:
    """AU-06: compressed entries (bombs), entries that are there twice, cut files, old formats, no archive at all."""
    directory = saved(tmp_path / "a", pairs())
    whole = (directory / PICKLE_FILE).read_bytes()
    with zipfile.ZipFile(directory / PICKLE_FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(50 << 20))
    assert "compressed" in refusal(directory).message
    with zipfile.ZipFile(directory / PICKLE_FILE, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", pickle.dumps({}))
    assert "twice" in refusal(directory).message
    torch.save(pairs(), directory / PICKLE_FILE, _use_new_zipfile_serialization=False)
    assert "safe_serialization" in refusal(directory).message
    for data in (whole[:-100], whole[100:], b"", b"PK\x03\x04", bytes(1000)):
        (directory / PICKLE_FILE).write_bytes(data)
        assert refusal(directory).code in ("weights_invalid", "weights_not_safetensors")


def test_tensors_stay_inside_their_data(tmp_path: Path) -> None:
    """A tensor that is larger than its storage, one that is spread out, one that many names share."""
    directory = saved(tmp_path, {"a": torch.ones(4)})
    with zipfile.ZipFile(directory / PICKLE_FILE) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    _archive(directory / PICKLE_FILE, data, **{"0": b"1234"})
    assert "larger than its data" in refusal(directory).message

    saved(tmp_path, {"a": torch.ones(4, 6).t()})
    assert "not contiguous" in refusal(directory).message
    shared = torch.ones(1 << 16)
    saved(tmp_path, {str(index): shared for index in range(100)})
    assert "share their data" in refusal(directory).message


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(position=st.integers(0, 1 << 20), value=st.integers(1, 255), data=st.binary(max_size=60))
def test_damaged_files(tmp_path: Path, position: int, value: int, data: bytes) -> None:
    """A sound file with one byte changed, and any bytes as the pickle: an error, or tensors inside the file."""
    path = tmp_path / PICKLE_FILE
    if not path.exists():
        torch.save({"a.weight": torch.ones(4, 3), "b": torch.zeros(2)}, path)
    damaged = bytearray(path.read_bytes())
    damaged[position % len(damaged)] ^= value
    (tmp_path / "damaged").write_bytes(damaged)
    _archive(tmp_path / "any", data)

    for name in ("damaged", "any"):
        with open_regular(tmp_path / name) as file:
            try:
                found = read_tensors(file)
            except AdapterError:
                continue
        assert all(0 <= tensor.begin <= tensor.end <= len(damaged) for tensor in found)
