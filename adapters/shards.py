"""Adapters whose weights are in several files become one file, as the store keeps it. Uploaders do that; no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from adapters.config import parse_json_object
from adapters.header import Tensor, open_regular, read_header
from adapters.spec import AdapterInvalid, shown
from adapters.storage import WEIGHTS_FILE

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
MAX_SHARDS = 1000
MAX_HEADER_BYTES = MAX_INDEX_BYTES = 4 << 20
_CHUNK_BYTES = 4 << 20


def has_weights(directory: Path) -> bool:
    """There is a weights file, or an index of shards."""
    return (directory / WEIGHTS_FILE).is_file() or (directory / INDEX_FILE).is_file()


@contextmanager
def one_file(directory: Path) -> Iterator[Path]:
    """The path of the weights as one file: the adapter's own, or a temporary one. Raises AdapterInvalid."""
    if (directory / WEIGHTS_FILE).is_file():
        yield directory / WEIGHTS_FILE
        return
    with TemporaryDirectory() as temporary:
        gather(directory, Path(temporary) / WEIGHTS_FILE)
        yield Path(temporary) / WEIGHTS_FILE


def gather(directory: Path, target: Path) -> None:
    """Copies the weights of the adapter in `directory` into the file `target`. Raises AdapterInvalid."""
    if (directory / WEIGHTS_FILE).is_file():
        shutil.copyfile(directory / WEIGHTS_FILE, target)
        return
    if not (directory / INDEX_FILE).is_file():
        raise AdapterInvalid("file_missing", f"{directory} has no {WEIGHTS_FILE}", WEIGHTS_FILE)
    with ExitStack() as stack:
        parts: dict[str, tuple[FileIO, Tensor]] = {}
        places = _places(directory)
        for name in sorted(set(places.values())):
            file = stack.enter_context(open_regular(directory / name))
            for tensor in read_header(file, MAX_HEADER_BYTES):
                if tensor.name in parts:
                    raise AdapterInvalid("tensor_duplicate", f"{shown(tensor.name)} is in two shards", tensor.name)
                parts[tensor.name] = (file, tensor)
        missing = sorted(places.keys() - parts.keys())
        if missing:
            raise AdapterInvalid("tensor_missing", f"no shard holds {shown(missing[0])}", missing[0])
        with target.open("xb") as output:
            _write(parts, output)


def _places(directory: Path) -> dict[str, str]:
    """Name of a tensor → the shard that holds it."""
    with open_regular(directory / INDEX_FILE) as file:
        places = parse_json_object(file.read(MAX_INDEX_BYTES + 1), MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise AdapterInvalid("weights_invalid", f"{INDEX_FILE} holds no weight_map", INDEX_FILE)
    names = set(places.values())
    if not 1 <= len(names) <= MAX_SHARDS or any(Path(name).name != name for name in names):
        raise AdapterInvalid("weights_invalid", f"{INDEX_FILE} names files that can't be shards", INDEX_FILE)
    return places


def _write(parts: dict[str, tuple[FileIO, Tensor]], output: IO[bytes]) -> None:
    header, position = {}, 0
    for name, (_, tensor) in parts.items():
        size = tensor.end - tensor.begin
        header[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, position + size]
        }  # fmt: skip
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    output.write(len(text).to_bytes(8, "little") + text)
    for file, tensor in parts.values():
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            output.write(chunk)
            left -= len(chunk)
