"""Courses: which limits a principal's requests to one model pass, and the Redis keys under which these are counted.
No I/O."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from tenants.gates import Gate, Scope, gates
from tenants.limits import Limits
from tenants.principal import Principal
from tenants.slots import TenantSlot
from tenants.state import Argument

UNLIMITED = Limits()
MAX_COURSES = 1000
"""Models per principal for which their course is known."""


class Bucket(msgspec.Struct, array_like=True, frozen=True):
    """A bucket of tokens that an attempt was charged to, under the limit at its admission."""

    key: str
    period: str
    limit: int
    mode: str


class Course:
    """What all requests of a principal to one model have in common: the limits that they pass, and where these are
    counted."""

    def __init__(self, principal: Principal, model: str) -> None:
        limits = principal.model_limits.get(model, UNLIMITED)
        self._gates = gates(principal.tenant_limits, principal.key_limits, limits, 1)
        counted = [gate for gate in self._gates if gate.dimension != "concurrency"]
        self.buckets = [bucket_of(gate, principal, model) for gate in counted if gate.dimension == "tokens"]
        self.bucket_keys = [bucket_of(gate, principal, model).key for gate in counted]
        self.lets_through = any(gate.mode != "hard" for gate in self._gates)
        self._args: list[Argument] = []
        self._costs: list[int] = []
        for gate in self._gates:
            if gate.dimension == "concurrency":
                self._args += [-1 if gate.limit is None else gate.limit, gate.mode]
            else:
                self._args += [gate.period, gate.limit or 0, gate.cost, gate.mode]
                self._costs += [len(self._args) - 2] if gate.dimension == "tokens" else []

    def gates_for(self, tokens: int) -> list[Gate]:
        return [
            Gate(gate.scope, gate.name, gate.limit, tokens, gate.mode) if gate.name.startswith("tokens") else gate
            for gate in self._gates
        ]

    def args_for(self, tokens: int) -> list[Argument]:
        """Of the script: of each limit its number and mode; of those that are counted also the cost."""
        args = self._args.copy()
        for place in self._costs:
            args[place] = tokens
        return args


def course_of(principal: Principal, model: str) -> Course:
    """Worked out once per principal, which is made anew when anything about it changes."""
    found: Course | None = principal.memo.get(model)
    if found is None:
        if len(principal.memo) >= MAX_COURSES:
            principal.memo.clear()
        found = principal.memo[model] = Course(principal, model)
    return found


def bucket_of(gate: Gate, principal: Principal, model: str) -> Bucket:
    key = _bucket_key(principal.tenant_id, principal.key_id, model, gate.scope, gate.name)
    return Bucket(key, gate.period, gate.limit or 0, gate.mode)


@lru_cache(10_000)
def _bucket_key(tenant_id: str, key_id: str, model: str, scope: Scope, name: str) -> str:
    gate = Gate(scope, name, None)
    owner = {"tenant": "tenant", "key": key_id, "model": f"model:{model}"}[scope]
    return TenantSlot(tenant_id).bucket(owner, gate.dimension if gate.is_rate else f"{gate.dimension}:{gate.period}")
