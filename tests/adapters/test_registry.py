"""AdapterRegistry on a real database: names, versions, who sees what, what outlives a crash."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from adapters.records import SHARED, AdapterNotFound, Move, NameInvalid, NameTaken, Stored, VersionConflict
from adapters.registry import AdapterRegistry
from adapters.spec import AdapterRef, AdapterSpec, ModuleSpec
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, DirectoryStore
from tenants.audit import AuditLog
from tenants.db import Database
from tenants.epochs import Epochs
from tests.adapters.conftest import ADMIN

SPEC = AdapterSpec(
    modules=(ModuleSpec(0, "q_proj", 8, 2.0, "a", "b"),), rank=8, target_modules=("q_proj",), num_tensors=2,
    packed_bytes=4096, base_model="org/base", warnings=("careful",),
)  # fmt: skip


def stored(number: int) -> Stored:
    return Stored(f"{number:064x}", SPEC, 1234)


async def digest_of(registry: AdapterRegistry, tenant: str, name: str) -> int | None:
    found = await registry.resolve(tenant, name)
    return None if found is None else int(found.ref.digest, 16)


async def test_register_then_resolve(registry: AdapterRegistry) -> None:
    """An upload is there at once, with all that validation found out."""
    adapter = await registry.register("acme", "pirate", stored(1), ADMIN)

    assert (adapter.name, adapter.current) == ("pirate", 1)
    version = adapter.version()
    assert (version.rank, version.target_modules, version.num_modules, version.num_tensors) == (8, ("q_proj",), 1, 2)
    assert (version.size_bytes, version.base_model, version.warnings) == (1234, "org/base", ("careful",))
    resolved = await registry.resolve("acme", "pirate")
    assert resolved is not None
    assert resolved.ref == AdapterRef(f"{1:064x}", 8, 4096)
    assert (resolved.version, resolved.tenant_id, resolved.is_shared) == (1, "acme", False)
    assert await registry.get("acme", "pirate") == adapter
    assert await registry.page("acme") == ([adapter], False)


ODD_NAMES = (
    "", ".", "..", "a/", "org/a", "a@1", "a b", " a", "a ", "a\n", "a\0", "é", "e\u0301", "모델", "😀", "a\u200f",
    "x" * 65, "x" * 300, "-a", "_a", ".a", "%2e%2e", "C:\\x", "../x", "/etc", "a/../../b", "a:b", "\ud800",
)  # fmt: skip


async def test_names_outside_the_pattern_are_refused(registry: AdapterRegistry) -> None:
    """HS-14, AU-05: one plain pattern for names; nothing else is stored, found, replaced or deleted."""
    for name in ODD_NAMES:
        with pytest.raises(NameInvalid) as caught:
            await registry.register("acme", name, stored(1), ADMIN)
        assert caught.value.code == "name_invalid"
        for act in (registry.replace("acme", name, stored(1), ADMIN), registry.retire("acme", name, ADMIN)):
            with pytest.raises(AdapterNotFound):
                await act
        assert await registry.resolve("acme", name) is None


async def test_reserved_names_are_refused(registry: AdapterRegistry) -> None:
    """HS-14: an adapter can't shadow the base model, in any spelling of case."""
    for name in ("SmolLM2-135M", "smollm2-135m"):
        with pytest.raises(NameInvalid) as caught:
            await registry.register("acme", name, stored(1), ADMIN)
        assert caught.value.code == "name_reserved"


async def test_only_the_exact_name_is_found(registry: AdapterRegistry) -> None:
    """HS-03: case, spaces, versions that don't exist and odd spellings of numbers find nothing."""
    await registry.register("acme", "A", stored(1), ADMIN)
    await registry.register("acme", "x" * 64, stored(2), ADMIN)

    assert await digest_of(registry, "acme", "A@1") == 1
    assert await digest_of(registry, "acme", "x" * 64) == 2
    for name in ("a", "A ", " A", "A-typo", "", "A@", "A@0", "A@01", "A@+1", "A@2", "A@1 ", "A@1@1", "A@" + "9" * 30,
                 "SmolLM2-135M:A", "A\n", "A@1\n", "A%"):  # fmt: skip
        assert await registry.resolve("acme", name) is None, name


async def test_other_tenants_see_nothing(registry: AdapterRegistry) -> None:
    """AU-03: another tenant's adapter is as absent as one that never was, in every call; equal names don't clash."""
    await registry.register("acme", "secret", stored(1), ADMIN)

    for name in ("secret", "secret@1", "random"):
        assert await registry.resolve("other", name) is None
    messages = set()
    for name in ("secret", "random"):
        for act in (
            registry.get("other", name), registry.replace("other", name, stored(9), ADMIN),
            registry.activate("other", name, Move(1), ADMIN), registry.retire("other", name, ADMIN),
        ):  # fmt: skip
            with pytest.raises(AdapterNotFound) as caught:
                await act
            messages.add(caught.value.message.replace(name, "…"))
    assert len(messages) == 1
    assert await registry.visible("other") == {}
    assert await registry.page("other") == ([], False)
    await registry.register("other", "secret", stored(2), ADMIN)
    assert await digest_of(registry, "acme", "secret") == 1
    assert await digest_of(registry, "other", "secret") == 2


async def test_own_wins_over_shared(registry: AdapterRegistry) -> None:
    """A shared adapter is everyone's until the tenant has one of that name; then also its versions are the tenant's."""
    await registry.register(SHARED, "pirate", stored(1), ADMIN)
    await registry.replace(SHARED, "pirate", stored(2), ADMIN)
    await registry.register(SHARED, "poet", stored(3), ADMIN)
    await registry.register("acme", "pirate", stored(4), ADMIN)

    assert await digest_of(registry, "other", "pirate") == 2
    assert await digest_of(registry, "other", "pirate@1") == 1
    assert await digest_of(registry, "acme", "pirate") == 4
    assert await registry.resolve("acme", "pirate@2") is None
    assert [(r.name, r.is_shared) for r in (await registry.visible("acme")).values()] == [
        ("pirate", False),
        ("poet", True),
    ]
    assert [(r.name, r.is_shared) for r in (await registry.visible("other")).values()] == [
        ("pirate", True),
        ("poet", True),
    ]
    await registry.retire("acme", "pirate", ADMIN)
    assert await digest_of(registry, "acme", "pirate") == 2


async def test_versions_stay_and_current_moves(registry: AdapterRegistry) -> None:
    """A replacement is a new version, current at once unless held back; old ones stay callable and can return."""
    await registry.register("acme", "pirate", stored(1), ADMIN)
    assert (await registry.replace("acme", "pirate", stored(2), ADMIN)).current == 2
    held = await registry.replace("acme", "pirate", stored(3), ADMIN, activate=False)

    assert (held.current, held.versions[-1].version) == (2, 3)
    assert [await digest_of(registry, "acme", f"pirate{at}") for at in ("", "@1", "@2", "@3")] == [2, 1, 2, 3]
    assert (await registry.activate("acme", "pirate", Move(1), ADMIN)).current == 1
    assert await digest_of(registry, "acme", "pirate") == 1
    with pytest.raises(AdapterNotFound):
        await registry.activate("acme", "pirate", Move(4), ADMIN)


async def test_activation_is_compare_and_swap(registry: AdapterRegistry) -> None:
    """Of ten that all saw version 1 as current, one activates and nine are told that they lost."""
    await registry.register("acme", "pirate", stored(1), ADMIN)
    for number in range(2, 12):
        await registry.replace("acme", "pirate", stored(number), ADMIN, activate=False)

    results = await asyncio.gather(
        *(registry.activate("acme", "pirate", Move(number, if_current=1), ADMIN) for number in range(2, 12)),
        return_exceptions=True,
    )

    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1
    assert sum(isinstance(result, VersionConflict) for result in results) == 9
    assert await digest_of(registry, "acme", "pirate") == won[0].current


async def test_one_name_is_won_once(registry: AdapterRegistry) -> None:
    """HS-05: ten uploads of one name at once: exactly one is made, nine are told that the name is taken."""
    results = await asyncio.gather(
        *(registry.register("acme", "pirate", stored(number), ADMIN) for number in range(1, 11)), return_exceptions=True
    )

    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1
    assert sum(isinstance(result, NameTaken) for result in results) == 9
    assert await registry.page("acme") == (won, False)
    assert await digest_of(registry, "acme", "pirate") == int(won[0].version().digest, 16)


async def test_a_deleted_name_is_won_once_too(registry: AdapterRegistry) -> None:
    """HS-05: the same for a name that was there before: its row is revived by one."""
    await registry.register("acme", "pirate", stored(1), ADMIN)
    await registry.retire("acme", "pirate", ADMIN)

    results = await asyncio.gather(
        *(registry.register("acme", "pirate", stored(number), ADMIN) for number in range(2, 12)), return_exceptions=True
    )

    assert sum(isinstance(result, NameTaken) for result in results) == 9
    assert len((await registry.get("acme", "pirate")).versions) == 1


async def test_replacements_are_strictly_ordered(registry: AdapterRegistry) -> None:
    """HS-05: ten replacements at once become ten versions; the last one is current."""
    await registry.register("acme", "pirate", stored(1), ADMIN)

    await asyncio.gather(*(registry.replace("acme", "pirate", stored(number), ADMIN) for number in range(2, 12)))

    adapter = await registry.get("acme", "pirate")
    assert [version.version for version in adapter.versions] == list(range(1, 12))
    assert adapter.current == 11


async def test_mixed_races_end_in_a_state_that_somebody_made(registry: AdapterRegistry) -> None:
    """HS-05: uploads, replacements and deletions of one name at once: only the expected refusals, and at the end one
    entry or none, whose digest is one of those that were sent."""

    few = asyncio.Semaphore(8)  # fewer than the connections of the pool, whose queue is not what is tested here

    async def act(number: int) -> None:
        kind = number % 3
        async with few:
            await change(kind, number)

    async def change(kind: int, number: int) -> None:
        try:
            if kind == 0:
                await registry.register("acme", "pirate", stored(number), ADMIN)
            elif kind == 1:
                await registry.replace("acme", "pirate", stored(number), ADMIN)
            else:
                await registry.retire("acme", "pirate", ADMIN)
        except (NameTaken, AdapterNotFound):
            pass

    await asyncio.gather(*(act(number) for number in range(60)))

    listed, _ = await registry.page("acme")
    assert len(listed) <= 1
    assert await digest_of(registry, "acme", "pirate") in ([int(listed[0].version().digest, 16)] if listed else [None])


async def test_delete_acts_at_once_and_numbers_are_not_used_again(registry: AdapterRegistry) -> None:
    """HS-03: after a deletion neither name nor version is found; a new upload of the name is another version, so that
    who pinned name@1 never gets other weights."""
    await registry.register("acme", "pirate", stored(1), ADMIN)
    assert await registry.retire("acme", "pirate", ADMIN) == [f"{1:064x}"]

    assert await registry.resolve("acme", "pirate") is None
    assert await registry.resolve("acme", "pirate@1") is None
    assert await registry.visible("acme") == {}
    with pytest.raises(AdapterNotFound):
        await registry.retire("acme", "pirate", ADMIN)
    again = await registry.register("acme", "pirate", stored(2), ADMIN)
    assert again.current == 2
    assert await registry.resolve("acme", "pirate@1") is None
    assert await digest_of(registry, "acme", "pirate@2") == 2


async def test_evicts_only_what_nobody_else_has(registry: AdapterRegistry) -> None:
    """Two tenants with equal files share a digest: deleting one's adapter doesn't evict the other's."""
    await registry.register("acme", "one", stored(1), ADMIN)
    await registry.register("other", "two", stored(1), ADMIN)

    assert await registry.retire("acme", "one", ADMIN) == []
    assert await registry.retire("other", "two", ADMIN) == [f"{1:064x}"]


async def test_all_of_a_tenant(registry: AdapterRegistry) -> None:
    """When a tenant goes, so do its adapters, and only those."""
    for number, name in enumerate(("a", "b", "c")):
        await registry.register("acme", name, stored(number), ADMIN)
    await registry.register("other", "d", stored(9), ADMIN)

    assert await registry.retire_all("acme", ADMIN) == [f"{number:064x}" for number in range(3)]
    assert await registry.visible("acme") == {}
    assert len(await registry.visible("other")) == 1


async def test_pages(registry: AdapterRegistry) -> None:
    """Lists come in the order of names, in pages."""
    for number, name in enumerate(("b", "c", "a")):
        await registry.register("acme", name, stored(number), ADMIN)

    first, has_more = await registry.page("acme", limit=2)
    assert ([adapter.name for adapter in first], has_more) == (["a", "b"], True)
    second, has_more = await registry.page("acme", after="b", limit=2)
    assert ([adapter.name for adapter in second], has_more) == (["c"], False)


async def test_every_change_moves_epochs_and_is_audited(
    registry: AdapterRegistry, epochs: Epochs, database: Database
) -> None:
    """A change of one tenant's adapters moves its epoch, of shared ones everybody's; a refused one moves nothing."""
    before = {tenant: await epochs.get(tenant) for tenant in ("acme", "other")}
    await registry.register("acme", "pirate", stored(1), ADMIN)
    assert (await epochs.get("acme") > before["acme"], await epochs.get("other") == before["other"]) == (True, True)

    at = {tenant: await epochs.get(tenant) for tenant in ("acme", "other")}
    with pytest.raises(NameTaken):
        await registry.register("acme", "pirate", stored(2), ADMIN)
    assert await epochs.get("acme") == at["acme"]
    await registry.register(SHARED, "poet", stored(2), ADMIN)
    assert all([await epochs.get(tenant) > at[tenant] for tenant in at])
    await registry.replace("acme", "pirate", stored(3), ADMIN)
    await registry.activate("acme", "pirate", Move(1, if_current=2), ADMIN)
    await registry.retire("acme", "pirate", ADMIN)

    entries = [entry for entry in await AuditLog(database).page("acme") if entry.action.startswith("adapter.")]
    assert [entry.action for entry in entries] == [
        "adapter.delete", "adapter.activate", "adapter.replace", "adapter.create"
    ]  # fmt: skip
    assert (entries[1].before, entries[1].after) == ({"current": 2}, {"current": 1})


def commit(store: DirectoryStore, weights: bytes) -> str:
    stage = store.stage()
    (stage / CONFIG_FILE).write_bytes(b"{}")
    (stage / WEIGHTS_FILE).write_bytes(weights)
    return store.commit(stage)


async def test_files_go_after_the_grace(registry: AdapterRegistry, tmp_path: Path) -> None:
    """HS-04: files go when no version refers to them and the grace is over since both retirement and last commit;
    those of live versions, also old ones, stay; what an upload left before it was registered goes too."""
    store = DirectoryStore(tmp_path)
    live, old, gone, lost = (commit(store, name) for name in (b"live", b"old", b"gone", b"lost"))
    await registry.register("acme", "a", Stored(old, SPEC, 1), ADMIN)
    await registry.replace("acme", "a", Stored(live, SPEC, 1), ADMIN)
    await registry.register("acme", "b", Stored(gone, SPEC, 1), ADMIN)
    await registry.retire("acme", "b", ADMIN)

    assert await registry.collect(store, grace_s=1000) == []
    for digest in store.digests():
        os.utime(store.path(digest), (0, 0))
    assert await registry.collect(store, grace_s=1000) == [lost]  # the retirement of `gone` is young
    assert commit(store, b"gone") == gone
    assert await registry.collect(store, grace_s=0.05) == []  # it was committed just now, for another upload
    await asyncio.sleep(0.1)
    assert await registry.collect(store, grace_s=0.05) == [gone]
    assert store.digests() == sorted([live, old])


async def test_state_survives_a_restart(registry: AdapterRegistry, database: Database, epochs: Epochs) -> None:
    """HS-16: what was registered is in the database: another process finds it."""
    await registry.register("acme", "pirate", stored(1), ADMIN)

    assert await digest_of(AdapterRegistry(database, epochs), "acme", "pirate") == 1
