"""Codes of refusals: each one is documented, with its cure, and no other is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from adapters.names import _REASONS
from gateway.cli.cures import CURES
from gateway.companions import CODES

ROOT = Path(__file__).parent.parent.parent
FILES = (
    "agreement", "base_copies", "config", "header", "loader", "moves", "names", "new_tokens", "pickled", "queries",
    "records", "registry", "sandbox", "shards", "storage", "targets", "validation", "values",
)  # fmt: skip
RAISERS = {
    "AdapterInvalid", "AdapterUnsupported", "AdapterTooLarge", "AdapterMissing", "NameInvalid", "NameTaken",
    "VersionConflict", "VersionInUse", "NoEarlierVersion", "BaseMismatch", "AdapterNotFound", "_bad", "_invalid", "_no",
}  # fmt: skip
ELSEWHERE = {"unsupported_option", "modules_invalid", "digest_mismatch", "probes_invalid", "probes_failed"}
"""Raised by the gateway and the command line, or with a code that is no literal."""
CODE = re.compile(r"[a-z]+(?:_[a-z]+)*")


def codes() -> Iterator[str]:
    """Every code that the sources can give to an error."""
    yield from (code for _, code, _ in _REASONS)
    for name in FILES:
        helpers = RAISERS - ({"_invalid"} if name == "config" else set())  # there its first argument is the key
        for node in ast.walk(ast.parse((ROOT / "adapters" / f"{name}.py").read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in helpers and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str) and CODE.fullmatch(first.value):
                    yield first.value


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    """Codes are stable and in docs/adapters.md, which speaks of no others."""
    table = (ROOT / "docs" / "adapters.md").read_text().partition("## Codes")[2]
    documented = {
        code
        for row in table.splitlines()
        for code in re.findall(r"`([a-z_]+)`", row.split("|")[1] if "|" in row else "")
    }
    raised = set(codes()) | ELSEWHERE | set(CODES.values())

    assert documented == raised


def test_every_code_has_its_cure() -> None:
    """What the command line says to do is what docs/adapters.md says, for every code."""
    table = (ROOT / "docs" / "adapters.md").read_text().partition("## Codes")[2]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    documented = {code: cells[2].removesuffix(" |") for cells in rows for code in re.findall(r"`([a-z_]+)`", cells[0])}

    assert documented == dict(CURES)
