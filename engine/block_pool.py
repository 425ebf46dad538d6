"""BlockPool: paged KV memory by numbers: reference counts, and a prefix cache keyed by content. Knows no tensors.

A block is blank (free, content worthless), cached (free, content may be asked for again; least recently used goes
first) or used (reference count > 0, hashed or not). Only full, computed blocks have a hash.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

DIGEST_BYTES = 32
OWNER_BYTES = 16
EPHEMERAL = b"\x01"
"""Ends every key of a chain that may not be written to a disk."""


def mark_of(owner: bytes = b"", ephemeral: bool = False) -> bytes:
    """What every key of a chain ends with: whose block it is, and whether it may be written to a disk."""
    return owner.ljust(OWNER_BYTES, b"\0") + (EPHEMERAL if ephemeral else b"")


UNMARKED = mark_of()


def prefix_seed(fingerprint: str, dtype: str, adapter: str, salt: str, mark: bytes = UNMARKED) -> bytes:
    """The start of every hash chain: equal tokens share KV only if all five are equal. Parts are length-prefixed, so
    that no two different tuples are written alike."""
    digest = hashlib.sha256(b"chorus-kv-1")
    for part in (fingerprint, dtype, adapter, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest() + mark


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block: SHA-256(key of all before it ‖ its token ids, 4 bytes each), and the chain's mark."""
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest() + parent[DIGEST_BYTES:]


def is_ephemeral(key: bytes) -> bool:
    """Its block may not be written to a disk."""
    return len(key) > DIGEST_BYTES + OWNER_BYTES


def owner_in(key: bytes) -> bytes:
    """Whose block it is."""
    return key[DIGEST_BYTES : DIGEST_BYTES + OWNER_BYTES]


class BlockPool:
    """All blocks, by index. Every block is in exactly one of: blank, cached, used.

    on_evict   told (block, key) when a cached block is given to somebody else: its content lasts until the next step
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._refs = [0] * num_blocks
        self.on_evict: Callable[[int, bytes], None] | None = None
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: blank ones and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def extend(self, hashes: list[bytes], seed: bytes, tokens: list[int], count: int) -> None:
        """Grows a chain to the first `count` blocks of `tokens`; what is there already is not computed again."""
        size = self.block_size
        parent = hashes[-1] if hashes else seed
        for index in range(len(hashes), count):
            parent = chain(parent, tokens[index * size : (index + 1) * size])
            hashes.append(parent)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` ≤ num_free blocks of unknown content, forgetting the least recently used prefixes."""
        assert count <= self.num_free
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                key = self._forget(block)
                if self.on_evict is not None:
                    self.on_evict(block, key)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more user of blocks that are used or cached."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One user less. The last blocks of a prefix become the oldest: a prefix is forgotten from its end."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0
            if self._refs[block] == 0:
                if self._hash_of[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of this chain. They are not taken: `share` does that."""
        blocks = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these would leave num_free when shared."""
        return sum(self._refs[block] == 0 for block in blocks)

    def register(self, block: int, key: bytes) -> None:
        """The content of this used block is complete and computed. Of equal contents the first stays known."""
        assert self._refs[block] > 0
        if self._hash_of[block] is None and key not in self._block_of:
            self._hash_of[block] = key
            self._block_of[key] = block

    def forget(self, owners: Collection[bytes]) -> None:
        """Nobody finds the blocks of these owners any more; used ones stay with their users."""
        for key in [key for key in self._block_of if owner_in(key) in owners]:
            block = self._block_of[key]
            self._forget(block)
            if self._refs[block] == 0:
                del self._cached[block]
                self._blank.append(block)

    def reset(self) -> None:
        """Forgets every prefix; used blocks stay with their users."""
        for key, block in self._block_of.items():
            assert self._hash_of[block] == key
            self._hash_of[block] = None
        self._block_of.clear()
        self._blank.extend(self._cached)
        self._cached.clear()

    def check(self, users: Iterable[list[int]]) -> None:
        """Asserts every invariant, given the block tables of all users. For tests: O(num_blocks)."""
        expected = [0] * self.num_blocks
        for table in users:
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                expected[block] += 1
        assert expected == self._refs, "reference counts differ from the tables"
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a block is free twice"
        assert set(free) == {block for block, refs in enumerate(self._refs) if refs == 0}
        assert all(self._hash_of[block] is None for block in self._blank)
        assert all(self._hash_of[block] is not None for block in self._cached)
        assert {block: key for key, block in self._block_of.items()} == {
            block: key for block, key in enumerate(self._hash_of) if key is not None
        }

    def _forget(self, block: int) -> bytes:
        key = self._hash_of[block]
        assert key is not None
        del self._block_of[key]
        self._hash_of[block] = None
        return key
