"""Connections, spread evenly over the workers that accept on one listening socket. Knows no HTTP.

The kernel wakes all of them, and who is first gets the connection: on an idle machine nearly always the same one, which
then has nearly all of the work as long as its clients keep their connections. So whoever has more than another one
leaves a new connection to the others for a moment, and takes it only if nobody did: a worker that hangs costs that
moment, not the connection.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from typing import Any

log = logging.getLogger("chorus.gateway")

BACKLOG = 2048
WAIT_S = 0.002
"""So long a new connection is left to those who have fewer."""
AT_ONCE = 8
"""Accepted in one turn of the event loop by whoever nobody else came before."""
EXHAUSTED_S = 1.0
"""Pause when there are no more file descriptors, or no memory."""
_NOBODY = 2**32 - 1


class Tally:
    """How many connections each worker has, in memory that all of them share."""

    def __init__(self, fd: int, number: int) -> None:
        """number: of this worker, from 0."""
        self._counts = memoryview(mmap.mmap(fd, 0)).cast("I")
        self._number = number
        self._counts[number] = 0
        self._has_left = False

    @staticmethod
    def share(num_workers: int) -> int:
        """The descriptor of such memory, for children to inherit."""
        with tempfile.TemporaryFile() as file:
            file.truncate(num_workers * struct.calcsize("I"))
            return os.dup(file.fileno())

    @property
    def is_ahead(self) -> bool:
        """Has this worker more than another one?"""
        return min(self._counts) < self._counts[self._number]

    def tell(self, count: int) -> None:
        """This worker's count."""
        self._counts[self._number] = _NOBODY if self._has_left else count

    def leave(self) -> None:
        """This worker takes no more."""
        self._has_left = True
        self.tell(_NOBODY)


class Connections(set[Any]):
    """Those of this worker: how many they are is told to `tally`."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally
        self._num_beginning = 0

    def add(self, connection: object) -> None:
        super().add(connection)
        self._tell()

    def discard(self, connection: object) -> None:
        super().discard(connection)
        self._tell()

    def begin(self, change: int) -> None:
        """So many more are accepted, but not here yet."""
        self._num_beginning += change
        self._tell()

    def _tell(self) -> None:
        self._tally.tell(len(self) + self._num_beginning)


class Acceptor:
    """Accepts on one listening socket until close(). The protocols put themselves into `connections`."""

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], tally: Tally, connections: Connections
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._tally = tally
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._resting: asyncio.TimerHandle | None = None
        self._beginning: set[asyncio.Task[object]] = set()
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        self._tally.leave()
        self._loop.remove_reader(self._listener.fileno())
        if self._resting is not None:
            self._resting.cancel()

    def _listen(self) -> None:
        self._resting = None
        self._loop.add_reader(self._listener.fileno(), self._knock)

    def _rest(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._resting = self._loop.call_later(seconds, then)

    def _knock(self) -> None:
        """Somebody is at the door."""
        if self._tally.is_ahead:
            self._rest(WAIT_S, self._waited)
        else:
            self._accept(1)

    def _waited(self) -> None:
        self._listen()
        self._accept(AT_ONCE)

    def _accept(self, num_most: int) -> None:
        for _ in range(num_most):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # another worker came first
                return
            except OSError as error:
                log.warning("no connection can be accepted: %s", error)
                return self._rest(EXHAUSTED_S, self._listen)
            connection.setblocking(False)
            self._connections.begin(1)
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, connection))
            self._beginning.add(task)
            task.add_done_callback(self._begun)

    def _begun(self, task: asyncio.Task[object]) -> None:
        self._beginning.discard(task)
        self._connections.begin(-1)
        if not task.cancelled():
            task.exception()  # the client has gone again
