"""What is fuzzed: every parser that reads a stranger's bytes in our own code. Each takes any bytes and must end in a
result that holds what it promises, or in an AdapterError with a code and an ASCII message; in nothing else."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from itertools import pairwise

from adapters.config import MAX_CONFIG_BYTES, canonical, parse_config
from adapters.header import Tensor, read_header
from adapters.names import collect
from adapters.new_tokens import TOKENS_FILE
from adapters.pickled import MAX_GROWTH, read_tensors
from adapters.spec import LINEARS, AdapterError
from adapters.targets import Targets
from gateway.companions import DEFAULTS_FILE, GENERATION_FILE, parse_companions

MAX_HEADER = 1 << 16
VOCAB_SIZE = 100


def header(data: bytes) -> None:
    """The first byte chooses whether the length before the header is ours (and right) or the stranger's."""
    body = data[1:]
    if data[:1] > b"\x40":
        end = body.rfind(b"}") + 1 or len(body)
        body = end.to_bytes(8, "little") + body
    with _file(body) as file:
        tensors = read_header(file, MAX_HEADER)
        _covers(tensors, len(body))
        assert all(found.parts for found in collect(tensors))


def config(data: bytes) -> None:
    """What is accepted is stored in one spelling, read again with the same meaning, and asked about every module."""
    found = parse_config(data)
    stored = canonical(data)
    assert len(stored) <= MAX_CONFIG_BYTES
    assert canonical(stored) == stored
    assert parse_config(stored) == found
    targets = Targets(found)
    for name in LINEARS:
        key = f"model.layers.0.self_attn.{name}"
        targets.covers(key, 0)
        assert (targets.rank(key) or 1) > 0
        assert targets.alpha(key) > 0


def pickled(data: bytes) -> None:
    """The first byte chooses whether this is the whole archive, or the pickle in a sound one."""
    body = data[1:]
    if data[:1] > b"\x40":
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as writer:
            writer.writestr("archive/data.pkl", body)
            writer.writestr("archive/data/0", bytes(64))
        body = archive.getvalue()
    with _file(body) as file:
        tensors = read_tensors(file)
    assert sum(tensor.end - tensor.begin for tensor in tensors) <= MAX_GROWTH * len(body)
    assert all(0 <= tensor.begin <= tensor.end <= len(body) for tensor in tensors)


def companions(data: bytes) -> None:
    """The first byte chooses the file."""
    if data:
        names = (DEFAULTS_FILE, GENERATION_FILE, TOKENS_FILE)
        parse_companions({names[data[0] % len(names)]: data[1:]}, VOCAB_SIZE)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "header": header,
    "config": config,
    "pickled": pickled,
    "companions": companions,
}


def run(target: str, data: bytes) -> None:
    """Anything but a result or an AdapterError is a finding."""
    try:
        TARGETS[target](data)
    except AdapterError as error:
        found = error
    else:
        return
    assert found.code
    assert found.message.isascii()
    assert found.param is None or found.param.isascii()


def _covers(tensors: list[Tensor], size: int) -> None:
    assert tensors
    assert tensors[-1].end == size
    assert all(first.end == second.begin for first, second in pairwise(tensors))


def _file(data: bytes) -> io.FileIO:
    file = io.FileIO(os.memfd_create("fuzz"), "r+")
    file.write(data)
    file.seek(0)
    return file
