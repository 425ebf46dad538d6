"""The header of a safetensors file, read by ourselves and bounded before anything is allocated. Knows no LoRA.

Layout (the format's own description): 8 bytes, little-endian, the length of the header; the header, a JSON object
{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {…}}; then the data, to the end of the file.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from adapters.spec import AdapterInvalid, AdapterTooLarge, shown
from adapters.strict_json import parse_object

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MAX_DIMENSIONS = 8
_LFS = b"version https://git-lfs"
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"Rar!")
_TAR, _TAR_AT = b"ustar", 257


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: bytes [begin, end) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def open_regular(path: Path) -> FileIO:
    """Opens a plain file; never a link, a device or a pipe. Raises AdapterInvalid, FileNotFoundError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise AdapterInvalid("file_missing", f"{path.name} is missing") from None
    except OSError as error:
        raise AdapterInvalid("file_invalid", f"{path.name} can't be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterInvalid("file_invalid", f"{path.name} is not a plain file")
    return FileIO(descriptor, "r")


def read_header(file: FileIO, max_header_bytes: int) -> list[Tensor]:
    """The tensors of an open file in the order of their data, which they cover without a gap.

    Raises AdapterInvalid, AdapterTooLarge.
    """
    size = os.fstat(file.fileno()).st_size
    start = _read(file, 8)
    _check_magic(start + _read(file, _TAR_AT), size)
    length = int.from_bytes(start, "little")
    if length > size - 8:
        _bad("weights_truncated", f"the header should have {length} bytes, the file has {size}")
    if length > max_header_bytes:
        raise AdapterTooLarge(
            "header_too_large", f"the header of the weights has {length} bytes, at most {max_header_bytes} are allowed"
        )
    file.seek(8)
    entries = _parse(_read(file, length))
    tensors = [_tensor(name, entry, 8 + length) for name, entry in entries.items()]
    if not tensors:
        _bad("weights_empty", "the file holds no tensors")
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_cover(tensors, 8 + length, size)
    return tensors


def _bad(code: str, problem: str, name: str | None = None) -> NoReturn:
    raise AdapterInvalid(code, f"weights: {problem}", name)


def _read(file: FileIO, count: int) -> bytes:
    parts = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _check_magic(start: bytes, size: int) -> None:
    if start.startswith(_LFS):
        _bad("weights_lfs_pointer", "this is a git-lfs pointer, not the file that it points to (git lfs pull)")
    is_archive = start.startswith((*_PICKLES, *_PACKED)) or start[_TAR_AT:].startswith(_TAR)
    if is_archive and start[8:9] != b"{":  # a header of 640 bytes begins with 80 02, too
        _bad(
            "weights_not_safetensors",
            "a pickle or an archive, which is never opened here; `chorus adapters push` converts adapter_model.bin",
        )
    if size == 0:
        _bad("weights_empty", "the file is empty")
    if size < 10:
        _bad("weights_truncated", f"the file has only {size} bytes")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        header = parse_object(data)
    except ValueError as error:
        _bad("weights_invalid", f"the header {shown(str(error))}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        _bad("weights_invalid", "__metadata__ must hold only strings", "__metadata__")
    return header


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _tensor(name: str, entry: object, data_start: int) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _bad("weights_invalid", f"{shown(name)} must have exactly dtype, shape and data_offsets", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _bad("weights_invalid", f"{shown(name)} has an unknown dtype {shown(str(dtype))}", name)
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        _bad("weights_invalid", f"{shown(name)} has a bad shape", name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        _bad("weights_invalid", f"{shown(name)} has bad data_offsets", name)
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        _bad("weights_invalid", f"the data_offsets of {shown(name)} don't fit its dtype and shape", name)
    return Tensor(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _check_cover(tensors: list[Tensor], data_start: int, size: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.begin != position:
            problem = "overlaps another tensor" if tensor.begin < position else "leaves a gap before it"
            _bad("weights_invalid", f"{shown(tensor.name)} {problem}", tensor.name)
        position = tensor.end
    if position > size:
        _bad("weights_truncated", f"the tensors end at byte {position}, the file has only {size}", tensors[-1].name)
    if position < size:
        _bad("weights_trailing_bytes", f"{size - position} bytes follow the last tensor")
