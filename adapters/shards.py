"""Adapters whose weights are in several files, or in a pickle, become one file, as the store keeps it. No torch.

gather(directory, target)    a directory as PEFT writes it, where the index names the shards
join(stage)                  an upload, where the n-th part of weights lies in stage_file(n): no name of the client
                             is a path, and the index only tells which tensors there must be
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from io import FileIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO

from adapters.header import Tensor, open_regular, read_header
from adapters.pickled import read_tensors
from adapters.spec import AdapterInvalid, AdapterTooLarge, shown
from adapters.storage import WEIGHTS_FILE
from adapters.strict_json import parse_object

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
PICKLE_FILE = "adapter_model.bin"
MAX_SHARDS = 1000
MAX_HEADER_BYTES = MAX_INDEX_BYTES = 4 << 20
_CHUNK_BYTES = 4 << 20


def has_weights(directory: Path) -> bool:
    """There is a weights file, an index of shards, or a pickle."""
    return any((directory / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE, PICKLE_FILE))


def gather(directory: Path, target: Path, on_client: bool = False) -> None:
    """Copies the weights of the adapter in `directory` into the file `target`. `on_client`: the directory belongs to
    the caller, so links in it are followed, and adapter_model.bin is converted where there is nothing better. A server
    does neither. Raises AdapterInvalid, AdapterTooLarge, AdapterUnsupported."""
    if (directory / WEIGHTS_FILE).is_file():
        with _open(directory / WEIGHTS_FILE, on_client) as source, target.open("xb") as output:
            shutil.copyfileobj(source, output, _CHUNK_BYTES)
    elif (directory / INDEX_FILE).is_file():
        places = _places(directory, on_client)
        if any(Path(name).name != name for name in places.values()):
            raise AdapterInvalid("weights_invalid", f"{INDEX_FILE} names files that can't be shards", INDEX_FILE)
        shards = [directory / name for name in sorted(set(places.values()))]
        _combine([shard.resolve() for shard in shards] if on_client else shards, places.keys(), target)
    elif on_client and (directory / PICKLE_FILE).is_file():
        with _open(directory / PICKLE_FILE, on_client) as file:
            tensors = read_tensors(file)
            with target.open("xb") as output:
                output.write(_header(tensors))
                for tensor in tensors:
                    _copy(file, tensor, output)
    else:
        raise AdapterInvalid("file_missing", f"{directory} has no {WEIGHTS_FILE}", WEIGHTS_FILE)


def _open(path: Path, follow_links: bool) -> FileIO:
    return open_regular(path.resolve() if follow_links else path)


def stage_file(number: int) -> str:
    """What the `number`-th part of uploaded weights is called in its stage, counted from 0."""
    return WEIGHTS_FILE if number == 0 else f"shard-{number}.safetensors"


def is_sharded(stage: Path) -> bool:
    """What lies there is to be joined."""
    return (stage / INDEX_FILE).is_file()


def join(stage: Path) -> None:
    """The shards in `stage` become its one weights file; nothing else of them stays. Raises as gather()."""
    count = next(number for number in range(MAX_SHARDS + 1) if not (stage / stage_file(number)).exists())
    shards = [stage / stage_file(number) for number in range(count)]
    _combine(shards, _places(stage).keys(), stage / "joined.safetensors")
    for leftover in (*shards, stage / INDEX_FILE):
        leftover.unlink()
    (stage / "joined.safetensors").rename(stage / WEIGHTS_FILE)


def _places(directory: Path, follow_links: bool = False) -> dict[str, str]:
    """Name of a tensor → the shard that holds it."""
    with _open(directory / INDEX_FILE, follow_links) as file:
        data = file.read(MAX_INDEX_BYTES + 1)
    if len(data) > MAX_INDEX_BYTES:
        raise AdapterTooLarge("header_too_large", f"{INDEX_FILE} has more than {MAX_INDEX_BYTES} bytes", INDEX_FILE)
    try:
        places = parse_object(data).get("weight_map")
    except ValueError as error:
        raise AdapterInvalid("weights_invalid", f"{INDEX_FILE} {shown(str(error))}", INDEX_FILE) from None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise AdapterInvalid("weights_invalid", f"{INDEX_FILE} holds no weight_map", INDEX_FILE)
    if not 1 <= len(set(places.values())) <= MAX_SHARDS:
        raise AdapterInvalid("weights_invalid", f"{INDEX_FILE} names no shards, or too many", INDEX_FILE)
    return places


def _combine(shards: Sequence[Path], places: AbstractSet[str], target: Path) -> None:
    """Writes the tensors of all shards, which must be those of `places`, into one new file."""
    parts: dict[str, tuple[Path, Tensor]] = {}
    for shard in shards:
        with open_regular(shard) as file:
            for tensor in read_header(file, MAX_HEADER_BYTES):
                if tensor.name in parts:
                    raise AdapterInvalid("tensor_duplicate", f"{shown(tensor.name)} is in two shards", tensor.name)
                parts[tensor.name] = (shard, tensor)
    missing = sorted(places - parts.keys())
    if missing:
        raise AdapterInvalid("tensor_missing", f"no shard holds {shown(missing[0])}", missing[0])
    with target.open("xb") as output:
        output.write(_header([tensor for _, tensor in parts.values()]))
        for shard, of_shard in groupby(parts.values(), key=itemgetter(0)):
            with open_regular(shard) as file:
                for _, tensor in of_shard:
                    _copy(file, tensor, output)


def _header(tensors: Iterable[Tensor]) -> bytes:
    """The start of a file that holds these tensors one after another."""
    entries, position = {}, 0
    for tensor in tensors:
        size = tensor.end - tensor.begin
        entries[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, position + size]
        }  # fmt: skip
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _copy(file: FileIO, tensor: Tensor, output: IO[bytes]) -> None:
    file.seek(tensor.begin)
    left = tensor.end - tensor.begin
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        output.write(chunk)
        left -= len(chunk)
