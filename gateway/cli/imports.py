"""`chorus import`: moving in from another server, one row per adapter. Running it again changes nothing."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from adapters.spec import AdapterError, AdapterInvalid
from gateway.cli.adapters import ModelOption
from gateway.cli.admin import AsJson, Url, connect, show
from gateway.cli.check import checked
from gateway.cli.cures import CURES
from gateway.cli.options import with_settings
from gateway.cli.package import digest_of, packed
from gateway.cli.push import existing, push
from gateway.cli.rest import NoAnswer, Rest, RestError
from gateway.cli.vllm_modules import Module, read_modules
from gateway.settings import Settings

imports = typer.Typer(help="Move in from another server.", no_args_is_help=True)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_NAME = 64
COLUMNS = ("name", "id", "outcome", "code", "cure", "message")


@dataclass(frozen=True)
class Row:
    """What became of one adapter. `name` is what requests say, `id` what it is called here."""

    name: str
    id: str
    outcome: str
    code: str | None = None
    cure: str | None = None
    message: str = ""
    digest: str | None = None

    @property
    def is_fine(self) -> bool:
        return self.code is None


@imports.command("vllm")
@with_settings(("max_lora_rank", "max_upload", "data_dir"))
def import_vllm(
    settings: Settings,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=PATH|JSON|DIR]...", help="as --lora-modules has them, or a directory of adapters",
                       show_default=False),
    ] = None,
    lora_modules: Annotated[
        list[str] | None, typer.Option(help="the same, as it stands in vLLM's command", show_default=False)
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="whose they become [shared by all]", show_default=False)] = None,
    model: ModelOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check, offline, against the base --model.")] = False,
    url: Url = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Take over the adapters of a vLLM server, under the names that its clients use."""
    modules = read_modules([*(lora_modules or ()), *(sources or ())])
    if not modules:
        raise typer.BadParameter("name at least one adapter")
    names = own_names([module.name for module in modules])
    if dry_run:
        rows = [_check(settings, module, names[module.name]) for module in modules]
    else:
        rows = _Mover(connect(url, str(settings.data_dir)), tenant).run(modules, names)
    show([asdict(row) for row in rows], as_json, COLUMNS)
    if not all(row.is_fine for row in rows):
        raise typer.Exit(1)


def own_names(names: Iterable[str]) -> dict[str, str]:
    """What each is called here: itself where the pattern allows it, otherwise a name made from it, always the same one
    and nobody else's in the list."""
    found = {name: name for name in names if NAME.fullmatch(name)}
    made = {name: _made(name) for name in names if name not in found}
    taken = [*found.values(), *made.values()]
    for name, own in made.items():
        found[name] = own if taken.count(own) == 1 else _distinct(name, own)
    return found


def _made(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    fitting = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:MAX_NAME]
    return fitting or _distinct(name, "adapter")


def _distinct(name: str, own: str) -> str:
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{own[: MAX_NAME - 1 - len(mark)]}-{mark}"


def _check(settings: Settings, module: Module, own: str) -> Row:
    try:
        if own.casefold() == settings.base_name.casefold():
            raise AdapterInvalid("name_reserved", f"{own} is the name of the base model", "name")
        return Row(module.name, own, "ready", digest=checked(settings, module.path, is_bare=True)["digest"])
    except (AdapterError, OSError) as error:
        return _failed(module, own, error)


class _Mover:
    """Takes adapters over for one owner. `mapped` are the tenant's own names for models → what they stand for."""

    def __init__(self, rest: Rest, tenant: str | None) -> None:
        self._rest = rest
        self._tenant = tenant
        self._mapped = self._model_names()

    def run(self, modules: list[Module], names: Mapping[str, str]) -> list[Row]:
        """Every adapter that can be taken over is; then the names that don't fit the pattern are made to work."""
        rows = [self._push(module, names[module.name]) for module in modules]
        foreign = {row.name: row.id for row in rows if row.is_fine and row.name != row.id}
        if foreign.items() <= self._mapped.items():
            return rows
        try:
            names = self._model_names() | foreign
            self._rest.call("PATCH", f"tenants/{self._tenant}", json={"model_names": names})
        except RestError as error:
            lost = {"outcome": "failed", "code": error.code or "refused", "message": str(error)}
            return [replace(row, **lost) if row.name in foreign else row for row in rows]
        return rows

    def _model_names(self) -> dict[str, str]:
        if self._tenant is None:
            return {}
        return dict(self._rest.call("GET", f"tenants/{quote(self._tenant, safe='')}")["model_names"])

    def _push(self, module: Module, own: str) -> Row:
        try:
            with packed(module.path, is_bare=True) as files:
                own = self._name(module.name, own, files)
                done = push(self._rest, self._tenant, own, files)
            return Row(module.name, own, done.outcome, digest=done.adapter["digest"])
        except NoAnswer:
            raise
        except (AdapterError, RestError, OSError) as error:
            return _failed(module, own, error)

    def _name(self, name: str, own: str, files: Path) -> str:
        """What it is called here: never as another adapter is that was there for another reason."""
        if name in self._mapped:
            if own == name != self._mapped[name]:
                raise RestError(f"{own} is this tenant's name for {self._mapped[name]}", code="conflict", param="name")
            return self._mapped[name]
        if own == name:
            return own
        if self._tenant is None:
            raise RestError("a shared adapter has no second name: give --tenant", code="name_invalid", param="name")
        found = existing(self._rest, self._tenant, own)
        is_free = found is None or found["digest"] == digest_of(files, found)
        return own if is_free and own not in self._mapped.values() else _distinct(name, own)


def _failed(module: Module, own: str, error: Exception) -> Row:
    code = getattr(error, "code", None) or ("file_invalid" if isinstance(error, OSError) else "refused")
    return Row(module.name, own, "failed", code, CURES.get(code), str(error))
