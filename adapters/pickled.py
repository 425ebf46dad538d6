"""adapter_model.bin, read without unpickling: what PyTorch saved as a zip archive of one pickle and one entry per
storage. Uploaders do that; a server never opens such a file. No torch, no pickle machine.

The pickle is read opcode by opcode by a machine that knows a dictionary of tensors and nothing else: it imports
nothing, calls nothing, and refuses every name that is not on its list. Entries are stored, never compressed, so a
tensor is a range of bytes of the file itself and nothing is unpacked.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from typing import Any, NoReturn

from adapters.header import ITEM_BYTES, Tensor
from adapters.spec import AdapterInvalid, AdapterUnsupported, shown

MAX_PICKLE_BYTES = 4 << 20
MAX_ENTRIES = 100_000
MAX_GROWTH = 4
"""Tensors may share their data (tied weights do); apart they may take so many times the file."""
_CHUNK_BYTES = 4 << 20
_LOCAL_HEADER_BYTES = 30
_DTYPES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_DICT = "collections OrderedDict"


def read_tensors(file: FileIO) -> list[Tensor]:
    """Where each tensor of the dictionary lies in the open file. Raises AdapterInvalid, AdapterUnsupported."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = _entries(archive)
            pickles = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                _bad("it holds no data.pkl, or several")
            if entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
                _bad(f"its data.pkl has more than {MAX_PICKLE_BYTES} bytes")
            found = _Machine(archive.read(pickles[0])).run()
            _check_sums(archive, entries.values())
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, ValueError, struct.error) as error:
        _bad(f"it is no archive of PyTorch's ({shown(str(error))}); load it and save it with safe_serialization=True")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in entries and entries[f"{root}byteorder"].file_size != len("little"):
        _bad("it was saved on a big-endian machine")
    tensors = [_place(file, name, value, entries, root) for name, value in found.items()]
    if not tensors:
        raise AdapterInvalid("weights_empty", "weights: the file holds no tensors")
    if sum(tensor.end - tensor.begin for tensor in tensors) > MAX_GROWTH * os.fstat(file.fileno()).st_size:
        _bad("its tensors share their data so often that they would become a much larger file")
    return tensors


def _bad(problem: str, name: str | None = None) -> NoReturn:
    raise AdapterInvalid("weights_invalid", f"adapter_model.bin: {problem}", name)


def _entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """By name; only what lies in the archive as it is."""
    infos = archive.infolist()
    entries = {info.filename: info for info in infos}
    if len(entries) != len(infos) or len(infos) > MAX_ENTRIES:
        _bad("an entry is there twice, or there are too many")
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            _bad(f"{shown(info.filename)} is compressed or encrypted, which PyTorch never does", info.filename)
    return entries


def _check_sums(archive: zipfile.ZipFile, entries: Iterable[zipfile.ZipInfo]) -> None:
    for info in entries:
        with archive.open(info) as entry:
            while entry.read(_CHUNK_BYTES):
                pass


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True)
class _View:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _place(file: FileIO, name: str, view: Any, entries: Mapping[str, zipfile.ZipInfo], root: str) -> Tensor:
    if not isinstance(view, _View):
        _bad(f"{shown(name)} is not a tensor", name)
    entry = entries.get(f"{root}data/{view.storage.key}")
    if entry is None:
        _bad(f"{shown(name)} has no data", name)
    item = ITEM_BYTES[view.storage.dtype]
    begin, end = (item * count for count in (view.offset, view.offset + prod(view.shape)))
    if end > entry.file_size:
        _bad(f"{shown(name)} is larger than its data", name)
    if not _is_contiguous(view):
        raise AdapterUnsupported(
            "weights_not_safetensors",
            f"adapter_model.bin: {shown(name)} is not contiguous; load it and save it with safe_serialization=True",
            name,
        )
    start = _data_start(file, entry)
    return Tensor(name, view.storage.dtype, view.shape, start + begin, start + end)


def _is_contiguous(view: _View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _data_start(file: FileIO, entry: zipfile.ZipInfo) -> int:
    """Behind the entry's own header, whose last two numbers are the lengths of its name and extra field."""
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return entry.header_offset + _LOCAL_HEADER_BYTES + lengths


@dataclass(frozen=True)
class _Global:
    name: str


_MARK = object()


class _Machine:
    """Runs the few opcodes of which a dictionary of tensors is made. Everything else is refused."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> dict[str, Any]:
        """The dictionary. Raises AdapterInvalid."""
        try:
            for opcode, argument, _ in pickletools.genops(self._data):
                if opcode.name == "STOP":
                    break
                self._step(opcode.name, argument)
            result = self._stack.pop()
        except (IndexError, KeyError, TypeError, ValueError) as error:
            _bad(f"its data.pkl is damaged ({shown(str(error))})")
        if not isinstance(result, dict) or not all(isinstance(name, str) for name in result):
            _bad("it is not a dictionary of tensors by name")
        return result

    def _step(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            self._stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._stack[-1]
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            _bad(f"its data.pkl does more than hold tensors ({name}); nothing of it was executed")

    def _global(self, argument: str) -> None:
        name = argument.split(" ", 1)
        is_storage = name[0] in ("torch", "torch.storage") and name[-1] in _DTYPES
        if not is_storage and argument not in (_TENSOR, _PARAMETER, _DICT):
            _bad(f"its data.pkl asks for {shown(argument)}; nothing of it was executed")
        self._stack.append(_Global(argument))

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._global(f"{module} {name}")

    def _tuple(self, count: int) -> None:
        values = tuple(self._stack[len(self._stack) - count :]) if count else ()
        del self._stack[len(self._stack) - count :]
        self._stack.append(values)

    def _from_mark(self) -> list[Any]:
        at = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError("an entry without a dictionary")
        target.update(zip(values[::2], values[1::2], strict=True))

    def _load_storage(self, _: Any) -> None:
        kind, storage, key, _where, _count = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _Global) or not isinstance(key, str):
            raise TypeError("a reference that is no storage")
        self._stack.append(_Storage(_DTYPES[storage.name.split(" ", 1)[1]], key))

    def _reduce(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Global):
            raise TypeError("a call of what can't be called")
        if function.name == _DICT and arguments == ():
            self._stack.append({})
        elif function.name == _PARAMETER:
            self._stack.append(arguments[0])
        elif function.name == _TENSOR:
            storage, offset, shape, strides = arguments[:4]
            counts = (offset, *shape, *strides)
            if not isinstance(storage, _Storage) or not all(type(n) is int and 0 <= n < 1 << 48 for n in counts):
                raise TypeError("a tensor of impossible size")
            self._stack.append(_View(storage, offset, tuple(shape), tuple(strides)))
        else:
            raise TypeError(f"a call of {function.name}")

    def _build(self, _: Any) -> None:
        self._stack.pop()  # attributes of the dictionary (_metadata), which say nothing about tensors
        if not isinstance(self._stack[-1], dict):
            raise TypeError("attributes of what is no dictionary")


_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "NONE": lambda: None, "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False, "MARK": lambda: _MARK,
}  # fmt: skip
_VALUES = frozenset(
    ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
)
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "BINPERSID": _Machine._load_storage,
    "REDUCE": _Machine._reduce,
    "BUILD": _Machine._build,
    "TUPLE": lambda machine, _: machine._stack.append(tuple(machine._from_mark())),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "SETITEM": lambda machine, _: machine._set([machine._stack.pop(-2), machine._stack.pop()]),
    "SETITEMS": lambda machine, _: machine._set(machine._from_mark()),
}
