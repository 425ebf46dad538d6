"""Garbage: keeps Python's collector of cycles from stopping a process that has to answer in time. Knows no engine."""

from __future__ import annotations

import gc

THRESHOLD = 50_000
"""New objects between two looks for cycles of them; a request makes some hundreds, nearly all without cycles."""


def settle() -> None:
    """What was loaded until now lives as long as the process does: the collector need not look at it again, which stops
    a process that holds torch for 70 ms each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
