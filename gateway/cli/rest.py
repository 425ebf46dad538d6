"""Rest: the admin API as the command line and the demo call it. Knows HTTP and nothing else of the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx

from adapters.shards import has_weights, one_file
from adapters.spec import AdapterError
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE

TIMEOUT = httpx.Timeout(600, connect=10)


class RestError(Exception):
    """The server refused (`status`), or can't be reached (0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Rest:
    """JSON in, JSON out, with the admin key; a connection per call. Raises RestError with the server's own words."""

    def __init__(self, url: str, admin_key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"}

    def call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        try:
            response = httpx.request(
                method, f"{self.url}/admin/v1/{path}", headers=self._headers, timeout=TIMEOUT, **content
            )
        except httpx.HTTPError as error:
            raise RestError(f"no answer from {self.url}: {error}. Is `chorus serve` running there?") from error
        if response.is_success:
            found = response.json() if response.content else {}
            return found if isinstance(found, dict) else {}
        raise RestError(_reason(response), response.status_code)

    def list_all(self, path: str) -> list[dict[str, Any]]:
        """Every page of a list."""
        rows: list[dict[str, Any]] = []
        query: dict[str, str] = {}
        while True:
            page = self.call("GET", path, params=query)
            rows += page["data"]
            if not page.get("has_more") or not page["data"]:
                return rows
            query = {"after": str(page.get("last_id") or page["data"][-1]["id"])}

    def download(self, path: str, query: dict[str, Any], file: IO[bytes]) -> None:
        """Writes the body to the file as it comes."""
        try:
            with httpx.stream(
                "GET", f"{self.url}/admin/v1/{path}", params=query, headers=self._headers, timeout=TIMEOUT
            ) as response:
                if not response.is_success:
                    response.read()
                    raise RestError(_reason(response), response.status_code)
                for data in response.iter_bytes():
                    file.write(data)
        except httpx.HTTPError as error:
            raise RestError(f"no answer from {self.url}: {error}. Is `chorus serve` running there?") from error

    def upload(self, method: str, path: str, directory: Path, **content: Any) -> dict[str, Any]:
        """Sends the two files of an adapter, streamed from the disk; shards are put together first."""
        if not (directory / CONFIG_FILE).is_file() or not has_weights(directory):
            raise RestError(f"{directory} has no {CONFIG_FILE} or no {WEIGHTS_FILE}: it is not a PEFT adapter")
        with _weights(directory) as whole, (directory / CONFIG_FILE).open("rb") as config, whole.open("rb") as weights:
            files = {
                "config": (CONFIG_FILE, config, "application/json"),
                "weights": (WEIGHTS_FILE, weights, "application/octet-stream"),
            }
            return self.call(method, path, files=files, **content)


@contextmanager
def _weights(directory: Path) -> Iterator[Path]:
    try:
        with one_file(directory) as path:
            yield path
    except AdapterError as error:
        raise RestError(f"{directory}: {error.message}") from error


def _reason(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return f"{error['message']} (HTTP {response.status_code}{', ' + error['code'] if error.get('code') else ''})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:200]}"
