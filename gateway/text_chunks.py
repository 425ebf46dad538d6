"""Deltas → the chunks or the body of POST /v1/completions. Pure: no I/O."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gateway.answer import Answer, Delta
from gateway.chunks import Shape, Writer
from gateway.logprobs import TextLogprobs


class TextWriter(Writer):
    """Completions: choice j of prompt i has index i·n + j."""

    prefix = "cmpl-"
    chunk_object = whole_object = "text_completion"

    def __init__(self, answer: Answer, shape: Shape) -> None:
        super().__init__(answer, shape)
        self._logprobs: defaultdict[int, TextLogprobs] = defaultdict(lambda: TextLogprobs(self.names))
        self._waiting: list[Delta] = []
        self._echoed: set[int] = set()
        self._begun: set[int] = set()
        self._prompts = [self._prompt_text(i) for i in range(len(answer.prompt_ids))] if shape.echo else []

    def _prompt_text(self, prompt: int) -> str:
        """As the client wrote it; prompts of ids are decoded."""
        asked = self.answer.ask.prompts[prompt]
        text = getattr(asked, "text", None)
        return text if text is not None else self.names.tokenizer.decode(self.answer.prompt_ids[prompt])

    def opening(self) -> bytes:
        return b""

    def add(self, delta: Delta) -> bytes:
        """An echo with logprobs waits for its prompt's, which come with that prompt's first choice."""
        prompt = delta.choice // self.answer.ask.params.n
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        if self._must_wait(prompt):
            self._waiting.append(delta)
            return b""
        due = [waiting for waiting in self._waiting if not self._must_wait(waiting.choice // self.answer.ask.params.n)]
        self._waiting = [waiting for waiting in self._waiting if waiting not in due]
        return b"".join(self._one(delta) for delta in (*due, delta))

    def _must_wait(self, prompt: int) -> bool:
        return self.shape.echo and self.shape.logprobs and prompt not in self._prompt_logprobs

    def _one(self, delta: Delta) -> bytes:
        is_first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        text, logprobs = self._read(delta)
        if not (text or logprobs.tokens or delta.finish or delta.ids):
            return b""
        choice = {
            "index": delta.choice, "text": text, "logprobs": logprobs.as_dict() if self.shape.logprobs else None,
            "finish_reason": delta.finish,
        }  # fmt: skip
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.shape.token_ids:
            prompt = delta.choice // self.answer.ask.params.n
            choice |= {"token_ids": delta.ids} | (
                {"prompt_token_ids": self.answer.prompt_ids[prompt]} if is_first else {}
            )
        return self._chunk(choice)

    def _read(self, delta: Delta) -> tuple[str, TextLogprobs]:
        """The text and logprobs that this delta adds to its choice, the prompt's first if it is echoed."""
        logprobs = TextLogprobs(self.names)
        prompt = delta.choice // self.answer.ask.params.n
        text = delta.text
        if self.shape.echo and delta.choice not in self._echoed:
            self._echoed.add(delta.choice)
            text = self._prompts[prompt] + text
            if self.shape.logprobs:
                logprobs.add_prompt(self.answer.prompt_ids[prompt], self._prompt_logprobs[prompt])
        if self.shape.logprobs:
            shift = len(self._prompts[prompt]) if self.shape.echo else 0
            for token in delta.tokens:
                logprobs.add(token.id, shift + token.offset, token.logprobs)
        return text, logprobs

    def collect(self, delta: Delta) -> None:
        prompt = delta.choice // self.answer.ask.params.n
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        self._waiting.append(delta)

    def whole(self) -> bytes:
        for delta in self._waiting:
            text, logprobs = self._read(delta)
            self._text[delta.choice].append(text)
            self._logprobs[delta.choice].extend(logprobs)
            self._ids[delta.choice] += delta.ids
            if delta.finish is not None:
                self._finish[delta.choice] = {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}
        return self._whole([self._choice(index) for index in range(self.num_choices)])

    def _choice(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": "".join(self._text[index]),
            "logprobs": self._logprobs[index].as_dict() if self.shape.logprobs else None,
            **self._finish[index],
        }
        prompt = index // self.answer.ask.params.n
        if self.shape.prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs_of(prompt)
        if self.shape.token_ids:
            choice |= {"token_ids": self._ids[index], "prompt_token_ids": self.answer.prompt_ids[prompt]}
        return choice
