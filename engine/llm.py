"""LLM: the engine offline, in this process: prompts in, outputs out, the core that the server has. Not thread-safe.

llm = LLM("data/models/smollm2-135m-instruct")
pirate = llm.add_adapter("examples/adapters/pirate")
outputs = llm.generate(["Hello", "Hello"], SamplingParams(max_tokens=20), adapters=[None, pirate])
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Literal

from adapters.new_tokens import TOKENIZER_FILE, keep_new_tokens
from adapters.shards import gather
from adapters.spec import AdapterInvalid, AdapterRef, AdapterSpec, AdapterUnsupported
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, DirectoryStore
from adapters.validation import Limits, validate
from engine.build import build_core
from engine.config import EngineConfig, parse_size
from engine.model.config import ModelConfig
from engine.outputs import Job, Output
from engine.params import SamplingParams
from engine.protocol import Chunk, Generate, Stats
from engine.template import Message
from engine.text import Tokenizer
from engine.vocabulary import TokenizerError

Prompt = str | Sequence[int]
Swap = Literal["on", "off", "auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

LONG_LIST = 16
"""From so many prompts on, a terminal gets a progress bar."""
LOAD_WAIT_S = 0.1
ADAPTER_WAIT_S = 3600.0
"""Nobody waits at a screen: a slow disk is no reason to fail a list of prompts."""


class LLM:
    """A model in this process. Sizes are bytes or texts like "2GiB"; "auto" leaves them to the memory plan.

    Raises ConfigError where the model can't run or doesn't fit. Use it as a context manager, or close() it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Dtype = "auto",
        device: str = "auto",
        quantization: Literal["none", "int8", "int4"] = "none",
        quantization_group: int = 128,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_batched_tokens: int = 1024,
        kv_memory: int | str = "auto",
        adapter_memory: int | str = "auto",
        kv_host_bytes: int | str = "auto",
        kv_disk_dir: str | Path | None = None,
        kv_disk_bytes: int | str = "16GiB",
        swap: Swap = "auto",
        max_lora_rank: int = 64,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        config = EngineConfig(
            model=Path(model).expanduser(),
            device=device,
            dtype=dtype,
            quantization=quantization,
            quantization_group=quantization_group,
            max_model_len=max_model_len,
            kv_memory_bytes=parse_size(kv_memory),
            adapter_memory_bytes=parse_size(adapter_memory),
            kv_host_bytes=parse_size(kv_host_bytes),
            kv_disk_dir=None if kv_disk_dir is None else Path(kv_disk_dir).expanduser(),
            kv_disk_bytes=parse_size(kv_disk_bytes) or 0,
            swap=swap,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            block_size=block_size,
            max_lora_rank=max_lora_rank,
            enable_prefix_caching=enable_prefix_caching,
            adapter_wait_s=ADAPTER_WAIT_S,
            seed=seed,
        )
        self._shape = ModelConfig.from_dir(config.model).base_shape()
        self.tokenizer = Tokenizer(config.model)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._ids = count()
        with ExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="chorus-adapters-")))
            self._store = DirectoryStore(directory)
            self.config = replace(config, store_dir=directory)
            self._core, self.ready = build_core(self.config)
            stack.callback(self._core.close)
            self._at_close = stack.pop_all()

    @property
    def stats(self) -> Stats:
        return self._core.stats(self.ready.boot_id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapters: AdapterRef | Sequence[AdapterRef | None] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Output]:
        """One output per prompt, in order. A prompt is text or token ids; `params` and `adapters` are one for all or
        one per prompt, an adapter of None being the base model. show_progress None: for long lists on a terminal.

        Raises engine.protocol.Refused for a prompt that can't run and Broken for one that failed, and ends all others.
        """
        every: list[Any] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        refs = _one_each(adapters, len(every), "adapters")
        ids = [
            self._tokenizer(ref).encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt, ref in zip(every, refs, strict=True)
        ]
        return self._run(ids, params, refs, show_progress, starts_text=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapters: AdapterRef | Sequence[AdapterRef | None] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Output]:
        """As generate(), for a conversation (a list of {"role", "content"}) or a list of them, by the chat template."""
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if is_one else messages
        refs = _one_each(adapters, len(conversations), "adapters")
        ids = [
            self._tokenizer(ref).encode_chat(list(conversation))
            for conversation, ref in zip(conversations, refs, strict=True)
        ]
        return self._run(ids, params, refs, show_progress, starts_text=True)

    def add_adapter(self, path: str | Path) -> AdapterRef:
        """Takes in a copy of a PEFT adapter directory, checked as an upload is. Equal content gives an equal ref. A
        tokenizer.json in it brings its new tokens.

        Raises AdapterError (adapters.spec) if it is unsound, unsupported, too large, or doesn't fit this model.
        """
        source, stage = Path(path).expanduser(), self._store.stage()
        try:
            if not (source / CONFIG_FILE).is_file():
                raise AdapterInvalid("file_missing", f"{source} has no {CONFIG_FILE}", CONFIG_FILE)
            shutil.copyfile(source / CONFIG_FILE, stage / CONFIG_FILE)
            gather(source, stage / WEIGHTS_FILE, on_client=True)
            if (source / TOKENIZER_FILE).is_file():
                shutil.copyfile(source / TOKENIZER_FILE, stage / TOKENIZER_FILE)
            spec = validate(stage, self._shape, Limits(max_rank=self.config.max_lora_rank))
            keep_new_tokens(stage, spec.new_tokens)
            tokenizer = self._grown(spec)
            ref = AdapterRef(self._store.commit(stage), spec.rank, spec.packed_bytes, spec.num_added)
            self._tokenizers[ref.digest] = tokenizer
            return ref
        finally:
            self._store.discard(stage)

    def remove_adapter(self, ref: AdapterRef) -> None:
        """Forgets it: its memory and its file are freed."""
        self._tokenizers.pop(ref.digest, None)
        self._core.evict(ref.digest)
        self._store.delete(ref.digest)

    def close(self) -> None:
        """Ends its threads and deletes its adapter store; the memory goes with the object."""
        self._at_close.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _grown(self, spec: AdapterSpec) -> Tokenizer:
        try:
            return self.tokenizer.grown(spec.new_tokens)
        except TokenizerError as error:
            raise AdapterUnsupported("unsupported_vocabulary", error.message, TOKENIZER_FILE) from error

    def _tokenizer(self, adapter: AdapterRef | None) -> Tokenizer:
        return self.tokenizer if adapter is None else self._tokenizers.get(adapter.digest, self.tokenizer)

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapters: AdapterRef | Sequence[AdapterRef | None] | None,
        show_progress: bool | None,
        starts_text: bool,
    ) -> list[Output]:
        every_params = _one_each(SamplingParams() if params is None else params, len(prompts), "params")
        every_adapter = _one_each(adapters, len(prompts), "adapters")
        requests = [
            Generate(id=str(next(self._ids)), prompt=prompt, params=one, adapter=adapter)
            for prompt, one, adapter in zip(prompts, every_params, every_adapter, strict=True)
        ]
        jobs = [Job(request, self._tokenizer(request.adapter), starts_text) for request in requests]
        if show_progress is None:
            show_progress = len(jobs) >= LONG_LIST and sys.stderr.isatty()
        with _progress(len(jobs)) if show_progress else _no_progress() as advance:
            self._drive(jobs, advance)
        return [job.output for job in jobs]

    def _drive(self, jobs: list[Job], advance: Any) -> None:
        """Steps the core until every job is done. So many are in the engine at a time that none is ever refused for
        lack of room, and that adapters of the next ones load meanwhile."""
        todo, active = iter(jobs), dict[str, Job]()
        limit = min(4 * self.config.max_num_seqs, self.config.max_waiting, self.config.max_waiting_per_lane)
        try:
            while True:
                while len(active) < limit and (job := next(todo, None)) is not None:
                    active[job.request.id] = job
                    self._core.add(job.request)
                if not active:
                    return
                for chunk in self._core.step():
                    job = active.get(chunk.id)
                    if job is None:
                        continue
                    has_stopped = job.take(chunk)
                    if has_stopped and not job.is_done:
                        assert isinstance(chunk, Chunk)
                        self._core.abort(chunk.id, chunk.choice)
                    if job.is_done:
                        self._core.abort(chunk.id)
                        del active[chunk.id]
                        advance(job)
                if not self._core.can_run:
                    self._core.wait(LOAD_WAIT_S)
        finally:
            for request_id in active:
                self._core.abort(request_id)


def _is_ids(prompt: Prompt | Sequence[Prompt]) -> bool:
    return len(prompt) > 0 and isinstance(prompt[0], int)


def _one_each(given: Any, number: int, name: str) -> list[Any]:
    """One for all, or one per prompt (AdapterRef is no sequence)."""
    if given is None or isinstance(given, (SamplingParams, AdapterRef)):
        return [given] * number
    if len(given) != number:
        raise ValueError(f"{number} prompts but {len(given)} {name}")
    return list(given)


@contextmanager
def _no_progress() -> Iterator[Any]:
    yield lambda job: None


@contextmanager
def _progress(number: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[speed]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("generating", total=number, speed="")
        made = 0

        def advance(job: Job) -> None:
            nonlocal made
            made += sum(len(choice.token_ids) for choice in job.output.choices)
            elapsed = progress.tasks[task].elapsed or 0.0
            progress.update(task, advance=1, speed=f"{made / elapsed:.0f} tok/s" if elapsed else "")

        yield advance
