"""Progress: what a step has computed becomes tokens, chunks, known prefixes and forked choices. Knows no queue."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.lanes import Lanes
from engine.protocol import Chunk, Failed, FailureCode, FinishReason
from engine.running import Running
from engine.sequence import Phase, Request, Sequence
from engine.step import Row, Sampled


class Progress:
    """num_generated_tokens  ever.  copies  of blocks, for the next step: a new owner writes before it reads."""

    def __init__(self, pool: BlockPool, lanes: Lanes, running: Running) -> None:
        self.num_generated_tokens = 0
        self.copies: list[tuple[int, int]] = []
        self.outbox: list[Chunk | Failed] = []
        self._pool = pool
        self._lanes = lanes
        self._running = running

    def take_outbox(self) -> list[Chunk | Failed]:
        """What there is to say since the last time."""
        outbox, self.outbox = self.outbox, []
        return outbox

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        copies, self.copies = tuple(self.copies), []
        return copies

    def tell_done(self, request: Request) -> None:
        """Choices that the output which came with the request had completed."""
        for sequence in request.sequences:
            if sequence.phase is Phase.DONE:
                stop_id = sequence.tokens[-1] if sequence.is_stopped else None
                finish: FinishReason = "length" if stop_id is None else "stop"
                start = sequence.num_output
                self.outbox.append(Chunk(sequence.request_id, sequence.choice, start, [], finish, stop_id))

    def tell_failed(self, request: Request, code: FailureCode, text: str, retry_after_s: float | None) -> None:
        self.outbox.append(Failed(request.message.id, code, text, retry_after_s))

    def advance(self, request: Request, row: Row, result: Sampled) -> None:
        """The row's positions are computed; blocks that are full now may be found by their content."""
        sequence, pool = row.sequence, self._pool
        if request.prompt_logprobs is not None and result.prompt_logprobs:
            first = row.start + 1
            request.prompt_logprobs[first : first + len(result.prompt_logprobs)] = result.prompt_logprobs
        sequence.num_computed += row.num_tokens
        num_full = sequence.num_computed // pool.block_size
        if num_full > sequence.num_hashed and pool.enable_prefix_caching:
            pool.extend(sequence.hashes, sequence.hash_seed, sequence.tokens, num_full)
            for index in range(sequence.num_hashed, num_full):
                pool.register(sequence.blocks[index], sequence.hashes[index])
            sequence.num_hashed = num_full

    def append(self, request: Request, sequence: Sequence, result: Sampled) -> FinishReason | None:
        """One token more; why it was the last, if it was."""
        assert result.token_id is not None
        sequence.tokens.append(result.token_id)
        self.num_generated_tokens += 1
        self._lanes.bill(request, 0, 1)
        finish: FinishReason | None = None
        if sequence.is_stopped:
            finish = "stop"
        elif len(sequence.tokens) >= sequence.max_len:
            finish = "length"
        self.outbox.append(
            Chunk(
                sequence.request_id, sequence.choice, sequence.num_output - 1, [result.token_id], finish,
                result.token_id if finish == "stop" else None, sequence.num_cached,
                None if result.logprobs is None else [result.logprobs], request.prompt_logprobs,
            )
        )  # fmt: skip
        request.prompt_logprobs = None
        return finish

    def fork(self, request: Request, leader: Sequence) -> list[Sequence]:
        """The prompt is computed: the other choices go on from it. Full blocks are shared; the block that they go on
        writing is copied. Returns choices for which there is no row or block now: they find the prefix later."""
        request.has_forked = True
        others = [one for one in request.sequences if one is not leader and one.phase is not Phase.DONE]
        return [one for one in others if not self._fork_now(leader, one)]

    def _fork_now(self, leader: Sequence, sequence: Sequence) -> bool:
        pool = self._pool
        num_shared = min(sequence.num_prompt, sequence.num_tokens - 1)
        num_full = num_shared // pool.block_size
        num_new = pool.blocks_for(sequence.num_tokens) - num_full
        if not self._running.has_row or pool.num_free < num_new:
            return False
        shared = leader.blocks[:num_full]
        pool.share(shared)
        sequence.blocks = shared + pool.allocate(num_new)
        if num_shared % pool.block_size:
            self.copies.append((leader.blocks[num_full], sequence.blocks[num_full]))
        sequence.num_computed = num_shared
        sequence.num_hashed = num_full
        sequence.hashes = leader.hashes[:num_full]
        self._running.enter(sequence, is_fork=True)
        return True
