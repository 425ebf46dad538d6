"""Egress: the one way out for the client that reads a watched source. The client (obstore's, in Rust) follows
redirects and looks names up by itself, and has no place to ask us; so it is given an HTTP proxy, this one, on a port of
this machine. Every connection, those of redirects included, is looked up, checked and opened here: the address that was
checked is the one that is connected to, whatever the name means a moment later.

https goes through a tunnel (CONNECT); of http, one request is passed on per connection. Whoever else is on this machine
gains nothing by it: it goes nowhere that they can't go themselves.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

PIECE = 1 << 20
"""Bytes that are passed on at a time."""
MAX_HEAD = 64 << 10
HEAD_S = 10.0
CONNECT_S = 5.0
_HOP_HEADERS = (b"proxy-", b"connection:", b"keep-alive:")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL6 = ipaddress.ip_network("2000::/3")
_PORTS = {"http": 80, "https": 443}

Place = tuple[str, int]
"""Host and port."""


class Refused(OSError):
    """A connection that may not be."""


class Egress:
    """`with Egress(home) as url:` url is a proxy's, for one client; it ends with the block. Connections go to addresses
    of the public internet, and to `home` (with the names below it, on its port) wherever that is."""

    def __init__(self, home: Place | None = None) -> None:
        self.refused: str | None = None  # the last one, in words
        self._home = home
        self._started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, name="source-egress", daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._started.result()}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(CONNECT_S)  # longer only where a name is still being looked up

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)  # who waits for the port must learn of it

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, limit=MAX_HEAD)
        self._started.set_result(server.sockets[0].getsockname()[1])
        await self._ended.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._pass_on(reader, writer)
        except Refused as error:
            self.refused = str(error)
            await _say(writer, b"403 Forbidden", str(error).encode())
        except (OSError, TimeoutError) as error:
            await _say(writer, b"502 Bad Gateway", str(error).encode())
        except (ValueError, EOFError, asyncio.LimitOverrunError):
            await _say(writer, b"400 Bad Request", b"")
        except asyncio.CancelledError:
            pass  # the end; Python 3.11's streams would log it
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
        request, *headers = head[:-4].split(b"\r\n")
        method, target, _ = request.split(b" ")
        is_tunnel = method == b"CONNECT"
        if not is_tunnel and method not in (b"GET", b"HEAD"):  # sources are only read
            raise ValueError(method)
        far_reader, far_writer = await self._connect(*place_of(("//" if is_tunnel else "") + target.decode()))
        if is_tunnel:
            writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            there = _pump(reader, far_writer)
        else:
            far_writer.write(_origin_request(method, target, headers))
            there = _silence(reader)
        try:
            await _first_of(there, _pump(far_reader, writer))
        finally:
            far_writer.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the addresses of the host in turn, if all of them may be. Raises Refused, OSError."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        if not self._is_home(host, port) and not all(map(is_public, addresses)):
            raise Refused(f"{host} is a private address; private_sources allows that of the endpoint")
        fault: Exception = OSError(f"{host} has no address")
        for address in addresses:
            try:
                return await asyncio.wait_for(asyncio.open_connection(address, port, limit=PIECE), CONNECT_S)
            except (OSError, TimeoutError) as error:
                fault = error
        raise fault

    def _is_home(self, host: str, port: int) -> bool:
        if self._home is None or port != self._home[1]:
            return False
        home = self._home[0].lower()
        return host == home or host.endswith(f".{home}")


def is_public(address: str) -> bool:
    """An address of the public internet; one that stands for another (mapped, 6to4, NAT64, Teredo) is what it stands
    for."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        nat64 = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else None
        inner = nat64 or found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner is None:
            return found in _GLOBAL6 and found.is_global
        found = inner
    return found.is_global and not found.is_multicast


def place_of(url: str) -> Place:
    """Host and port of a URL. Raises ValueError."""
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme)
    if not parts.hostname or not port:
        raise ValueError(url)
    return parts.hostname, port


def _origin_request(method: bytes, target: bytes, headers: list[bytes]) -> bytes:
    """As the server itself is asked; the connection ends with the answer, so that what comes next is checked too."""
    parts = urlsplit(target)
    path = parts._replace(scheme=b"", netloc=b"").geturl() or b"/"
    kept = [header for header in headers if not header.lower().startswith(_HOP_HEADERS)]
    return b"\r\n".join([b"%b %b HTTP/1.1" % (method, path), *kept, b"Connection: close", b"", b""])


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Until one of them ends."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()


async def _silence(reader: asyncio.StreamReader) -> None:
    """Until the client goes, or asks again on a connection that ends with the answer."""
    with suppress(OSError):
        await reader.read(1)


async def _say(writer: asyncio.StreamWriter, status: bytes, text: bytes) -> None:
    with suppress(OSError):
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(text), text))
        await writer.drain()
