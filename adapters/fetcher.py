"""Fetcher: a few threads that read and pack adapters, so that the step loop never touches a disk. Knows no policy."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from adapters.spec import AdapterError, AdapterRef

log = logging.getLogger(__name__)


class HostAdapter(Protocol):
    """An adapter in host memory, packed for the bank."""

    @property
    def size_bytes(self) -> int: ...


class Fetcher:
    """Daemon threads that run `fetch`: a hung one never keeps the process alive.

    done      (digest, host adapter or the exception that fetch raised), in the order of finishing
    arrived   set when something was added to `done`
    """

    def __init__(self, fetch: Callable[[AdapterRef], HostAdapter], num_threads: int) -> None:
        self.done: deque[tuple[str, HostAdapter | Exception]] = deque()
        self.arrived = threading.Event()
        self.num_threads = num_threads
        self._fetch = fetch
        self._todo: queue.SimpleQueue[AdapterRef | None] = queue.SimpleQueue()
        for index in range(num_threads):
            threading.Thread(target=self._run, name=f"adapter-fetch-{index}", daemon=True).start()

    def submit(self, ref: AdapterRef) -> None:
        self._todo.put(ref)

    def close(self) -> None:
        for _ in range(self.num_threads):
            self._todo.put(None)

    def _run(self) -> None:
        while (ref := self._todo.get()) is not None:
            try:
                outcome: HostAdapter | Exception = self._fetch(ref)
            except (AdapterError, OSError) as error:
                outcome = error
            except Exception as error:
                log.exception("loading adapter %s failed", ref.digest)
                outcome = error
            self.done.append((ref.digest, outcome))
            self.arrived.set()
