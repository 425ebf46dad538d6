"""Real Redis and PostgreSQL for tests: private servers in temporary directories, and the fixtures that hand them out.

redis_url        a session-wide redis-server, emptied            redis_server   the same, as RedisServer
own_redis        a RedisServer of the test's own, to kill and to stop
postgres_url     a fresh, empty database                         own_postgres   a PostgresServer of the test's own
database_url     parametrised: a migrated SQLite file, a migrated PostgreSQL database
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
import redis

import adapters.rows
import migrations
import tenants.models
from tenants.db import Base

assert {adapters.rows.AdapterRow.metadata, tenants.models.Tenant.metadata} == {Base.metadata}

IS_CI = os.environ.get("CI", "") not in ("", "0", "false")
START_S = 30.0


def missing(what: str) -> None:
    """A service that is not installed skips the test here and fails it in CI."""
    message = f"{what} is not installed: apt install redis-server postgresql"
    pytest.fail(message) if IS_CI else pytest.skip(message)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many, no two alike."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


class RedisServer:
    """redis-server with an append-only file, on a Unix socket."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="redis-"))
        self.url = f"unix://{self.directory}/s"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.directory / "s"), "--dir", str(self.directory), "--save", "",
                   "--appendonly", "yes", "--maxmemory-policy", "noeviction"]  # fmt: skip
        self._process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    assert time.monotonic() < deadline, "redis-server does not start"
                    time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9; start() brings it back with what its file has."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def postgres_bin() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    if initdb is None:
        missing("PostgreSQL")
    return Path(initdb or "").parent


class PostgresServer:
    """A private cluster on a port of 127.0.0.1; as root it runs as the user postgres, because it refuses root."""

    def __init__(self, max_connections: int = 60) -> None:
        self.bin = postgres_bin()
        self.directory = Path(tempfile.mkdtemp(prefix="pg-"))
        self.port = free_port()
        self._max_connections = max_connections
        self._as: list[str] = []
        if os.geteuid() == 0:
            shutil.chown(self.directory, "postgres", "postgres")
            self._as = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        self._run("initdb", "-D", str(self.directory / "data"), "-U", "postgres", "-A", "trust", "--no-sync")
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, program: str, *arguments: str) -> str:
        command = [*self._as, str(self.bin / program), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=self.directory).stdout

    def start(self) -> None:
        settings = {"port": self.port, "listen_addresses": "127.0.0.1", "fsync": "off", "full_page_writes": "off",
                    "unix_socket_directories": str(self.directory), "max_connections": self._max_connections,
                    "shared_buffers": "16MB"}  # fmt: skip
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = [*self._as, str(self.bin / "postgres"), "-D", str(self.directory / "data"), *options]
        log = (self.directory / "log").open("ab")
        self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        log.close()
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port))
                return
            except subprocess.CalledProcessError:
                assert time.monotonic() < deadline, (self.directory / "log").read_text()
                time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """To the server and all its backends (each has a process group of its own)."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in (self._process.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """kill -9; start() brings it back."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create(self) -> str:
        """A fresh, empty database. → its URL."""
        name = f"test_{secrets.token_hex(6)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", name)
        return self.url(name)

    def emptied(self, database: str) -> str:
        """Delete every row, but keep the tables. → its URL. Much quicker than another database."""
        tables = ", ".join(f'"{table}"' for table in Base.metadata.tables)
        self._run(
            "psql", "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", database, "-c",
            f"SET lock_timeout = '10s'; TRUNCATE {tables} RESTART IDENTITY",
        )  # fmt: skip
        return self.url(database)


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        missing("redis-server")
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """A real, empty Redis."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """One that a test may stop, kill and empty."""
    with running_redis() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    server = PostgresServer(max_connections=20)
    server.start()
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """A fresh, empty database."""
    return postgres_server.create()


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    migrations.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: PostgresServer) -> str:
    """The name of a migrated database; for PostgresServer.emptied()."""
    url = postgres_server.create()
    migrations.upgrade(url)
    return url.rpartition("/")[2]


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """A migrated SQLite database of the test's own."""
    shutil.copy(migrated_sqlite, tmp_path / "chorus.db")
    return f"sqlite:///{tmp_path}/chorus.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated database of the test's own, once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.emptied(request.getfixturevalue("migrated_postgres"))
