"""SharingServer: uvicorn as one of several workers on the same listening sockets. Knows no route."""

from __future__ import annotations

import socket

import uvicorn

from gateway.acceptor import Acceptor, Connections, Tally
from gateway.http_guard import GuardedProtocol


class SharingServer(uvicorn.Server):
    """As its base, but that connections are spread evenly over the workers of one tally."""

    def __init__(self, config: uvicorn.Config, tally: Tally) -> None:
        super().__init__(config)
        self._tally = tally
        self._connections = self.server_state.connections = Connections(tally)
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._acceptors = [
            Acceptor(listener, self._protocol, self._tally, self._connections) for listener in sockets or ()
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets=sockets)

    def _protocol(self) -> GuardedProtocol:
        return GuardedProtocol(self.config, self.server_state, self.lifespan.state)
