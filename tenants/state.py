"""Redis as the gateway uses it: connect(), an answer within a second or RedisUnavailable. Knows no key.

Scripts, which every request needs, share one connection (tenants.line). Other commands have connections of their own:
the second is Redis's, it begins when a command is sent. Before that, commands wait for one of the connections, for as
long as those that have one get answers.

Values are str (decode_responses). A server that was restarted may have forgotten its last second, and so may one that
took over: `generation` moves whenever a connection finds another server than before, and caches that trust what Redis
said are to be read anew.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import fakeredis
import hiredis
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    MaxConnectionsError,
    NoScriptError,
    ResponseError,
    TimeoutError,
)

from tenants.line import Line, RedisUnavailable, error_of
from tenants.patience import Deadline, Turns, TurnsStopped

__all__ = ["Argument", "Client", "RedisUnavailable", "Script", "connect"]

Argument = str | int | float | bytes
ANSWER_S = 0.8
"""A command without an answer after this time counts as an outage."""
MEMORY_URL = "memory://"
"""An own server inside this process, for the start without redis-server: one worker, nothing survives it."""


async def _answered(work: Awaitable[Any]) -> Any:
    try:
        async with Deadline(ANSWER_S):
            return await work
    except (ConnectionError, TimeoutError, MaxConnectionsError, AuthenticationError, OSError) as error:
        raise RedisUnavailable(f"Redis does not answer: {type(error).__name__}") from error
    except ResponseError as error:
        meant = error_of(str(error))
        raise meant if isinstance(meant, RedisUnavailable) else error from None


async def _in_turn(turns: Turns, send: Callable[[], Awaitable[Any]]) -> Any:
    try:
        await turns.take()
    except TurnsStopped as error:
        raise RedisUnavailable(f"Redis does not answer: {error}") from error
    has_worked = True
    try:
        return await _answered(send())
    except RedisUnavailable:
        has_worked = False
        raise
    finally:
        turns.give(has_worked=has_worked)


class _GuardedPipeline(Pipeline):  # type: ignore[misc]
    turns: Turns

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        result: list[Any] = await _in_turn(self.turns, lambda: super(_GuardedPipeline, self).execute(raise_on_error))
        return result


class Client(Redis):  # type: ignore[misc]
    """redis.asyncio.Redis whose every command, once sent, answers or raises RedisUnavailable within ANSWER_S."""

    turns: Turns
    line: Line
    generation = 0
    _run_id = ""

    def send(self, *command: Argument) -> asyncio.Future[Any]:
        """For what every request needs: on the line that all share, whose turns are those of the event loop."""
        return self.line.send(*command)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.line.close()
        await super().aclose(close_connection_pool)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await _in_turn(self.turns, lambda: super(Client, self).execute_command(*args, **options))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        pipe = _GuardedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipe.turns = self.turns
        return pipe

    async def greet(self, connection: Any) -> None:
        """At every new connection: is this still the server that we knew?"""
        await connection.on_connect_check_health()
        await connection.send_command("INFO", "server", check_health=False)
        text = await connection.read_response()
        text = text.decode() if isinstance(text, bytes) else text
        found = [line[7:].strip() for line in text.splitlines() if line.startswith("run_id:")]
        if not found or self._run_id not in ("", found[0]):
            self.generation += 1
        self._run_id = found[0] if found else ""


class _MemoryClient(fakeredis.FakeAsyncRedis):  # type: ignore[misc]
    generation = 0

    def send(self, *command: Argument) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.execute_command(*command))

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await _answered(super().execute_command(*args, **options))


class Script:
    """A Lua script. A server that forgot it (restart, SCRIPT FLUSH) gets its text again in the same call."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def send(self, redis: Client, keys: Sequence[str], args: Sequence[Argument]) -> asyncio.Future[Any]:
        """The answer to come; it goes on whoever waits for it. Raises what Line.send() does."""
        return redis.send("EVALSHA", self.sha, len(keys), *keys, *args)

    async def __call__(self, redis: Client, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Raises RedisUnavailable."""
        try:
            return await self.send(redis, keys, args)
        except NoScriptError:
            return await redis.send("EVAL", self.text, len(keys), *keys, *args)


class _Packed:
    """Commands are packed by hiredis: its parser's other half, ten times faster than the driver's."""

    def pack_command(self, *args: Argument) -> list[bytes]:
        name = str(args[0]).split()  # the driver writes some commands in two words
        return [hiredis.pack_command((*name, *args[1:]))]  # type: ignore[arg-type]  # its stub means one argument


def connect(url: str, max_connections: int = 32) -> Client:
    """A client for redis://, rediss://, unix:// or memory://. Connects at its first command."""
    if url.startswith(MEMORY_URL):
        client: Client = _MemoryClient(decode_responses=True)
        return client
    # One repetition after a broken connection: every command of ours may be applied twice. None after a time-out.
    retry = Retry(NoBackoff(), 1, supported_errors=(ConnectionError,))

    async def greet(connection: Any) -> None:
        await client.greet(connection)

    # Time-outs are those of _answered(): the driver's own would cost a task per command and swallow cancellations.
    options = parse_url(url) | {
        "decode_responses": True, "socket_timeout": None, "socket_connect_timeout": None, "retry": retry,
        "redis_connect_func": greet,
    }  # fmt: skip
    kind = options.pop("connection_class", Connection)
    options["connection_class"] = type("PackedConnection", (_Packed, kind), {})
    client = Client(connection_pool=ConnectionPool(max_connections=max_connections, **options))
    client.turns = Turns(max_connections, ANSWER_S)

    async def dial() -> Any:
        connection = client.connection_pool.make_connection()
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    client.line = Line(dial, ANSWER_S)
    client.auto_close_connection_pool = True
    return client
