"""Fetcher: threads that read and pack adapters, so that the step loop never touches a disk. Tries storage errors again,
remembers bad content. Knows no memory and no policy.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from adapters.spec import AdapterError, AdapterMissing, AdapterRef

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
FIRST_RETRY_S = 0.1
"""Storage errors are tried again after 0.1, 0.2, 0.4, … s; five waits make 3.1 s."""
BAD_CONTENT_S = 60.0
"""Content never changes under its digest: damaged files are not read again for so long."""
MISSING_S = 1.0
"""A digest that the store lacks may still be on its way to it."""
CLOSE_S = 2.0
"""A load that is under way may end before the process does."""
MAX_FAILURES = 1024
"""So many known failures are remembered."""


class HostAdapter(Protocol):
    """An adapter in host memory, packed for the bank."""

    @property
    def size_bytes(self) -> int: ...


Outcome = HostAdapter | Exception


class Fetcher:
    """fetch: reads and packs one adapter, in a thread. AdapterError = bad content, OSError = worth trying again.

    One thread submits and polls; a fetch that hangs never keeps the process alive.
    """

    def __init__(self, fetch: Callable[[AdapterRef], HostAdapter], num_threads: int) -> None:
        self.num_loading = 0  # submitted and not yet returned by poll
        self.busy_s = 0.0
        self._num_free = num_threads
        self._fetch = fetch
        self._todo: queue.SimpleQueue[AdapterRef | None] = queue.SimpleQueue()
        self._done: deque[tuple[AdapterRef, Outcome, float]] = deque()
        self._arrived = threading.Event()
        self._attempts: dict[str, int] = {}
        self._retries: list[tuple[float, str, AdapterRef]] = []
        self._failures: OrderedDict[str, tuple[AdapterError, float]] = OrderedDict()  # with the time of forgetting
        names = [f"adapter-fetch-{index}" for index in range(num_threads)]
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    @property
    def is_free(self) -> bool:
        """A thread has nothing to do."""
        return self._num_free > 0

    def failure(self, digest: str, now: float) -> AdapterError | None:
        """What is known to be wrong with it."""
        error, until = self._failures.get(digest, (None, 0.0))
        return error if now < until else None

    def failures(self, now: float) -> list[str]:
        return [digest for digest, (_, until) in self._failures.items() if now < until]

    def submit(self, ref: AdapterRef) -> None:
        """Loads it; not to be called again for it before `poll` has returned it."""
        self.num_loading += 1
        self._put(ref)

    def poll(self, now: float) -> list[tuple[str, Outcome]]:
        """What has ended since the last time, well or for good."""
        self._arrived.clear()
        while self._retries and self._retries[0][0] <= now:
            self._put(heapq.heappop(self._retries)[2])
        ended = []
        while self._done:
            ref, outcome, seconds = self._done.popleft()
            self.busy_s += seconds
            self._num_free += 1
            if isinstance(outcome, OSError) and self._try_again(ref, now):
                continue
            self._attempts.pop(ref.digest, None)
            self.num_loading -= 1
            if isinstance(outcome, AdapterError):
                self.remember(ref.digest, outcome, now)
            ended.append((ref.digest, outcome))
        return ended

    def remember(self, digest: str, error: AdapterError, now: float) -> None:
        """It need not be tried again for a while."""
        self._failures[digest] = (error, now + (MISSING_S if isinstance(error, AdapterMissing) else BAD_CONTENT_S))
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def forgive(self, digest: str) -> None:
        """Its files may have been mended."""
        self._failures.pop(digest, None)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a fetch has ended (True) or the time is over."""
        return self._arrived.wait(timeout_s)

    def close(self) -> None:
        """Ends the threads, and waits for them a little: an interpreter that ends while one of them is inside torch
        aborts the process."""
        for _ in self._threads:
            self._todo.put(None)
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _put(self, ref: AdapterRef) -> None:
        self._num_free -= 1
        self._todo.put(ref)

    def _try_again(self, ref: AdapterRef, now: float) -> bool:
        attempts = self._attempts[ref.digest] = self._attempts.get(ref.digest, 0) + 1
        if attempts == MAX_ATTEMPTS:
            return False
        heapq.heappush(self._retries, (now + FIRST_RETRY_S * 2 ** (attempts - 1), ref.digest, ref))
        return True

    def _run(self) -> None:
        while (ref := self._todo.get()) is not None:
            self._load(ref)

    def _load(self, ref: AdapterRef) -> None:
        start = time.perf_counter()
        try:
            outcome: Outcome = self._fetch(ref)
        except AdapterError as error:
            outcome = error
        except OSError as error:
            log.warning("reading adapter %s failed: %s", ref.digest, error)
            outcome = error
        except Exception as error:
            log.exception("loading adapter %s failed", ref.digest)
            outcome = error
        self._done.append((ref, outcome, time.perf_counter() - start))
        self._arrived.set()
