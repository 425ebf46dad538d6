"""Rest: the admin API as the command line and the demo call it. Knows HTTP and nothing else of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, BinaryIO

import httpx

TIMEOUT = httpx.Timeout(600, connect=10)


class RestError(Exception):
    """The server refused (`status`, `code`, `param`), or can't be reached (0)."""

    def __init__(self, message: str, status: int = 0, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class NoAnswer(RestError):
    """Nobody answers at that address."""


class Rest:
    """JSON in, JSON out, with the admin key; a connection per call. Raises RestError with the server's own words."""

    def __init__(self, url: str, admin_key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"}

    def call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        if not {".", ".."}.isdisjoint(path.split("/")):  # clients resolve them: another thing would be meant
            raise RestError(f"{path} holds a name that is none", code="name_invalid")
        try:
            response = httpx.request(
                method, f"{self.url}/admin/v1/{path}", headers=self._headers, timeout=TIMEOUT, **content
            )
        except httpx.HTTPError as error:
            raise NoAnswer(f"no answer from {self.url}: {error}. Is `chorus serve` running there?") from error
        if response.is_success:
            found = response.json() if response.content else {}
            return found if isinstance(found, dict) else {}
        raise _refusal(response)

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
                    raise _refusal(response)
                for data in response.iter_bytes():
                    file.write(data)
        except httpx.HTTPError as error:
            raise NoAnswer(f"no answer from {self.url}: {error}. Is `chorus serve` running there?") from error

    def upload(
        self,
        method: str,
        path: str,
        files: Mapping[str, Path],
        progress: Callable[[int], None] | None = None,
        **content: Any,
    ) -> dict[str, Any]:
        """Sends files by the names of their parts, streamed from the disk. `progress` is told the bytes as they go."""
        with ExitStack() as stack:
            parts = {
                part: (file.name, _Watched(stack.enter_context(file.open("rb")), progress), "application/octet-stream")
                for part, file in files.items()
            }
            return self.call(method, path, files=parts, **content)


class _Watched:
    """A file that tells how much of it was read; httpx sends it piece by piece and asks for its length."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None] | None) -> None:
        self._file = file
        self._progress = progress
        self.seek, self.tell, self.fileno = file.seek, file.tell, file.fileno

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if self._progress is not None:
            self._progress(len(data))
        return data


def _refusal(response: httpx.Response) -> RestError:
    status = response.status_code
    try:
        error = response.json()["error"]
        code = error.get("code")
        message = f"{error['message']} (HTTP {status}{', ' + code if code else ''})"
        return RestError(message, status, code, error.get("param"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return RestError(f"HTTP {status}: {response.text[:200]}", status)
