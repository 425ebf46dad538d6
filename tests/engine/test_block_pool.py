"""BlockPool: conservation, the prefix cache, and its keys."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool, chain, is_ephemeral, mark_of, owner_in, prefix_seed

SEED = prefix_seed("model", "float32", "", "")


def hashes(pool: BlockPool, tokens: list[int], seed: bytes = SEED) -> list[bytes]:
    found: list[bytes] = []
    pool.extend(found, seed, tokens, len(tokens) // pool.block_size)
    return found


def store(pool: BlockPool, tokens: list[int], seed: bytes = SEED) -> list[int]:
    """The blocks of a computed prompt, registered and in use."""
    keys = hashes(pool, tokens, seed)
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    return blocks


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_every_block_is_blank_cached_or_used(data: st.DataObject) -> None:
    """Reference counts, free blocks and the index of contents agree after every operation (KV-05)."""
    pool = BlockPool(8, 2)
    users: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 40))):
        tokens = data.draw(st.lists(st.integers(0, 2), max_size=8))
        keys = hashes(pool, tokens)
        match data.draw(st.sampled_from(["take", "take", "drop", "reset"])):
            case "take":
                hits = pool.match(keys)
                if len(keys) - len(hits) + pool.count_free(hits) > pool.num_free:
                    continue
                pool.share(hits)
                table = hits + pool.allocate(len(keys) - len(hits))
                for block, key in zip(table, keys, strict=True):
                    pool.register(block, key)
                users.append(table)
            case "drop" if users:
                pool.release(users.pop(data.draw(st.integers(0, len(users) - 1))))
            case "reset":
                pool.reset()
        pool.check(users)
        assert pool.num_used + pool.num_free == pool.num_blocks
    for table in users:
        pool.release(table)
    assert pool.num_free == pool.num_blocks


def test_a_recycled_block_loses_its_hash() -> None:
    """When a block is given to somebody else, its old prefix is not found any more (PC-07)."""
    pool = BlockPool(4, 4)
    first = list(range(16))
    pool.release(store(pool, first))
    assert len(pool.match(hashes(pool, first))) == 4

    store(pool, list(range(100, 108)))

    assert len(pool.match(hashes(pool, first))) == 2, "forgotten from its end"
    store(pool, list(range(200, 208)))
    assert pool.match(hashes(pool, first)) == []


def test_least_recently_used_prefixes_go_first() -> None:
    """A prefix that was used again outlives one that was not."""
    pool = BlockPool(4, 4)
    old, new = list(range(8)), list(range(50, 58))
    pool.release(store(pool, old))
    pool.release(store(pool, new))
    hits = pool.match(hashes(pool, old))
    pool.share(hits)
    pool.release(hits)

    pool.allocate(2)

    assert len(pool.match(hashes(pool, old))) == 2
    assert pool.match(hashes(pool, new)) == []


def test_blank_blocks_are_given_before_known_ones() -> None:
    """Nothing known is forgotten while worthless blocks are free."""
    pool = BlockPool(4, 4)
    tokens = list(range(8))
    pool.release(store(pool, tokens))

    pool.allocate(2)

    assert len(pool.match(hashes(pool, tokens))) == 2


def test_of_equal_contents_the_first_stays_known() -> None:
    """Two sequences that compute the same prompt at the same time each keep their own blocks."""
    pool = BlockPool(8, 4)
    tokens = list(range(8))
    first, second = store(pool, tokens), store(pool, tokens)

    assert pool.match(hashes(pool, tokens)) == first
    pool.release(second)
    pool.check([first])
    pool.release(first)
    pool.check([])


def test_adapter_salt_model_and_dtype_are_part_of_the_key() -> None:
    """Equal tokens share KV only under equal weights and salt (PC-02, PC-03); the parts can't be shifted into each
    other."""
    parts = [
        ("m", "bf16", "", ""), ("m", "fp32", "", ""), ("n", "bf16", "", ""), ("m", "bf16", "a", ""),
        ("m", "bf16", "", "a"), ("mb", "f16", "", ""), ("m", "bf16", "ab", "c"), ("m", "bf16", "a", "bc"),
    ]  # fmt: skip

    assert len({prefix_seed(*one) for one in parts}) == len(parts)


def test_ephemeral_chains_are_marked_and_apart() -> None:
    """Every key of an ephemeral request says that its block may not be written to a disk, and none of them is the key
    of a request that may."""
    pool, tokens = BlockPool(8, 2), list(range(8))
    marked = hashes(pool, tokens, prefix_seed("model", "float32", "", "", mark_of(ephemeral=True)))
    plain = hashes(pool, tokens)

    assert all(map(is_ephemeral, marked))
    assert not any(map(is_ephemeral, plain))
    assert not {key[:32] for key in marked} & {key[:32] for key in plain}


def test_an_owners_blocks_are_forgotten() -> None:
    """Cached ones are blank again, used ones stay with their users and are found by nobody; other owners' stay known,
    also of equal tokens."""
    pool, mine, other = BlockPool(12, 2), b"m" * 16, b"o" * 16
    seeds = {owner: prefix_seed("model", "float32", "", "", mark_of(owner)) for owner in (mine, other)}
    tables = {owner: store(pool, [1, 2, 3, 4], seed) for owner, seed in seeds.items()}
    used = store(pool, [5, 6], seeds[mine])
    assert {owner_in(key) for key in hashes(pool, [1, 2, 3, 4], seeds[mine])} == {mine}
    for table in tables.values():
        pool.release(table)
    pool.forget({mine})
    pool.check([used])

    assert pool.match(hashes(pool, [1, 2, 3, 4], seeds[mine])) == []
    assert pool.match(hashes(pool, [5, 6], seeds[mine])) == []
    assert pool.match(hashes(pool, [1, 2, 3, 4], seeds[other])) == tables[other]
    pool.release(used)
    pool.check([])


def test_crafted_collisions_do_not_collide() -> None:
    """Keys are SHA-256 of the ids: neighbours that a polynomial hash confuses (+31, −1), ids that Python's hash
    confuses, reordered and shifted blocks, and 10⁵ random blocks all differ (PC-09)."""
    keys = [
        chain(SEED, tokens)
        for tokens in ([1, 100, 5], [2, 69, 5], [0, 1], [1, 0], [0], [0, 0], [2**31 - 1], [2**31 - 2], [2**31])
    ]
    keys += [chain(chain(SEED, [1, 2]), [3]), chain(chain(SEED, [1]), [2, 3]), chain(SEED, [1, 2, 3])]
    assert len(set(keys)) == len(keys)
    assert len({key[:32] for key in keys}) == len(keys)

    many = {chain(SEED, [index % 317, index // 317, index % 7]) for index in range(100_000)}

    assert len(many) == 100_000


def test_a_chain_grows_without_hashing_its_beginning_again() -> None:
    """Extending costs the new blocks only."""
    pool = BlockPool(4, 2)
    grown: list[bytes] = []
    pool.extend(grown, SEED, [1, 2, 3, 4], 1)
    pool.extend(grown, SEED, [-1, -1, 3, 4], 2)  # the first block is not read any more

    assert grown == hashes(pool, [1, 2, 3, 4])
