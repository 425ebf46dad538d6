"""TemplateSandbox: chat templates of strangers, rendered in child processes without our environment, with bounded CPU,
memory and output. Jinja's own sandbox keeps them from Python; nothing in it keeps a loop from running for ever, or a
string from growing, and no check can tell beforehand.

A child renders one conversation at a time, for milliseconds. The kernel ends it when it has used its CPU time, so a
busy machine fails no honest template; a new child takes its place. A template that broke a limit is refused unrendered
for a while: it costs everybody else little.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from engine.template import ChatTemplate, Message, TemplateFault

_ROOT = Path(__file__).parent.parent
_CACHED = 32
_KNOWN_SLOW = 1000
_SAMPLES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "Hello!"}],
    [{"role": role, "content": f"I am the {role}."} for role in ("user", "assistant", "user")],
)  # fmt: skip


@dataclass(frozen=True)
class TemplateLimits:
    """Of one rendering: CPU and wall seconds, bytes of memory, characters of text; and how long a template that broke
    one of them is refused."""

    cpu_s: float = 1.0
    wall_s: float = 15.0
    memory_bytes: int = 512 << 20
    max_chars: int = 8 << 20
    pause_s: float = 30.0


class TemplateSandbox:
    """Thread-safe; `num_children` conversations at a time, others wait. `variables`, `special` and `tags` are those of
    ChatTemplate."""

    def __init__(
        self, variables: Mapping[str, str], special: Iterable[str], tags: Iterable[str],
        limits: TemplateLimits | None = None, num_children: int = 2,
    ) -> None:  # fmt: skip
        self._limits = limits or TemplateLimits()
        setting = {"variables": dict(variables), "special": list(special), "tags": list(tags)}
        self._setting = setting | {"limits": asdict(self._limits)}
        self._free: list[_Child | None] = [None] * num_children
        self._turn = threading.Semaphore(num_children)
        self._lock = threading.Lock()
        self._slow: OrderedDict[bytes, float] = OrderedDict()

    def render(
        self, source: str, messages: list[Message], variables: Mapping[str, Any],
        controls: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ) -> tuple[str, str]:  # fmt: skip
        """As ChatTemplate.render, with further special tokens and tags. Blocks for as long as a rendering may take.
        Raises TemplateFault."""
        mark = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        if self._slow.get(mark, 0.0) > time.monotonic():
            raise TemplateFault("the chat template took more time or memory than is allowed, a moment ago")
        request = {"source": source, "messages": messages, "variables": dict(variables), "controls": controls}
        with self._child() as child:
            answer = child.ask(request, self._limits.wall_s)
        if answer is None:
            with self._lock:
                self._slow[mark] = time.monotonic() + self._limits.pause_s
                while len(self._slow) > _KNOWN_SLOW:
                    self._slow.popitem(last=False)
            raise TemplateFault("the chat template took more time or memory than is allowed")
        if "fault" in answer:
            raise TemplateFault(answer["fault"])
        return answer["text"], answer["mark"]

    def check(self, source: str) -> None:
        """It can be read, and renders plain conversations within the limits. Raises TemplateFault."""
        for messages in _SAMPLES:
            for generate in (True, False):
                self.render(source, messages, {"add_generation_prompt": generate})

    def close(self) -> None:
        """Ends the children; nobody may render any more."""
        with self._lock:
            for child in self._free:
                if child is not None:
                    child.end()
            self._free = [None] * len(self._free)

    @contextmanager
    def _child(self) -> Iterator[_Child]:
        """One that nobody else uses meanwhile."""
        with self._turn:
            with self._lock:
                child = self._free.pop()
            try:
                if child is None or not child.is_alive:
                    child = _Child(self._setting)
                yield child
            finally:
                with self._lock:
                    self._free.append(child)


class _Child:
    """A process that renders; one question at a time."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={"PYTHONPATH": str(_ROOT)},
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        with suppress(BrokenPipeError):
            _write(self._input, setting)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], wall_s: float) -> dict[str, Any] | None:
        """None when it broke a limit; the child is then gone."""
        try:
            _write(self._input, request)
            ready, _, _ = select.select([self._output], [], [], wall_s)
            if ready and (answer := _read(self._output)) is not None:
                return answer
        except BrokenPipeError:
            pass
        except BaseException:
            self.end()
            raise
        self.end()
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._input, self._output):
            with suppress(BrokenPipeError):
                stream.close()


def _write(stream: IO[bytes], value: Mapping[str, Any]) -> None:
    data = json.dumps(value).encode()
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def _read(stream: IO[bytes]) -> dict[str, Any] | None:
    """None at the end of the stream."""
    length = stream.read(4)
    data = stream.read(int.from_bytes(length, "little")) if len(length) == 4 else b""
    return dict(json.loads(data)) if data else None


def _limit(limits: TemplateLimits) -> None:
    for kind, bound in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(kind, (bound, bound))
    os.nice(5)  # streams that are being answered go first


def main() -> None:
    """The child: a setting, then conversations until the stream ends. What takes too long, the kernel ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    setting = _read(source)
    if setting is None:
        return
    limits = TemplateLimits(**setting.pop("limits"))
    templates: OrderedDict[str, ChatTemplate] = OrderedDict()
    _limit(limits)
    while (request := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        try:
            answer = _render(templates, setting, request, limits)
        except (MemoryError, RecursionError):
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(target, answer)


def _render(
    templates: OrderedDict[str, ChatTemplate], setting: Mapping[str, Any], request: Mapping[str, Any],
    limits: TemplateLimits,
) -> dict[str, str]:  # fmt: skip
    source = request["source"]
    try:
        if source not in templates:
            templates[source] = ChatTemplate(source, **setting)
            while len(templates) > _CACHED:
                templates.popitem(last=False)
        templates.move_to_end(source)
        template = templates[source].grown(*request["controls"])
        text, mark = template.render(request["messages"], request["variables"])
    except TemplateFault as fault:
        return {"fault": str(fault)[:1000]}
    if len(text) > limits.max_chars:
        return {"fault": f"it makes a text of {len(text)} characters, at most {limits.max_chars} are allowed"}
    return {"text": text, "mark": mark}


if __name__ == "__main__":
    main()
