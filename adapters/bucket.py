"""Bucket: objects under a prefix of an S3-compatible bucket. Knows no adapters. obstore is loaded at the first use.

Every fault is an OSError: FileNotFoundError for an object that isn't there, StorageError for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from adapters.storage import StorageError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, S3Config, S3Store

PART_BYTES = 8 << 20
"""Larger files are sent in parts of this size, each with its own checksum."""
NUM_PARTS = 4
"""Parts that are under way at a time."""
READ_RETRIES = 1
WRITE_RETRIES = 4
RETRY_FOR = timedelta(seconds=20)
CONNECT_FOR = timedelta(seconds=5)
ANSWER_FOR = timedelta(seconds=60)
"""The client's own retries, of server errors and broken connections, with backoff. Few for reading: who reads tries
again later, and meanwhile gives its thread to others."""
MAX_MESSAGE = 300


@dataclass(frozen=True)
class BucketConfig:
    """Where a bucket is and how to get in.

    url          s3://bucket/prefix
    options      AWS_* variables by name: endpoint, region, credentials; without credentials, those of the machine
    cache_bytes  of adapters that are kept on the local disk
    http         further options of the HTTP client
    """

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    cache_bytes: int = 20 << 30
    http: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def endpoint(self) -> str:
        """Empty: Amazon's own."""
        return self.options.get("AWS_ENDPOINT_URL_S3") or self.options.get("AWS_ENDPOINT_URL") or ""


@dataclass(frozen=True)
class Stored:
    """An object: its key below the prefix, its bytes, a tag that changes with its content, when it was written."""

    key: str
    size: int
    tag: str
    modified: datetime


class Bucket:
    """Safe to use from any thread."""

    def __init__(self, config: BucketConfig) -> None:
        self._config = config
        self._clients: dict[int, S3Store] = {}  # by retries

    def check(self) -> None:
        """Raises ValueError if the options can't work together. Asks nobody."""
        from obstore.exceptions import BaseError

        try:
            self._client(READ_RETRIES)
        except BaseError as error:
            raise ValueError(_first_line(error)) from None

    def put(self, key: str, data: bytes | Path) -> str:
        """Whole or not at all: until everything has arrived, nobody sees anything of it. → its tag"""
        import obstore

        with _told():
            done = obstore.put(self._client(WRITE_RETRIES), key, data, chunk_size=PART_BYTES, max_concurrency=NUM_PARTS)
        return done["e_tag"] or ""

    def get(self, key: str) -> bytes:
        import obstore

        with _told():
            return bytes(obstore.get(self._client(READ_RETRIES), key).bytes())

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes [start, end)."""
        import obstore

        with _told():
            data = bytes(obstore.get_range(self._client(READ_RETRIES), key, start=start, end=end))
        if len(data) != end - start:
            raise StorageError(f"{key} has become shorter")
        return data

    def list(self, prefix: str = "", limit: int | None = None) -> list[Stored]:
        """All objects of a directory (`prefix` ends at a slash, which is not written), at any depth, by key. Raises
        StorageError when there are more than `limit`, before all are here."""
        import obstore

        found: list[ObjectMeta] = []
        with _told():
            for page in obstore.list(self._client(READ_RETRIES), prefix or None):
                found += page
                if limit is not None and len(found) > limit:
                    raise StorageError(f"there are more than {limit} objects")
        stored = (Stored(one["path"], one["size"], one["e_tag"] or "", one["last_modified"]) for one in found)
        return sorted(stored, key=lambda one: one.key)

    def delete(self, keys: Iterable[str]) -> None:
        """Those that aren't there are no fault."""
        import obstore

        wanted = list(keys)
        if wanted:
            with _told():
                obstore.delete(self._client(WRITE_RETRIES), wanted)

    def _client(self, retries: int) -> S3Store:
        if retries not in self._clients:
            self._clients[retries] = _connect(self._config, retries)
        return self._clients[retries]


def _connect(config: BucketConfig, retries: int) -> S3Store:
    from obstore.store import S3Store

    place = urlsplit(config.url)
    options = {name.lower(): value for name, value in config.options.items()}
    options.pop("aws_endpoint_url_s3", None)
    endpoint = config.endpoint
    if endpoint:
        options["aws_endpoint_url"] = endpoint
    return S3Store(
        place.netloc,
        prefix=place.path.strip("/") or None,
        config=cast("S3Config", {"aws_checksum_algorithm": "SHA256"} | options),
        client_options={
            "allow_http": endpoint.startswith("http:"),
            "connect_timeout": CONNECT_FOR,
            "timeout": ANSWER_FOR,
            **cast("ClientConfig", config.http),
        },
        retry_config={
            "max_retries": retries,
            "retry_timeout": RETRY_FOR,
            "backoff": {
                "init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 2,
            },
        },
    )  # fmt: skip


@contextmanager
def _told() -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_first_line(error)) from None
    except (BaseError, OSError) as error:
        raise StorageError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    """Without the debug text, which repeats the request."""
    return str(error).split("\n")[0][:MAX_MESSAGE]
