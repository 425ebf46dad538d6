"""Prefault makes memory real ahead of its use, and changes nothing in it."""

from __future__ import annotations

import mmap
import os
import resource

import pytest
import torch

from engine.prefault import Prefault

SIZE = 8 << 20
FEW = 32
"""Faults of other causes: code that runs for the first time."""
pytestmark = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="needs a kernel with MADV_POPULATE_WRITE"
)


def untouched(count: int) -> list[torch.Tensor]:
    """Of memory that the system has given to nobody yet."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return [torch.frombuffer(mmap.mmap(-1, SIZE, flags=flags), dtype=torch.uint8) for _ in range(count)]


def faults_of_writing(tensor: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    tensor[::4096] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_what_was_prefaulted_is_written_without_a_fault() -> None:
    """Else a page is fetched in the middle of a step."""
    ready, other, first = untouched(3)
    faults_of_writing(first)  # what has never run may fault itself

    with Prefault([ready]):
        pass

    assert faults_of_writing(ready) < FEW
    assert faults_of_writing(other) > 10 * FEW


def test_tensors_are_prefaulted_side_by_side_up_to_the_limit() -> None:
    """Each from its beginning, where the first blocks lie."""
    tensors = untouched(2)

    with Prefault(tensors, limit_bytes=SIZE):
        pass

    for tensor in tensors:
        assert faults_of_writing(tensor[: SIZE // 2]) < FEW
        assert faults_of_writing(tensor[SIZE // 2 :]) > 10 * FEW


def test_what_is_written_meanwhile_stays() -> None:
    tensors = untouched(4)
    for tensor in tensors:
        tensor[::1000] = 7

    with Prefault(tensors):
        for tensor in tensors:
            tensor[1::1000] = 9

    for tensor in tensors:
        assert (tensor[::1000] == 7).all()
        assert (tensor[1::1000] == 9).all()
        assert int(tensor.sum(dtype=torch.int64)) == 7 * len(tensor[::1000]) + 9 * len(tensor[1::1000])


def test_a_fault_of_what_it_runs_beside_ends_it_early() -> None:
    """A start that fails does not first take all its memory."""
    tensors = untouched(64)

    with pytest.raises(ZeroDivisionError), Prefault(tensors):
        raise ZeroDivisionError

    assert faults_of_writing(tensors[-1]) > 10 * FEW
