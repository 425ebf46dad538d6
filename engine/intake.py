"""Intake: a Generate message becomes a Request with its sequences, or is refused at once. Knows no queue."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from engine.block_pool import OWNER_BYTES, mark_of, prefix_seed
from engine.lane import Lane
from engine.params import ParamsError
from engine.protocol import Generate, Refused
from engine.sequence import Phase, Request, Sequence

PRIORITIES = (0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What scheduling needs to know about the engine (see EngineConfig for the shared names).

    fingerprint, dtype   of the base model and its KV, with the order of a block's bytes: part of every key of a block
    ageing_s             a lane's first request that waits so long without service is lifted to the class above
    adapter_cost_per_mib what a lane is charged for an adapter that is read for it, in input tokens
    max_bypass           so many admissions may pass a request for which blocks are short; then it is next
    max_adapter_bypass   so many adapter requests may pass an adapter for which memory is short; then it is next
    lookahead            requests looked at in one round of admission
    max_demands          adapters that may be demanded at a time by requests whose turn it is
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    dtype: str = ""
    max_num_seqs: int = 64
    max_batched_tokens: int = 1024
    max_waiting: int = 8192
    adapter_wait_s: float = 10.0
    ageing_s: float = 30.0
    adapter_cost_per_mib: float = 4.0
    seed: int = 0
    max_bypass: int = 16
    max_adapter_bypass: int = 4
    lookahead: int = 32
    max_demands: int = 8


class Intake:
    """Checks requests against the model and the KV memory."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
        self._config = config
        self._num_slots = num_blocks * block_size
        self._num_arrived = 0

    def check(self, message: Generate) -> None:
        """Raises Refused for what can never run."""
        try:
            message.params.check_vocabulary(self._vocab_size(message))
        except ParamsError as error:
            raise Refused("invalid_request", error.message, param=error.param) from None
        if message.priority not in PRIORITIES or not message.weight > 0:
            raise Refused("invalid_request", "priority must be 0, 1 or 2 and weight above 0")
        if len(message.owner) not in (0, OWNER_BYTES):
            raise Refused("invalid_request", f"an owner has {OWNER_BYTES} bytes")
        if not message.prompt:
            raise Refused("invalid_request", "the prompt is empty", param="prompt")
        self._check_ids(message, message.prompt, "prompt")
        self._check_length(message)
        self._check_outputs(message)

    def request(self, message: Generate, lane: Lane, now: float) -> Request:
        """Builds the sequences of a checked message. Choices that its outputs complete are DONE from the start."""
        self._num_arrived += 1
        params = message.params
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= frozenset(self._config.eos_token_ids)
        adapter = message.adapter.digest if message.adapter else ""
        config = self._config
        mark = mark_of(message.owner, message.ephemeral)
        hash_seed = prefix_seed(config.fingerprint, config.dtype, adapter, message.cache_salt, mark)
        request = Request(message, lane, None if message.timeout_s is None else now + message.timeout_s)
        for choice in range(params.n):
            sequence = Sequence(
                request_id=message.id, choice=choice, tokens=[*message.prompt, *_output(message, choice)],
                num_prompt=len(message.prompt), params=params, seed=self._seed(message), adapter=message.adapter,
                cache_salt=message.cache_salt, stop_ids=stop_ids, max_len=self._max_len(message),
                lane_name=message.lane, waits_since=now,
                rank=(message.priority, self._num_arrived, choice), hash_seed=hash_seed,
            )  # fmt: skip
            if sequence.is_stopped or sequence.num_tokens >= sequence.max_len:
                sequence.phase = Phase.DONE
            request.sequences.append(sequence)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(message.prompt)
        return request

    def _max_len(self, message: Generate) -> int:
        limit = min(self._config.max_model_len, self._num_slots + 1)  # the last token needs no KV
        if message.params.max_tokens is not None:
            limit = min(limit, len(message.prompt) + message.params.max_tokens)
        return limit

    def _seed(self, message: Generate) -> int:
        """Of a request without one: drawn from the engine's seed and the request's id, so that a replay repeats it."""
        if message.params.seed is not None:
            return message.params.seed
        digest = hashlib.sha256(f"{self._config.seed}:{message.id}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def _vocab_size(self, message: Generate) -> int:
        """With the adapter's own tokens; an adapter that has fewer than the message says does not load."""
        return self._config.vocab_size + (message.adapter.num_added if message.adapter else 0)

    def _check_ids(self, message: Generate, ids: list[int], param: str) -> None:
        size = self._vocab_size(message)
        if min(ids) < 0 or max(ids) >= size:
            raise Refused("invalid_request", f"token ids must be in [0, {size})", param=param)

    def _check_outputs(self, message: Generate) -> None:
        outputs = message.outputs or []
        if len(outputs) > message.params.n:
            raise Refused("invalid_request", "more outputs than choices", param="outputs")
        room = self._max_len(message) - len(message.prompt)
        for ids in outputs:
            if ids:
                self._check_ids(message, ids, "outputs")
                if len(ids) > room:
                    raise Refused("invalid_request", f"an output has more than {room} tokens", param="outputs")

    def _check_length(self, message: Generate) -> None:
        longest = self._config.max_model_len
        num_prompt = len(message.prompt)
        if num_prompt + 1 > longest:
            text = f"the prompt has {num_prompt} tokens; with one of output at most {longest} fit the context"
            raise Refused("prompt_too_long", text, param="prompt")
        num_needed = min(num_prompt + (message.params.max_tokens or 1), longest) - 1
        if num_needed > self._num_slots:
            text = f"prompt and max_tokens need KV memory for {num_needed} tokens; it holds {self._num_slots}"
            raise Refused("prompt_too_long", text, param="prompt")


def _output(message: Generate, choice: int) -> list[int]:
    outputs = message.outputs or []
    return outputs[choice] if choice < len(outputs) else []
