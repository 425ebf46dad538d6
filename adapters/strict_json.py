"""Strict JSON: UTF-8 without a byte order mark, no name twice, only finite numbers. Knows no meaning and no limit."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def parse_object(data: bytes) -> dict[str, Any]:
    """Raises ValueError, whose text says what is wrong with the subject: "is not valid JSON: …"."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same name twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no JSON number")
