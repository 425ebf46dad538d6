"""`chorus demo`: a whole server with two tenants and two adapters, one burst of chats, and the lines to go on with."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from engine.config import ConfigError
from gateway.cli.options import GATEWAY, MODEL, with_settings
from gateway.cli.package import packed, parts
from gateway.cli.rest import Rest, RestError
from gateway.cli.serve import forever, prepare, run
from gateway.settings import Settings

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from gateway.cli.burst import Burst, Chat
    from gateway.supervisor import Supervisor

MODEL_NAME = "smollm2-135m-instruct"
EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
TENANTS = ("acme", "globex")
KEY_NAME = "demo"
PROMPT_FILE = "prompt.txt"
PROMPTS = ("What is the capital of France?", "My order has not arrived. What can I do?")
CONFLICT = 409


@with_settings((*MODEL, *GATEWAY))
def demo(
    settings: Settings,
    once: Annotated[bool, typer.Option("--once", help="Stop after the burst.")] = False,
    examples: Annotated[Path, typer.Option("--adapters", help="Directory of adapter directories.")] = EXAMPLES,
) -> None:
    """Start a server, create two tenants, upload two adapters, chat with all of them at the same time."""
    try:
        import openai  # noqa: F401
    except ImportError:
        raise ConfigError("the demo calls the server with the openai package: pip install openai") from None
    found = sorted(path.parent for path in examples.glob("*/adapter_config.json"))
    settings = prepare(settings if settings.model else settings.model_copy(update={"model": MODEL_NAME}))
    asyncio.run(run(settings, partial(show, settings, found[:2], once)))


async def show(settings: Settings, adapters: list[Path], once: bool, supervisor: Supervisor) -> None:
    """With the server up: tenants, adapters, burst, and then either the end or the lines to go on with."""
    from gateway.cli.burst import Burst

    console = Console(width=None if sys.stdout.isatty() else 120)
    keys = await asyncio.to_thread(set_up, Rest(supervisor.admin_url, settings.admin_key), adapters)
    clients = {tenant: connect(supervisor, key) for tenant, key in keys.items()}
    burst = Burst(chats(settings.base_name, adapters), clients)
    await burst.run(console)
    for client in clients.values():
        await client.close()
    report(burst, console)
    if any(chat.error for chat in burst.chats):
        raise RestError("the burst did not go well")
    if not once:
        print(next_steps(supervisor.base_url, settings, keys, adapters), flush=True)
        await forever(supervisor)


def set_up(rest: Rest, adapters: list[Path]) -> dict[str, str]:
    """Two tenants with a fresh key each. The first adapter belongs to the first tenant, the second one to all. What an
    earlier demo left is taken over. → key of each tenant."""
    keys = {}
    for tenant in TENANTS:
        unless_there(rest, "tenants", {"id": tenant})
        for key in rest.list_all(f"tenants/{tenant}/keys"):
            if key["name"] == KEY_NAME:
                rest.call("DELETE", f"tenants/{tenant}/keys/{key['id']}")
        keys[tenant] = rest.call("POST", f"tenants/{tenant}/keys", json={"name": KEY_NAME})["key"]
        print(f"tenant {tenant}, key {keys[tenant]}", flush=True)
    for path, directory in zip((f"tenants/{TENANTS[0]}/adapters", "adapters"), adapters, strict=False):
        try:
            with packed(directory) as files:
                adapter = rest.upload("POST", path, parts(files), data={"name": directory.name})
            print(f"adapter {adapter['id']}, rank {adapter['rank']}, {adapter['digest'][:19]}…", flush=True)
        except RestError as error:
            if error.status != CONFLICT:
                raise
    return keys


def unless_there(rest: Rest, path: str, body: dict[str, str]) -> None:
    try:
        rest.call("POST", path, json=body)
    except RestError as error:
        if error.status != CONFLICT:
            raise


def connect(supervisor: Supervisor, key: str) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{supervisor.base_url}/v1", api_key=key, timeout=600)


def chats(base: str, adapters: list[Path]) -> list[Chat]:
    """The base model for both tenants, the first tenant's own adapter, the shared one for both."""
    from gateway.cli.burst import Chat

    asked = [Chat(tenant, base, prompt) for tenant, prompt in zip(TENANTS, PROMPTS, strict=True)]
    for number, directory in enumerate(adapters):
        prompts = prompts_of(directory)
        for tenant in TENANTS[: number + 1]:
            asked += [Chat(tenant, directory.name, prompt) for prompt in prompts[: 2 - number]]
            prompts = prompts[1:] + prompts[:1]
    return asked


def prompts_of(directory: Path) -> list[str]:
    """What to ask so that the adapter shows: the lines of its prompt file."""
    path = directory / PROMPT_FILE
    lines = [line.strip() for line in path.read_text().splitlines()] if path.is_file() else []
    return [line for line in lines if line and not line.startswith("#")] or list(PROMPTS)


def report(burst: Burst, console: Console) -> None:
    tenants, models = {chat.tenant for chat in burst.chats}, {chat.model for chat in burst.chats}
    console.print(
        f"{burst.num_tokens} tokens in {burst.duration_s:.1f} s = {burst.num_tokens / burst.duration_s:.0f} tokens/s: "
        f"{len(burst.chats)} chats, {len(tenants)} tenants, {len(models)} models, one base in memory",
        soft_wrap=True,
    )
    sys.stdout.flush()


def next_steps(url: str, settings: Settings, keys: dict[str, str], adapters: list[Path]) -> str:
    """Lines to copy and paste."""
    model = adapters[0].name if adapters else settings.base_name
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{PROMPTS[0]}"}}]}}'
    first, second = TENANTS
    return f"""
The server keeps running; Ctrl-C stops it. Try it from another terminal:

  # {first} asks its adapter {model}
  curl {url}/v1/chat/completions -H 'Authorization: Bearer {keys[first]}' \\
    -H 'Content-Type: application/json' -d '{body}'

  # what {second} may call: {first}'s own adapter is not among it
  curl {url}/v1/models -H 'Authorization: Bearer {keys[second]}'

  # the admin API
  curl {url}/admin/v1/tenants -H "Authorization: Bearer $(cat {settings.data_dir / "admin.key"})"
"""
