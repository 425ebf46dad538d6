"""A real S3 API for tests: moto's server in a process of its own, and a line to it that can be cut.

s3_url       endpoint of a session-wide server with an empty bucket
bucket       BucketConfig of a prefix of its own in that bucket
line         a Line to the server, and `line.config`: the same prefix by way of it
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest

from adapters.bucket import BucketConfig
from tests.services import START_S, free_port

BUCKET = "chorus-tests"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            make_bucket(url, server)
            yield url
        finally:
            server.kill()


def make_bucket(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 4 * START_S  # it imports much
    while time.monotonic() < end and server.poll() is None:
        with suppress(httpx.TransportError):
            assert httpx.put(f"{url}/{BUCKET}", timeout=10).is_success
            return
        time.sleep(0.1)
    pytest.fail("moto's server did not start")


@pytest.fixture
def bucket(s3_url: str) -> BucketConfig:
    return BucketConfig(f"s3://{BUCKET}/{secrets.token_hex(4)}/adapters", {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_url})


class Line:
    """A TCP proxy. `cut_after` bytes from the server, each connection breaks off; None = never. `num_bytes` and
    `requests` (the first lines) are what has passed."""

    def __init__(self, config: BucketConfig) -> None:
        self.cut_after: int | None = None
        self.num_bytes = 0
        self.requests: list[str] = []
        port = int(config.options["AWS_ENDPOINT_URL"].rsplit(":", 1)[1])
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.config = replace(config, options={**config.options, "AWS_ENDPOINT_URL": endpoint})
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def gets(self) -> list[str]:
        """Requests for an object of the weights."""
        return [line for line in self.requests if line.startswith("GET") and "safetensors" in line]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                for work in (self._send, self._answer):
                    threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _send(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if data.split(b" ", 1)[0] in (b"GET", b"PUT", b"POST", b"HEAD", b"DELETE"):
                    self.requests.append(data.split(b"\r\n", 1)[0].decode())
                server.sendall(data)
        _hang_up(client, server)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while data := server.recv(1 << 16):
                passed += len(data)
                if self.cut_after is not None and passed > self.cut_after:
                    break
                self.num_bytes += len(data)
                client.sendall(data)
        _hang_up(client, server)


def _hang_up(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


@pytest.fixture
def line(bucket: BucketConfig) -> Iterator[Line]:
    made = Line(bucket)
    yield made
    made.close()
