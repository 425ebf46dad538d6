"""The usage ledger: one row per attempt, written exactly once. Knows no limits.

An attempt is one try of one request at one engine. Its entry travels from the worker through a Redis stream to
usage_entries (tenants.flusher); writing it twice is harmless, and the entry of an attempt that ended replaces the one
that an expired lease left behind, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.db import Database, now
from tenants.models import UsageEntry

Status = Literal["ok", "error", "cancelled", "refused", "timeout", "expired"]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one attempt used. hold() gets it with the prompt counted and status "expired" (what it is if nobody settles
    it), settle() with the rest. Times are seconds from the arrival of the request."""

    attempt_id: str
    tenant_id: str
    key_id: str
    model: str
    request_id: str = ""
    adapter: str = ""  # digest
    adapter_version: int | None = None
    endpoint: str = ""
    status: Status = "expired"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    user: str = ""
    tags: dict[str, str] | None = None
    created_at: datetime = msgspec.field(default_factory=now)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
