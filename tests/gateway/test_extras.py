"""vLLM's extra fields that are served: what each does, in chats and in completions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.live import EOS, Live
from tests.gateway.scripted import Script, chat, error_of, stream_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def words(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text, **fields}


async def test_allowed_token_ids_reach_the_engine(server: Live) -> None:
    """They are the engine's business; ids that no token has are 400."""
    client = await server.http(await server.key("acme"))

    answer = await client.post(CHAT, json=chat(allowed_token_ids=[5, 7, EOS]))

    assert answer.status_code == 200, answer.text
    assert server.engine.requests[0].params.allowed_token_ids == [5, 7, EOS]


async def test_token_ids_of_a_chat(server: Live) -> None:
    """Every id that was produced and billed, hidden and held ones included, plain and in streams; the prompt's ids
    once, in the first chunk."""
    Script(["the fox 🚀", "dog"]).install(server)
    client = await server.http(await server.key("acme"))

    plain = (await client.post(CHAT, json=chat(n=2, return_token_ids=True))).json()
    chunks = await stream_of(client, CHAT, chat(n=2, return_token_ids=True))
    without = (await client.post(CHAT, json=chat(n=2))).json()

    expected = [[*server.tokenizer.encode_plain(text), EOS] for text in ("the fox 🚀", "dog")]
    assert [choice["token_ids"] for choice in plain["choices"]] == expected
    assert sum(map(len, expected)) == plain["usage"]["completion_tokens"]
    assert len(plain["prompt_token_ids"]) == plain["usage"]["prompt_tokens"]
    streamed: list[list[int]] = [[], []]
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0].get("token_ids", [])
    assert streamed == expected
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [plain["prompt_token_ids"]] + [None] * (
        len(chunks) - 1
    )
    assert "token_ids" not in str(without)


async def test_token_ids_of_completions(server: Live) -> None:
    """Per choice, with those of its own prompt."""
    Script(["the fox"]).install(server)
    client = await server.http(await server.key("acme"))
    body = words("", return_token_ids=True, max_tokens=50) | {"prompt": [[5, 6], [7]]}

    plain = (await client.post(TEXT, json=body)).json()
    chunks = await stream_of(client, TEXT, body)

    expected = [*server.tokenizer.encode_plain("the fox"), EOS]
    assert [choice["token_ids"] for choice in plain["choices"]] == [expected, expected]
    assert [choice["prompt_token_ids"] for choice in plain["choices"]] == [[5, 6], [7]]
    for index, prompt in enumerate([[5, 6], [7]]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [token for choice in own for token in choice["token_ids"]] == expected
        assert [choice.get("prompt_token_ids") for choice in own] == [prompt] + [None] * (len(own) - 1)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 50}, [5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": -1}, [5, 6, 7, 8, 9]),
    ],
)
async def test_truncated_prompts(server: Live, fields: dict[str, Any], left: list[int]) -> None:
    """The prompt is cut before anything is counted: the usage, the limits and the engine see the same tokens."""
    client = await server.http(await server.key("acme"))

    answer = await client.post(TEXT, json=words("", **fields) | {"prompt": [5, 6, 7, 8, 9]})

    assert server.engine.requests[0].prompt == left
    assert answer.json()["usage"]["prompt_tokens"] == len(left)


async def test_too_long_prompts_can_be_truncated(server: Live) -> None:
    """What is otherwise 400 is answered when the client allows the cut."""
    client = await server.http(await server.key("acme"))
    long = chat("fox " * 3000, max_tokens=5)

    assert error_of(await client.post(CHAT, json=long))["code"] == "context_length_exceeded"
    answer = await client.post(CHAT, json={**long, "truncate_prompt_tokens": 100})

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 100


async def test_a_cache_salt_divides_the_tenants_own_cache(server: Live) -> None:
    """What a client sends never is the salt: it is put behind the tenant's, so that no tenant can meet another."""
    for tenant in ("acme", "globex"):
        client = await server.http(await server.key(tenant))
        for salt in ("", "mine", "mine", "other"):
            answer = await client.post(CHAT, json=chat(**({"cache_salt": salt} if salt else {})))
            assert answer.status_code == 200, answer.text

    salts = [request.cache_salt for request in server.engine.requests]
    assert salts[1] == salts[2]
    assert len(set(salts)) == 6
    assert all(salt.startswith(salts[0]) for salt in salts[:4])


async def test_echo_of_a_chat(server: Live) -> None:
    """The turn that the answer goes on with comes before it, once per choice; nothing else is echoed."""
    Script(["fox", "dog"]).install(server)
    client = await server.http(await server.key("acme"))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The "}]
    body = {"model": "tiny", "messages": turns, "echo": True, "n": 2} | {
        "continue_final_message": True, "add_generation_prompt": False,
    }  # fmt: skip

    plain = (await client.post(CHAT, json=body)).json()
    chunks = await stream_of(client, CHAT, body)
    other = (await client.post(CHAT, json=chat("hi", echo=True))).json()

    assert [choice["message"]["content"] for choice in plain["choices"]] == ["The fox", "The dog"]
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert texts == ["The fox", "The dog"]
    assert other["choices"][0]["message"]["content"] == "fox"
