"""What a watched bucket's server can make its client do: real servers that send it elsewhere, by redirect or name."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from adapters import egress
from adapters.bucket import Bucket, BucketConfig
from adapters.egress import Egress, is_public
from adapters.sources import AdapterSource, SourceError, open_source
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from tests.buckets import BUCKET, CREDENTIALS, make_bucket
from tests.services import free_port

WEIGHTS = bytes(range(256)) * (40 << 10)
"""More than one part of a download."""


class Elsewhere:
    """A server that answers everything by a redirect to `there` with the same path. `asked` are the paths."""

    def __init__(self, there: str = "", context: ssl.SSLContext | None = None) -> None:
        self.there = there
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                self.send_response(302 if outer.there else 404)
                self.send_header("Location", outer.there + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_port
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@contextmanager
def elsewhere(there: str = "", context: ssl.SSLContext | None = None) -> Iterator[Elsewhere]:
    made = Elsewhere(there, context)
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()


def source_at(url: str, place: str, allow_private: bool = True) -> AdapterSource:
    return open_source(place, {**CREDENTIALS, "AWS_ENDPOINT_URL": url}, allow_private)


@pytest.fixture
def filled(bucket: BucketConfig) -> BucketConfig:
    objects = Bucket(bucket)
    objects.put(f"acme/a/{CONFIG_FILE}", b"{}")
    objects.put(f"acme/a/{WEIGHTS_FILE}", WEIGHTS)
    return bucket


def copied(source: AdapterSource, stage: Path) -> dict[str, bytes]:
    stage.mkdir()
    (one,) = source.scan()
    source.copy(one, stage, len(WEIGHTS))
    return {path.name: path.read_bytes() for path in stage.iterdir()}


def test_a_redirect_to_a_private_address_is_not_followed(filled: BucketConfig, s3_url: str) -> None:
    """The client by itself goes wherever it is sent; a source's doesn't, not even where its own server may be private:
    that holds for this server, on this port."""
    with elsewhere(s3_url) as server:
        here = {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url}
        assert Bucket(BucketConfig(filled.url, here)).list(), "or there is nothing to guard against"
        server.asked.clear()
        with elsewhere() as target:
            for there in (target.url, target.url.replace("127.0.0.1", "localhost"), "http://169.254.169.254"):
                server.there = there
                with pytest.raises(SourceError, match=r"private address; private_sources"):
                    source_at(server.url, filled.url).scan()
            assert (len(server.asked), target.asked) == (3, [])


def test_a_redirect_in_the_middle_is_not_followed(filled: BucketConfig, s3_url: str, tmp_path: Path) -> None:
    """Also of a file, after the listing was honest."""
    (found,) = source_at(s3_url, filled.url).scan()
    with elsewhere() as target, elsewhere(target.url) as server, pytest.raises(SourceError, match="private address"):
        source_at(server.url, filled.url).copy(found, tmp_path, len(WEIGHTS))
    assert target.asked == []
    assert b"".join(path.read_bytes() for path in tmp_path.iterdir()) == b""


def test_a_redirect_to_the_public_internet_is_followed(
    filled: BucketConfig, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Amazon sends from region to region. Public is, for this test, what 127.0.0.1 is."""
    monkeypatch.setattr(egress, "is_public", lambda address: address == "127.0.0.1")
    with elsewhere(s3_url) as server:
        (found,) = source_at(server.url, filled.url, allow_private=False).scan()
    assert [file.name for file in found.files] == [CONFIG_FILE, WEIGHTS_FILE]


def name_it(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> list[str]:
    """Names that end in .example have these addresses from now on. → those that were looked up"""
    look_up = socket.getaddrinfo
    names: list[str] = []

    def answer(host: Any, port: Any, *args: Any, **options: Any) -> list[Any]:
        if not str(host).endswith(".example"):
            return look_up(host, port, *args, **options)
        names.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return names


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["1.1.1.1", "127.0.0.1"], ["::ffff:127.0.0.1"], ["10.0.0.1"]])
def test_a_name_is_looked_up_at_every_connection(
    addresses: list[str], filled: BucketConfig, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that was public when the source was opened, and means something private now, in part or in disguise, is
    refused; there is one look-up, so nothing comes between check and connection."""
    port = urlsplit(s3_url).port
    source = source_at(f"http://bucket.example:{port}", filled.url, allow_private=False)
    looked_up = name_it(monkeypatch, addresses)
    with pytest.raises(SourceError, match=r"bucket\.example is a private address"):
        source.scan()
    assert set(looked_up) == {"bucket.example"}


def test_names_below_the_endpoint_belong_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets as names of hosts; a name that only ends alike is another's."""
    with elsewhere() as server, Egress(("s3.example", server.port)) as proxy:
        name_it(monkeypatch, ["127.0.0.1"])
        for host, status in (("s3.example", 404), (f"{BUCKET}.s3.example", 404), ("nots3.example", 403)):
            assert httpx.get(f"http://{host}:{server.port}/x", proxy=proxy).status_code == status
    assert server.asked == ["/x", "/x"]


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of 127.0.0.1, which clients in this test trust; with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now()
    built = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2)).not_valid_after(now + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    path = tmp_path / "certificate.pem"
    path.write_bytes(
        built.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    return path


def test_https_goes_through_a_tunnel(certificate: Path, tmp_path: Path) -> None:
    """The same over TLS: read whole from where it may be; a redirect to another port is a tunnel that is not made."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port),
               "-c", str(certificate), "-k", str(certificate)]  # fmt: skip
    url, place = f"https://127.0.0.1:{port}", f"s3://{BUCKET}/x"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            make_bucket(url, server)
            objects = Bucket(BucketConfig(place, {**CREDENTIALS, "AWS_ENDPOINT_URL": url}))
            objects.put(f"acme/a/{CONFIG_FILE}", b"{}")
            objects.put(f"acme/a/{WEIGHTS_FILE}", WEIGHTS)
            assert copied(source_at(url, place), tmp_path / "s") == {CONFIG_FILE: b"{}", WEIGHTS_FILE: WEIGHTS}
            with pytest.raises(SourceError, match="private address"):
                source_at(url, place, allow_private=False).scan()
            with elsewhere(url, context) as redirecting, pytest.raises(SourceError, match="private address"):
                source_at(redirecting.url, place).scan()
            assert redirecting.asked
        finally:
            server.kill()


def test_only_reading_passes(s3_url: str) -> None:
    """Nothing is written through it; heads are short; it ends with the block."""
    with Egress(("127.0.0.1", urlsplit(s3_url).port or 0)) as proxy:
        assert httpx.get(f"{s3_url}/{BUCKET}", proxy=proxy).status_code == 200
        assert httpx.put(f"{s3_url}/{BUCKET}/x", proxy=proxy, content=b"x").status_code == 400
        assert httpx.get(f"{s3_url}/{BUCKET}", proxy=proxy, headers={"x": "y" * (80 << 10)}).status_code == 400
        assert httpx.get("http://127.0.0.1:1/", proxy=proxy).status_code == 403
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{s3_url}/{BUCKET}", proxy=proxy)


def test_an_endpoint_that_is_no_address(bucket: BucketConfig) -> None:
    """Is told of as what it is."""
    with pytest.raises(SourceError, match="no address of a server"):
        source_at("nonsense", bucket.url)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("1.1.1.1", True), ("2606:4700::1111", True), ("::ffff:1.1.1.1", True), ("64:ff9b::101:101", True),
     ("127.0.0.1", False), ("10.1.2.3", False), ("169.254.169.254", False), ("0.0.0.0", False), ("100.64.0.1", False),
     ("224.0.0.1", False), ("::1", False), ("::7f00:1", False), ("fd00::1", False), ("fe80::1%eth0", False),
     ("::ffff:127.0.0.1", False), ("2002:7f00:1::", False), ("64:ff9b::a9fe:a9fe", False), ("64:ff9b:1::1", False),
     ("2001:0:0:0:0:0:80ff:fffe", False)],
)  # fmt: skip
def test_which_addresses_are_public(address: str, expected: bool) -> None:
    """Also those that stand for another."""
    assert is_public(address) is expected
