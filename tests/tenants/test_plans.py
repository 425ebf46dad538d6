"""Plans, and limits for single models: what holds for a tenant, and from when on."""

from __future__ import annotations

import pytest

from tenants.audit import AuditLog
from tenants.db import Database
from tenants.directory import TenantDirectory, TenantSpec
from tenants.epochs import Epochs
from tenants.keys import KeyRing, KeySpec
from tenants.limits import InvalidSettings, Limits
from tenants.plans import PlanBook, PlanExists, PlanInUse, PlanNotFound, PlanSpec
from tests.tenants.conftest import ADMIN


@pytest.fixture
def plans(database: Database, epochs: Epochs) -> PlanBook:
    return PlanBook(database, epochs)


def test_own_limits_go_before_those_of_the_plan() -> None:
    """Each number counts with the mode of the place where it comes from."""
    plan = Limits(requests_per_minute=60, tokens_per_day=1000, concurrency=2, soft=("tokens_per_day",))
    own = Limits(requests_per_minute=90, tokens_per_month=5, shadow=("requests_per_minute", "concurrency"))

    assert own.over(plan) == Limits(
        requests_per_minute=90, tokens_per_day=1000, tokens_per_month=5, concurrency=2,
        soft=("tokens_per_day",), shadow=("requests_per_minute",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"tokens_per_day": -1}, "limits.tokens_per_day"), ({"tokens_per_month": True}, "limits.tokens_per_month"),
        ({"soft": ["concurrency"]}, "limits.soft"), ({"shadow": ["rpm"]}, "limits.shadow"),
        ({"soft": "x"}, "limits.soft"),
        ({"soft": ["tokens_per_day"], "shadow": ["tokens_per_day"]}, "limits.soft"),
    ],
)  # fmt: skip
def test_impossible_limits(values: dict[str, object], param: str) -> None:
    """Negative numbers, unknown names, and rates that are soft, are refused by name."""
    with pytest.raises(InvalidSettings) as caught:
        Limits.of(values)
    assert caught.value.param == param


async def test_a_plan_acts_at_the_next_request(
    plans: PlanBook, directory: TenantDirectory, keys: KeyRing, database: Database
) -> None:
    """Changing a plan moves the epoch of those who refer to it, and of nobody else; keys see the new numbers."""
    await plans.create(PlanSpec("gold", Limits(concurrency=5), {"m": Limits(tokens_per_day=9)}), ADMIN)
    await directory.create(TenantSpec("acme", plan="gold", limits=Limits(tokens_per_minute=7)), ADMIN)
    await directory.create(TenantSpec("bolt"), ADMIN)
    key = (await keys.issue("acme", KeySpec("k"), ADMIN)).key
    other = (await keys.issue("bolt", KeySpec("k"), ADMIN)).key
    before, bolt = await keys.authenticate(key), await keys.authenticate(other)
    assert before.tenant_limits == Limits(tokens_per_minute=7, concurrency=5)
    assert before.model_limits == {"m": Limits(tokens_per_day=9)}

    await plans.replace(PlanSpec("gold", Limits(concurrency=6)), ADMIN)

    after = await keys.authenticate(key)
    assert after.epoch > before.epoch
    assert (after.tenant_limits, after.model_limits) == (Limits(tokens_per_minute=7, concurrency=6), {})
    assert (await keys.authenticate(other)).epoch == bolt.epoch
    entry = (await AuditLog(database).page(""))[0]
    numbers = [(state or {})["limits"]["concurrency"] for state in (entry.before, entry.after)]
    assert (entry.action, numbers) == ("plan.update", [5, 6])


async def test_a_plan_in_use_stays(plans: PlanBook, directory: TenantDirectory) -> None:
    """It can't be deleted while a tenant refers to it; nobody can refer to a plan that is not there."""
    await plans.create(PlanSpec("gold"), ADMIN)
    with pytest.raises(PlanExists):
        await plans.create(PlanSpec("gold"), ADMIN)
    await directory.create(TenantSpec("acme", plan="gold"), ADMIN)
    with pytest.raises(PlanInUse):
        await plans.delete("gold", ADMIN)

    await directory.patch("acme", {"plan": None}, ADMIN)
    await plans.delete("gold", ADMIN)

    with pytest.raises(PlanNotFound):
        await plans.get("gold")
    with pytest.raises(InvalidSettings) as caught:
        await directory.patch("acme", {"plan": "gold"}, ADMIN)
    assert caught.value.param == "plan"


async def test_plans_come_in_pages(plans: PlanBook) -> None:
    """In the order of ids."""
    for name in ("c", "a", "b"):
        await plans.create(PlanSpec(name), ADMIN)

    first, has_more = await plans.page(limit=2)
    rest, is_more = await plans.page(after="b")

    assert ([row.id for row in first], has_more) == (["a", "b"], True)
    assert ([row.id for row in rest], is_more) == (["c"], False)
