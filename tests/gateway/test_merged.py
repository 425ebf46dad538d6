"""joined(): fewer chunks say the same."""

from __future__ import annotations

from engine.protocol import Chunk, TokenLogprobs
from gateway.merged import joined


def test_tokens_that_follow_each_other_are_one_chunk() -> None:
    """Of one choice of one prompt; what it began with and how it ended stay."""
    first = Chunk("a", 0, 0, [1], num_cached_tokens=7, prompt_logprobs=[None])
    found = joined([(0, first), (0, Chunk("a", 0, 1, [2])), (0, Chunk("a", 0, 2, [3, 4], finish="length"))])

    whole = Chunk("a", 0, 0, [1, 2, 3, 4], finish="length", num_cached_tokens=7, prompt_logprobs=[None])
    assert found == [(0, whole)]
    assert first.ids == [1], "the engine's own stays as it was"


def test_what_says_more_stays_by_itself() -> None:
    """Logprobs belong to their tokens, a stop token to its chunk, choices and prompts are apart."""
    logprobs = [TokenLogprobs(-1.0, [], [])]
    chunks = [
        (0, Chunk("a", 0, 0, [1])), (0, Chunk("a", 1, 0, [1])), (1, Chunk("b", 1, 0, [1])),
        (1, Chunk("b", 1, 1, [2], logprobs=logprobs)), (1, Chunk("b", 1, 2, [3])),
        (1, Chunk("b", 1, 3, [3], finish="stop", stop_id=3)),
    ]  # fmt: skip

    assert joined(list(chunks)) == chunks
