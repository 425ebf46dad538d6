"""Step and Sampled: what the scheduler asks of the runner, and what comes back. Numbers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.protocol import TokenLogprobs
    from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: positions [start, start + num_tokens) are computed and their KV written.

    samples: the row reaches the end of sequence.tokens, so its last position's logits choose the next token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute now. Before it, and in this order, whole blocks are copied:

    stores   (block, host slot): blocks that have a new owner, whose old content is kept on the host
    copies   (source block, destination block)
    loads    (host slot, block): blocks that come back; no row of this step reads them
    """

    rows: tuple[Row, ...]
    copies: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class Draft:
    """A step under construction: rows, and the tokens that it has left."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self._rows: dict[Sequence, Row] = {}

    def add(self, sequence: Sequence) -> None:
        """As many of its tokens as are left."""
        pending = len(sequence.tokens) - sequence.num_computed
        num_tokens = min(pending, self.num_left)
        self._rows[sequence] = Row(sequence, sequence.num_computed, num_tokens, num_tokens == pending)
        self.num_left -= num_tokens

    def drop(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence, None)
        if row is not None:
            self.num_left += row.num_tokens

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(self._rows.values())


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of one row: the token chosen, and logprobs where asked. token_id is None if the row did not sample,
    or if its logits were not finite: then its request fails.

    prompt_logprobs: entries for the prompt positions computed in this step that have a successor in the prompt,
    i.e. entry j belongs to prompt token start + j + 1.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Runner(Protocol):
    """Turns a Step into tokens: one Sampled per row, in the order of the rows."""

    def run(self, step: Step) -> list[Sampled]: ...
