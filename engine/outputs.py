"""Output and Completion: what LLM.generate returns. Job: one request under way, growing its output from chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.protocol import Broken, Chunk, Failed, FinishReason, Generate, TokenLogprobs
from engine.text import Tokenizer
from engine.text_stream import TextStream


@dataclass
class Completion:
    """One choice. token_ids end with the token that completed a stop, if one did; `logprobs` are parallel to them.

    stop_reason   the stop string or stop token id that ended it, None for end-of-sequence and length
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class Output:
    """The answer to one prompt; with n = 1, `choices[0]` is all of it and its fields are here too.

    num_cached_tokens   prompt tokens that the prefix cache gave
    prompt_logprobs     one entry per prompt token, None for the first; None if they were not asked for
    """

    prompt_token_ids: list[int]
    choices: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.choices[0].logprobs


class Job:
    """One request under way and the output that it grows."""

    def __init__(self, request: Generate, tokenizer: Tokenizer, starts_text: bool) -> None:
        self.request = request
        params = request.params
        logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.output = Output(
            request.prompt,
            [Completion(logprobs=None if logprobs is None else []) for _ in range(params.n)],
        )
        self._streams = [TextStream(tokenizer, params, starts_text=starts_text) for _ in range(params.n)]

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.output.choices)

    def take(self, chunk: Chunk | Failed) -> bool:
        """Has a stop string ended a choice that the engine would go on with? Raises Broken if the request failed."""
        if isinstance(chunk, Failed):
            raise Broken(chunk.code, chunk.message, chunk.retry_after_s, chunk.param)
        output, choice, stream = self.output, self.output.choices[chunk.choice], self._streams[chunk.choice]
        if chunk.prompt_logprobs is not None:
            output.prompt_logprobs = chunk.prompt_logprobs
        output.num_cached_tokens = max(output.num_cached_tokens, chunk.num_cached_tokens)
        if stream.finished:
            return False
        delta = stream.push(chunk)
        kept = delta.num_tokens - len(choice.token_ids)
        choice.text += delta.text
        choice.token_ids += chunk.ids[:kept]
        if choice.logprobs is not None and chunk.logprobs is not None:
            choice.logprobs += chunk.logprobs[:kept]
        choice.finish_reason, choice.stop_reason = delta.finish, delta.stop_reason
        return stream.finished and chunk.finish is None
