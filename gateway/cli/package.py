"""An adapter's directory as it is sent: plain files under their fixed names, and their digest. Knows no server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from adapters.new_tokens import TOKENIZER_FILE, TOKENS_FILE, is_of_tokenizer
from adapters.shards import gather, has_weights
from adapters.spec import AdapterInvalid
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, content_digest
from gateway.upload import FILES

PROBES_FILE = "probes.jsonl"
PARTS = {part: name for part, name in FILES.items() if part != "index"} | {"probes": PROBES_FILE}
"""Of an upload, once shards are put together: part → file."""
BARE = frozenset((CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE))
"""What the adapter computes with; the other parts say how it is asked, and what it must answer."""


@contextmanager
def packed(directory: Path, is_bare: bool = False) -> Iterator[Path]:
    """A directory with what the server takes, only to be read: `directory` itself where it has plain files, otherwise a
    temporary one as pack() makes it. `is_bare`: without chat template, defaults, probes. Raises AdapterError."""
    names = _names(directory, is_bare)
    is_all = names == _names(directory, is_bare=False)
    if is_all and WEIGHTS_FILE in names and not any((directory / name).is_symlink() for name in names):
        yield directory
        return
    with TemporaryDirectory(prefix="chorus-adapter-") as temporary:
        pack(directory, Path(temporary), is_bare)
        yield Path(temporary)


def pack(directory: Path, target: Path, is_bare: bool = False) -> None:
    """The same in an empty directory of one's own: links are followed, shards put together, adapter_model.bin is
    converted. Raises AdapterError."""
    for name in _names(directory, is_bare) - {WEIGHTS_FILE}:
        shutil.copyfile(directory / name, target / name)
    if (directory / WEIGHTS_FILE).is_file():
        with suppress(OSError):  # a second name of the same file, where that is possible: it may be gigabytes
            os.link((directory / WEIGHTS_FILE).resolve(), target / WEIGHTS_FILE)
            return
    gather(directory, target / WEIGHTS_FILE, on_client=True)


def _names(directory: Path, is_bare: bool) -> set[str]:
    """Files of an adapter that are there. Raises AdapterInvalid."""
    if not (directory / CONFIG_FILE).is_file() or not has_weights(directory):
        raise AdapterInvalid(
            "file_missing", f"{directory} has no {CONFIG_FILE} or no {WEIGHTS_FILE}: it is not a PEFT adapter"
        )
    found = {name for name in PARTS.values() if (directory / name).is_file()}
    return found & BARE if is_bare else found


def parts(files: Path) -> dict[str, Path]:
    """What is sent of a packed directory."""
    return {part: files / name for part, name in PARTS.items() if (files / name).is_file()}


def probes_of(files: Path) -> list[dict[str, Any]] | None:
    """What a packed directory's probes are, as the server stores them; None: it has none of its own. Raises
    AdapterInvalid."""
    if not (files / PROBES_FILE).is_file():
        return None
    from gateway.errors import ApiError  # only for those who have probes: it takes half a second
    from gateway.probes import parse_probes

    try:
        return parse_probes((files / PROBES_FILE).read_bytes())
    except ApiError as error:
        raise AdapterInvalid(error.code or "probes_invalid", error.message, error.param) from error


def digest_of(files: Path, stored: Mapping[str, Any] | None = None) -> str:
    """As the server names what it stores: "sha256:…". Which tokens of a tokenizer are new is known where the base is:
    `stored` is the server's own object of the adapter, whose word is taken if our tokenizer.json has those tokens.
    Raises AdapterError."""
    told: Mapping[str, str] = (stored or {}).get("companion_sums") or {}
    others = {
        name: told[name]
        for name in (TOKENS_FILE,)
        if name in told and is_of_tokenizer(told[name], files / TOKENIZER_FILE)
    }
    return f"sha256:{content_digest(files, others)}"
