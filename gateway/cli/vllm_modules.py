"""What vLLM's --lora-modules say: `name=path`, a JSON object {"name", "path", "base_model_name"}, or a JSON list of
such objects; and a directory of adapters. A path may be the name of a repository of Hugging Face that vLLM has
downloaded: it is taken from the cache, nothing is fetched. Knows no server.

Source: vLLM's documentation, "LoRA adapters", the help of `vllm serve --lora-modules`, and its parser of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.spec import AdapterInvalid, shown
from adapters.storage import CONFIG_FILE

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
KEYS = frozenset(("name", "path", "base_model_name"))


@dataclass(frozen=True)
class Module:
    """One adapter of the list: what requests call it, where it lies."""

    name: str
    path: Path


def read_modules(sources: Iterable[str]) -> list[Module]:
    """Raises AdapterInvalid for what is none of these, and for a name that stands for two paths."""
    found: dict[str, Module] = {}
    for source in filter(None, sources):  # vLLM passes over empty ones too, such as unset variables
        for module in _read(source):
            if found.setdefault(module.name, module).path != module.path:
                _no(f"{shown(module.name)} is there twice, with different paths")
    return list(found.values())


def _read(source: str) -> Iterator[Module]:
    if source.lstrip().startswith(("{", "[")):
        yield from _from_json(source)
    elif "=" in source:
        name, _, path = source.partition("=")
        yield _module(name, path)
    else:
        yield from _from_directory(Path(source).expanduser())


def _from_json(source: str) -> Iterator[Module]:
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        _no(f"{shown(source)} is not JSON: {shown(str(error))}")
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not {"name", "path"} <= entry.keys() <= KEYS:
            _no(f"{shown(json.dumps(entry))} must have name and path, and may have base_model_name")
        yield _module(entry["name"], entry["path"])


def _from_directory(directory: Path) -> Iterator[Module]:
    """An adapter by the directory's name, or every adapter that lies right below it."""
    if not directory.is_dir():
        _no(f"{shown(str(directory))} is neither name=path, nor JSON, nor a directory")
    if (directory / CONFIG_FILE).is_file():
        yield Module(directory.resolve().name, directory)
        return
    found = sorted(path.parent for path in directory.glob(f"*/{CONFIG_FILE}"))
    if not found:
        _no(f"{shown(str(directory))} holds no adapters: no directory in it has {CONFIG_FILE}")
    yield from (Module(path.name, path) for path in found)


def _module(name: Any, path: Any) -> Module:
    if not isinstance(name, str) or not name or not isinstance(path, str) or not path:
        _no(f"{shown(str(name))}={shown(str(path))} needs a name and a path")
    return Module(name, _cached(path) or Path(path).expanduser())


def _cached(repository: str) -> Path | None:
    """Where Hugging Face's cache has "owner/name", if that is no directory here."""
    if not REPOSITORY.fullmatch(repository) or Path(repository).exists():
        return None
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        return Path(snapshot_download(repository, local_files_only=True))
    return None


def _no(problem: str) -> Any:
    raise AdapterInvalid("modules_invalid", problem)
