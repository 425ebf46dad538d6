"""What stands in for a model where only the way to it is measured: InstantCore, behind the engine's real server and
socket; and upstream(), OpenAI's HTTP for gateways that ask one. Both answer at once. Run as a process:

    python -m bench.stand_ins engine ENDPOINT VOCAB_SIZE MAX_MODEL_LEN
    python -m bench.stand_ins upstream PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, cast

import msgspec
import uvloop

from engine.core import EngineCore
from engine.protocol import Accepted, Chunk, Generate, Ready, Stats
from engine.server import Link, Server

TOKEN = 80
MIN_SLEEP_S = 0.0005
UPSTREAM_ANSWER = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "bench",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok " * 8}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 8, "total_tokens": 20},
}  # fmt: skip


class InstantCore:
    """An EngineCore without a model. A request gets all its tokens in its first step, each in a chunk of its own; with
    a seed, one token every `seed` milliseconds."""

    can_run = True

    def __init__(self) -> None:
        self._running: dict[str, tuple[Generate, int, float]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, request: Generate) -> Accepted:
        self._running[request.id] = (request, 0, time.monotonic())
        return Accepted(request.id)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._running.pop(request_id, None)

    def step(self) -> list[Chunk]:
        now = time.monotonic()
        chunks = [chunk for row in list(self._running.values()) if row[2] <= now for chunk in self._advance(*row)]
        if not chunks:
            time.sleep(MIN_SLEEP_S)
        return chunks

    def _advance(self, request: Generate, num_made: int, due: float) -> list[Chunk]:
        num_wanted = request.params.max_tokens or 1
        num_new = 1 if request.params.seed else num_wanted
        chunks = [Chunk(request.id, 0, num_made + i, [TOKEN]) for i in range(num_new)]
        num_made += num_new
        if num_made < num_wanted:
            self._running[request.id] = (request, num_made, due + (request.params.seed or 0) / 1000)
        else:
            chunks[-1] = msgspec.structs.replace(chunks[-1], finish="length")
            del self._running[request.id]
        return chunks

    def keep(self, adapters: object) -> None: ...
    def warm(self, adapter: object) -> None: ...
    def keep_owners(self, owners: object) -> None: ...

    def stats(self, boot_id: str) -> Stats:
        names = [field for field in Stats.__struct_fields__[: -len(Stats.__struct_defaults__)] if field != "boot_id"]
        zeros: dict[str, Any] = dict.fromkeys(names, 0) | {"adapters": [], "running": len(self._running)}
        return Stats(boot_id=boot_id, **zeros)


def engine(endpoint: str, vocab_size: int, max_model_len: int) -> None:
    ready = Ready(
        boot_id="bench", model="bench", fingerprint="f", max_model_len=max_model_len, vocab_size=vocab_size,
        eos_token_ids=[0], block_size=16, num_blocks=4096, max_num_seqs=1024, max_lora_rank=512,
        adapter_memory_bytes=1 << 40, pin_memory_bytes=0, dtype="float32", device="cpu",
    )  # fmt: skip
    Server(cast(EngineCore, InstantCore()), ready, Link(endpoint, None, ready)).run()


async def upstream(port: int) -> None:
    """HTTP that answers the same text at once."""
    raw = json.dumps(UPSTREAM_ANSWER).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            if data.endswith(b"}") or data.startswith(b"GET"):
                self.transport.write(answer)

    await (await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)).serve_forever()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engine", endpoint, vocab_size, max_model_len]:
            engine(endpoint, int(vocab_size), int(max_model_len))
        case ["upstream", port]:
            uvloop.run(upstream(int(port)))
        case _:
            sys.exit(__doc__)
