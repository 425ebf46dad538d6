"""How the Triton kernels are launched: sizes of tiles, numbers of warps, into how many parts sums are split. Knows the
shapes of a model and of a card, no tensor and no kernel.

All follows from the number of tokens and the model's shapes, never from the mix of adapters or the contexts' lengths:
those may change under a captured CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.ops.cards import Card

RANK_BLOCK = 16
"""Ranks that one program of batched LoRA takes."""

MANY_TOKENS = 512
"""From here on, adapters have long segments, and products of 64 tokens pay."""

STEP_ELEMENTS = 4096
"""Of A, that a program of shrink takes at a time: more would not fit the registers of several programs."""

MAX_PARTS = 32

LONG_PART = 4096
"""Keys that one program of attention may take in a decode step before the others have ended for long."""

MAX_PROGRAMS = 16384
"""Of attention in decode: more parts of many rows would take more memory than their time is worth."""

WIDENED_TOKENS = 128
"""Above them, integer weights are widened before they are multiplied."""

SLAB_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class LoraShape:
    """Of both launches for one (fused) linear.

    slice_block    number of slices, rounded up to a power of two
    splits         parts of the sum over the inputs
    shrink_block   inputs per step of shrink;  expand_block: outputs per program of expand
    """

    slice_block: int
    splits: int
    shrink_block: int
    expand_block: int

    @staticmethod
    def tile_rows(num_tokens: int) -> int:
        return 64 if num_tokens > MANY_TOKENS else 16

    @classmethod
    def of(cls, num_slices: int, num_inputs: int, num_tokens: int) -> LoraShape:
        slice_block = power_of_2(num_slices)
        is_long = num_tokens > MANY_TOKENS
        block = min(128 if is_long else 256, STEP_ELEMENTS // (slice_block * RANK_BLOCK))
        block = min(block, max(16, power_of_2(num_inputs)))
        wanted = 16 if num_tokens <= 16 else 8 if num_tokens <= 64 else 4 if num_tokens <= 256 else 2
        splits = 1 if is_long else min(wanted, power_of_2(-(-num_inputs // block)))
        return cls(slice_block, splits, block, 128 if is_long else 256)


@dataclass(frozen=True)
class AttentionShape:
    """tile: rows of one product, (tokens, heads of a group); block: keys per step; parts of the context, of at least
    part_blocks · block keys each: a shorter context has fewer."""

    tile: int
    block: int
    parts: int
    num_warps: int
    num_stages: int
    part_blocks: int = 1

    @classmethod
    def of_decodes(cls, group: int, head_dim: int, num_tiles: int, max_keys: int, card: Card) -> AttentionShape:
        """Enough parts to occupy the card twice over where rows and KV heads alone do not; and where a row of the batch
        may have a long context (max_keys), so many that none keeps all others waiting."""
        parts, part_blocks = 1, 1
        while parts < MAX_PARTS and 2 * parts * num_tiles <= 2 * card.num_processors:
            parts *= 2
        block = 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32
        while parts < MAX_PARTS and parts * LONG_PART < max_keys and 2 * parts * num_tiles <= MAX_PROGRAMS:
            parts, part_blocks = 2 * parts, max(1, LONG_PART // 2 // block)
        return cls(max(16, power_of_2(group)), block, parts, 4, 2, part_blocks)

    @classmethod
    def of_chunks(cls, group: int, head_dim: int, card: Card) -> AttentionShape:
        """Sixty-four keys at a time where a warp group multiplies from shared memory; elsewhere operands are held in
        registers, and more than 32 would spill."""
        is_wide = card.has_large_memory and card.is_hopper_or_later
        block = 64 if is_wide or head_dim <= 64 else 32
        if head_dim <= 128:
            return cls(max(128, power_of_2(group)), block, 1, 8, 2)
        return cls(max(64, power_of_2(group)), 32, 1, 8, 2)


@dataclass(frozen=True)
class IntegerShape:
    """Of a linear with integer weights: tokens and outputs of a program; splits: parts of the sum over the inputs."""

    tokens: int
    outputs: int
    splits: int

    @classmethod
    def of(cls, num_tokens: int, num_outputs: int, num_inputs: int, chunk: int, card: Card) -> IntegerShape | None:
        """None where widening the weight first pays: its bytes are few beside so many tokens' products."""
        if num_tokens > WIDENED_TOKENS:
            return None
        tokens, outputs = min(64, max(16, power_of_2(num_tokens))), 64
        num_programs, num_chunks = -(-num_outputs // outputs) * -(-num_tokens // tokens), -(-num_inputs // chunk)
        splits = 1
        while splits < 16 and 8 * splits <= num_chunks and 2 * splits * num_programs <= 4 * card.num_processors:
            splits *= 2
        return cls(tokens, outputs, splits)

    @staticmethod
    def slab_outputs(num_inputs: int) -> int:
        """Outputs whose weights are widened at a time: what they take stays in the L2 cache until it is multiplied."""
        return max(64, SLAB_ELEMENTS // num_inputs // 64 * 64)


def power_of_2(number: int) -> int:
    """The smallest that is not below it."""
    return 1 << max(0, number - 1).bit_length()


def num_warps(block: int) -> int:
    """For a program that holds one row of `block` numbers."""
    return min(16, max(1, block // 512))
