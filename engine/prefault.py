"""Prefault: has the system back memory with pages before anybody writes to it, in a thread of its own while something
else is prepared. Knows not what the memory is for.

A page that is first written in a step is fetched in that step: 2 to 8 µs for 4 KiB on a virtual machine, and 3 ms where
pages are huge, for each layer whose keys or values begin a new one.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor

PIECE_BYTES = 2 << 20
LIMIT_BYTES = 1 << 30
"""What lies behind is first written in a step: a plan may give KV what nobody ever uses."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14: as writing to every page, without changing it


class Prefault:
    """Backs the tensors side by side, each from its beginning, `limit_bytes` of them all, while a `with` block runs: it
    waits at its end, and gives up when it fails. Where the system can't do it, not at all.

    Not to be left running beside steps: the thread holds the lock of the address space, for which whoever maps memory
    has to wait, and behind them whoever meets a new page.
    """

    def __init__(self, tensors: Sequence[Tensor], limit_bytes: int = LIMIT_BYTES) -> None:
        self._tensors = tensors
        self._limit_bytes = limit_bytes
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_given_up = kind is not None
        self._thread.join()

    def _run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for start, size in self._pieces():
            if self._is_given_up or libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return

    def _pieces(self) -> Iterator[tuple[int, int]]:
        page = os.sysconf("SC_PAGE_SIZE")
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in self._tensors]
        places = [-(-tensor.data_ptr() // page) * page for tensor in self._tensors]
        left = self._limit_bytes
        while left > 0 and any(place + page <= end for place, end in zip(places, ends, strict=True)):
            for index, end in enumerate(ends):
                size = min(PIECE_BYTES, (end - places[index]) // page * page)
                if size > 0:
                    yield places[index], size
                    places[index] += size
                    left -= size
