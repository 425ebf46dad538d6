"""Pushing: one adapter directory under one name, so that it is what the server has afterwards. The digest is computed
here as the store computes it, and the server must answer with the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gateway.cli.package import digest_of, parts, probes_of
from gateway.cli.rest import Rest, RestError

NOT_FOUND = 404
NOTHING: Mapping[str, str] = MappingProxyType({})
COLUMNS = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())


def adapter_path(tenant: str | None, name: str = "", act: str = "") -> str:
    """Below /admin/v1/; whatever a name holds stays one part of the path."""
    owner = f"tenants/{quote(tenant, safe='')}" if tenant else ""
    return "/".join(part for part in (owner, "adapters", quote(name, safe=""), act) if part)


@dataclass(frozen=True)
class Pushed:
    """What the server has now. `outcome`: created, replaced (a new version), probed (only other probes), unchanged."""

    outcome: str
    adapter: dict[str, Any]


def push(rest: Rest, tenant: str | None, name: str, files: Path, options: Mapping[str, str] = NOTHING) -> Pushed:
    """`files` is a packed directory, `options` are those of the server's route.

    Raises AdapterError (before anything is sent), RestError.
    """
    found = existing(rest, tenant, name)
    if found is not None and found["digest"] == digest_of(files, found):
        is_new = set_probes(rest, adapter_path(tenant, name, "probes"), files)
        return Pushed("probed" if is_new else "unchanged", found)
    with _progress(name, files) as step:
        if found is None:
            forced = {name: value for name, value in options.items() if name != "activate"}  # the first one is current
            answer = rest.upload("POST", adapter_path(tenant), parts(files), step, params=forced, data={"name": name})
        else:
            answer = rest.upload("PUT", adapter_path(tenant, name), parts(files), step, params=dict(options))
    if answer.get("digest") != digest_of(files, answer):
        raise RestError(
            f"{name}: the server stored {answer.get('digest')}, which is not what was sent: something changed on the "
            "way, or while they were read; push again, or roll back",
            code="digest_mismatch",
        )
    return Pushed("created" if found is None else "replaced", answer)


def set_probes(rest: Rest, path: str, files: Path) -> bool:
    """What lies in probes.jsonl is what the adapter must answer from now on. False: it was so already, or there is no
    such file. Raises AdapterInvalid, RestError."""
    wanted = probes_of(files)
    if wanted is None or rest.call("GET", path)["probes"] == wanted:
        return False
    rest.call("PUT", path, json={"probes": wanted})
    return True


def existing(rest: Rest, tenant: str | None, name: str) -> dict[str, Any] | None:
    """The adapter as the server has it, None if it has none of this name."""
    try:
        return rest.call("GET", adapter_path(tenant, name))
    except RestError as error:
        if error.status == NOT_FOUND and error.code != "tenant_not_found":
            return None
        raise


@contextmanager
def _progress(name: str, files: Path) -> Iterator[Any]:
    """A bar on a terminal's stderr; nothing elsewhere."""
    total = sum(path.stat().st_size for path in parts(files).values())
    console = Console(stderr=True)
    with Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"pushing {name}", total=total)
        yield lambda count: progress.advance(task, count)
