"""The header of a safetensors file: what is sound is read in order, what is broken is told by its code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from adapters.header import open_regular, read_header
from adapters.spec import AdapterError
from tests.adapters.files import entry, raw

ONE = {"t": entry([2, 3], 0)}


def read(path: Path, data: bytes, max_bytes: int = 1 << 20) -> object:
    path.write_bytes(data)
    with open_regular(path) as file:
        return read_header(file, max_bytes)


def test_tensors_come_in_the_order_of_their_data(tmp_path: Path) -> None:
    """Offsets count from the start of the file; metadata is not a tensor."""
    header = {"b": entry([4], 24), "a": entry([2, 3], 0), "__metadata__": {"format": "pt"}}

    tensors = read(tmp_path / "f", raw(header, bytes(40)))

    start = len(raw(header))
    assert [(t.name, t.begin - start, t.end - start) for t in tensors] == [("a", 0, 24), ("b", 24, 40)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "weights_empty"),
        (b"abc", "weights_truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n", "weights_lfs_pointer"),
        (b"PK\x03\x04" + bytes(100), "weights_not_safetensors"),
        (b"\x80\x02}q\x00" + bytes(100), "weights_not_safetensors"),
        (b"\x1f\x8b" + bytes(100), "weights_not_safetensors"),
        (bytes(257) + b"ustar" + bytes(250), "weights_not_safetensors"),
        (raw(ONE, bytes(24))[:-1], "weights_truncated"),
        (raw(ONE, bytes(24)) + bytes(100), "weights_trailing_bytes"),
        (raw(ONE, bytes(24), length=2**63 - 1), "weights_truncated"),
        (raw(ONE, bytes(24), length=2**64 - 1), "weights_truncated"),
        (raw(b" " * (2 << 20)), "header_too_large"),
        (raw({}), "weights_empty"),
        (raw({"__metadata__": {"a": "b"}}), "weights_empty"),
        (raw({"__metadata__": {"a": 1}} | ONE, bytes(24)), "weights_invalid"),
        (raw(b"[1, 2]"), "weights_invalid"),
        (raw(b"{\xff}"), "weights_invalid"),
        (raw(b"[" * 100_000), "weights_invalid"),
        (raw(b'{"a":{},"a":{}}'), "weights_invalid"),
        (raw({"a": entry([2], 0), "b": entry([2], 4)}, bytes(12)), "weights_invalid"),  # overlap
        (raw({"a": entry([2], 0), "b": entry([2], 0)}, bytes(8)), "weights_invalid"),  # the same bytes twice
        (raw({"a": entry([2], 0), "b": entry([2], 12)}, bytes(20)), "weights_invalid"),  # gap
        (raw({"a": entry([2], 4)}, bytes(12)), "weights_invalid"),  # gap at the start
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "weights_invalid"),
        (raw({"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}, bytes(8)), "weights_invalid"),
        (raw({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, bytes(8)), "weights_invalid"),
        (raw({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}), "weights_invalid"),
        (raw({"a": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}, bytes(4)), "weights_invalid"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, bytes(8)), "weights_invalid"),
        (raw({"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "weights_invalid"),
        (raw({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "weights_invalid"),
        (raw({"a": entry([2], 0) | {"strides": [1]}}, bytes(8)), "weights_invalid"),
        (raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "weights_invalid"),
        (raw({"a": 3}, bytes(8)), "weights_invalid"),
    ],
)  # fmt: skip
def test_a_broken_file_is_told_by_its_code(tmp_path: Path, data: bytes, code: str) -> None:
    """AL-20: pointers, cut and padded files, giant headers, overlaps and gaps each have one stable code."""
    with pytest.raises(AdapterError) as caught:
        read(tmp_path / "f", data)

    assert caught.value.code == code


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    """AU-05: a link, a directory and a pipe are refused at once; a pipe doesn't hang the reader."""
    secret = tmp_path / "secret"
    secret.write_bytes(raw(ONE, bytes(24)))
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name, code in (
        ("link", "file_invalid"),
        ("pipe", "file_invalid"),
        (".", "file_invalid"),
        ("no", "file_missing"),
    ):
        with pytest.raises(AdapterError) as caught:
            open_regular(tmp_path / name)
        assert caught.value.code == code


@pytest.mark.parametrize("length", [0x0280, 0x8B1F, 0x685A42])
def test_a_length_is_not_taken_for_an_archive(tmp_path: Path, length: int) -> None:
    """Headers whose length begins with the bytes of a pickle, a gzip or a bzip2 file are headers."""
    text = json.dumps(ONE).encode().ljust(length)

    assert len(read(tmp_path / "f", raw(text, bytes(24)), 8 << 20)) == 1  # type: ignore[arg-type]
