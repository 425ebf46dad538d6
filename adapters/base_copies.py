"""Copies of the base's own weights that PEFT saves beside an adapter, compared with the base: equal ones are dropped,
others would change what is computed and are refused. numpy, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from io import FileIO
from pathlib import Path

import numpy as np

from adapters.header import Tensor, open_regular, read_header
from adapters.numbers import STORED, cast
from adapters.spec import AdapterError, AdapterInvalid, AdapterUnsupported, BaseShape, shown
from adapters.values import read_into

MAX_HEADER_BYTES = 64 << 20
_CHUNK_ROWS_BYTES = 4 << 20
_FILE = "model.safetensors"
_NAMES = {"embed_tokens": ("model.embed_tokens.weight",), "lm_head": ("lm_head.weight", "model.embed_tokens.weight")}
"""Where a base keeps them; a head that is tied to the embedding has no tensor of its own."""


def check_copies(file: FileIO, copies: Iterable[tuple[Tensor, str]], shape: BaseShape) -> None:
    """Raises AdapterUnsupported for a copy that does not begin as the base's (rounded to the copy's dtype)."""
    for copy, module in copies:
        try:
            base_file, base = _find(Path(shape.weights_dir), module, shape)
        except (AdapterError, OSError, ValueError, KeyError, TypeError):
            raise AdapterUnsupported(
                "base_unknown",
                f"{shown(copy.name)} can't be compared with the base's own weights; save without it "
                "(save_embedding_layers=False)",
                copy.name,
            ) from None
        with closing(base_file):
            if not _is_equal(file, copy, base_file, base):
                raise AdapterUnsupported(
                    "base_changed",
                    f"{shown(copy.name)} is not what this base has: the adapter was trained on other weights",
                    copy.name,
                )


def check_twins(file: FileIO, twins: Iterable[tuple[Tensor, Tensor]]) -> None:
    """PEFT saves some tables twice. Raises AdapterInvalid where the two differ."""
    for first, second in twins:
        if first.dtype != second.dtype or not _is_equal(file, first, file, second):
            raise AdapterInvalid(
                "tensor_duplicate", f"{shown(first.name)} and {shown(second.name)} are of the same module and differ",
                first.name,
            )  # fmt: skip


def _find(directory: Path, module: str, shape: BaseShape) -> tuple[FileIO, Tensor]:
    """The base's tensor and the open file that holds it."""
    if not shape.weights_dir:
        raise KeyError(module)
    index = directory / f"{_FILE}.index.json"
    shards = json.loads(index.read_text())["weight_map"] if index.is_file() else None
    for name in _NAMES[module][: 1 if module == "lm_head" and not shape.tie_word_embeddings else None]:
        if shards is not None and name not in shards:
            continue
        file = open_regular((directory / (_FILE if shards is None else shards[name])).resolve())
        for tensor in read_header(file, MAX_HEADER_BYTES):
            if tensor.name == name and tensor.dtype in STORED:
                return file, tensor
        file.close()
    raise KeyError(module)


def _is_equal(file: FileIO, copy: Tensor, base_file: FileIO, base: Tensor) -> bool:
    if copy.shape[0] < base.shape[0] or copy.shape[1:] != base.shape[1:]:
        return False
    kinds = STORED[copy.dtype], STORED[base.dtype]
    count = int(np.prod(base.shape))  # what follows in the copy are rows of new tokens
    step = _CHUNK_ROWS_BYTES // 4
    for first in range(0, count, step):
        size = min(step, count - first)
        ours, theirs = (np.empty(size * kind.itemsize, np.uint8) for kind in kinds)
        for source, tensor, kind, chunk in ((file, copy, kinds[0], ours), (base_file, base, kinds[1], theirs)):
            source.seek(tensor.begin + first * kind.itemsize)
            read_into(source, chunk.data, tensor)
        with np.errstate(over="ignore"):  # into fp16: what overflows is infinite, and differs
            rounded = cast(theirs.view(kinds[1]), base.dtype, copy.dtype, 1.0)
        if not np.array_equal(ours.view(kinds[0]), rounded):
            return False
    return True
