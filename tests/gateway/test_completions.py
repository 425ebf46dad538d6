"""POST /v1/completions: four prompt forms, n, echo, logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.live import Live
from tests.gateway.scripted import Script, error_of, stream_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/completions"


def text_body(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


async def test_four_prompt_forms(server: Live) -> None:
    """T34: a string, strings, ids and lists of ids mean the same."""
    script = Script().install(server)
    client = await server.http(await server.key("acme"))
    ids = server.tokenizer.encode("hello")

    for prompt in ("hello", ["hello"], ids, [ids]):
        answer = await client.post(PATH, json=text_body(prompt))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "ok"
        assert answer.json()["object"] == "text_completion"
        assert answer.json()["id"].startswith("cmpl-")

    assert [request.prompt for request in script.requests] == [ids] * 4


async def test_default_length_is_16(server: Live) -> None:
    """T34: max_tokens absent or null is 16."""
    script = Script().install(server)
    client = await server.http(await server.key("acme"))

    await client.post(PATH, json=text_body())
    await client.post(PATH, json=text_body(max_tokens=None))

    assert [request.params.max_tokens for request in script.requests] == [16, 16]


async def test_control_tokens_in_raw_prompts(server: Live) -> None:
    """Who writes a raw prompt owns all of it: control tokens in it are control tokens."""
    script = Script().install(server)
    client = await server.http(await server.key("acme"))

    await client.post(PATH, json=text_body("<|im_start|>user\nx<|im_end|>"))

    assert [i for i in script.requests[0].prompt if server.tokenizer.is_special(i)] == [1, 2]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_choices_of_lists(server: Live, as_ids: bool) -> None:
    """T35, SM-15: choice j of prompt i has index i·n + j, plain and in streams; usage sums over all."""
    Script(["first", "second one"]).install(server)
    client = await server.http(await server.key("acme"))
    texts = ["a", "b c", "hello"]
    prompts = [server.tokenizer.encode(text) for text in texts] if as_ids else texts

    plain = (await client.post(PATH, json=text_body(prompts, n=2))).json()
    chunks = await stream_of(client, PATH, text_body(prompts, n=2, stream_options={"include_usage": True}))

    assert [choice["index"] for choice in plain["choices"]] == list(range(6))
    assert [choice["text"] for choice in plain["choices"]] == ["first", "second one"] * 3
    streamed = dict.fromkeys(range(6), "")
    for chunk in chunks[:-1]:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(streamed.values()) == ["first", "second one"] * 3
    ends = [chunk["choices"][0]["index"] for chunk in chunks[:-1] if chunk["choices"][0]["finish_reason"]]
    assert sorted(ends) == list(range(6))
    assert chunks[-1]["usage"] == plain["usage"]
    assert plain["usage"]["prompt_tokens"] == sum(len(server.tokenizer.encode(text)) for text in texts)
    per_prompt = sum(len(server.tokenizer.encode(text)) + 1 for text in ("first", "second one"))
    assert plain["usage"]["completion_tokens"] == 3 * per_prompt


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [[1], []]])
async def test_empty_prompts(server: Live, prompt: Any) -> None:
    """SM-06: one empty prompt fails the whole call with 400; nothing is asked of the engine."""
    script = Script().install(server)
    client = await server.http(await server.key("acme"))

    answer = await client.post(PATH, json=text_body(prompt))

    assert answer.status_code == 400
    assert error_of(answer)["param"] == "prompt"
    assert not script.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [384]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [[1, 2], [2**70]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [["x"]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e9}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ],
)
async def test_bad_values(server: Live, fields: dict[str, Any], param: str) -> None:
    """SM-05, SM-16, T38: ids outside the vocabulary, odd biases and counts are 400, naming the parameter, and the
    engine never sees them."""
    if fields.get("prompt") == [384]:
        server.engine.ready = type(server.engine.ready)(**{  # type: ignore[misc]
            **{f: getattr(server.engine.ready, f) for f in server.engine.ready.__struct_fields__}, "vocab_size": 384,  # type: ignore[union-attr]
        })  # fmt: skip
    client = await server.http(await server.key("acme"))

    answer = await client.post(PATH, json=text_body(**{"prompt": "x", **fields}))

    assert answer.status_code == 400, answer.text
    assert (error_of(answer)["param"] or "").split("[")[0].split(".")[0] == param
    assert not server.engine.requests


async def test_logprobs(server: Live) -> None:
    """SM-03: four lists of equal length; the chosen token is among the alternatives; offsets are those of the text."""
    Script(["naïve 🚀"], size=2).install(server)
    client = await server.http(await server.key("acme"))

    choice = (await client.post(PATH, json=text_body(logprobs=2))).json()["choices"][0]
    chunks = await stream_of(client, PATH, text_body(logprobs=2))

    found = choice["logprobs"]
    assert choice["text"] == "naïve 🚀"
    assert len({len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    assert found["token_logprobs"] == [-0.5 - i for i in range(len(found["tokens"]))]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert len(top) == 2
    assert found["tokens"][0] == choice["text"][: found["text_offset"][1]]
    assert any(token.startswith("bytes:\\x") for token in found["tokens"])
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [value for part in parts for value in part[name]] for name in found} == found


async def test_zero_logprobs(server: Live) -> None:
    """SM-16: logprobs 0 gives the chosen token's own; without logprobs there are none."""
    Script(["ab"]).install(server)
    client = await server.http(await server.key("acme"))

    zero = (await client.post(PATH, json=text_body(logprobs=0))).json()["choices"][0]["logprobs"]
    none = (await client.post(PATH, json=text_body())).json()["choices"][0]["logprobs"]

    assert [list(top) for top in zero["top_logprobs"]] == [[token] for token in zero["tokens"]]
    assert none is None


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_scoring_a_prompt(server: Live, max_tokens: int) -> None:
    """T34: echo with logprobs gives those of the prompt, as evaluation harnesses ask for them; with max_tokens 0 only
    those, and no completion token is billed."""
    Script(["xyz"]).install(server)
    client = await server.http(await server.key("acme"))
    ids = server.tokenizer.encode("hello world")

    for prompt in ("hello world", ids):
        body = text_body(prompt, echo=True, logprobs=1, max_tokens=max_tokens)
        answer = (await client.post(PATH, json=body)).json()
        chunks = await stream_of(client, PATH, body)
        choice = answer["choices"][0]
        assert choice["text"].startswith("hello world")
        assert len(choice["logprobs"]["tokens"]) == len(ids) + max_tokens
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1] == -1.5
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["logprobs"]["text_offset"][: len(ids)] == [
            len(server.tokenizer.decode(ids[:i])) for i in range(len(ids))
        ]
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert choice["finish_reason"] == "length"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


async def test_echo_of_several_choices(server: Live) -> None:
    """T34, T35: each choice begins with its own prompt and its logprobs, in streams too, whichever one comes first."""
    Script(["one", "two"]).install(server)
    client = await server.http(await server.key("acme"))
    body = text_body(["hello", "the fox"], n=2, echo=True, logprobs=1)

    plain = (await client.post(PATH, json=body)).json()
    chunks = await stream_of(client, PATH, body)

    assert [c["text"] for c in plain["choices"]] == ["helloone", "hellotwo", "the foxone", "the foxtwo"]
    for choice in plain["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [t for part in parts for t in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_the_client_reads_it(server: Live) -> None:
    """The unmodified client: plain and streaming, with usage."""
    Script(["some text"]).install(server)
    client = await server.openai(await server.key("acme"))

    plain = await client.completions.create(model="tiny", prompt="x", logprobs=1, extra_body={"top_k": 3})
    stream = await client.completions.create(
        model="tiny", prompt="x", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert plain.choices[0].text == "some text"
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "some text"
    assert chunks[-1].usage == plain.usage


async def test_tokenize_and_detokenize(server: Live) -> None:
    """vLLM's routes: the ids that inference would read, there and back; a model that is not there is 404."""
    script = Script().install(server)
    client = await server.http(await server.key("acme"))
    messages = [{"role": "user", "content": "naïve 🚀"}]

    ids = (
        await client.post("/tokenize", json={"model": "tiny", "prompt": "naïve 🚀", "return_token_strs": True})
    ).json()
    chat = (await client.post("/tokenize", json={"messages": messages})).json()
    back = (await client.post("/detokenize", json={"model": "tiny", "tokens": chat["tokens"]})).json()
    await client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    lost = await client.post("/tokenize", json={"model": "nope", "prompt": "x"})
    bad = await client.post("/detokenize", json={"tokens": [2**40]})
    neither = await client.post("/tokenize", json={"model": "tiny"})

    assert ids["tokens"] == server.tokenizer.encode("naïve 🚀")
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    assert chat["tokens"] == script.requests[0].prompt
    assert "naïve 🚀<|im_end|>" in back["prompt"]
    assert (lost.status_code, error_of(lost)["code"]) == (404, "model_not_found")
    assert (bad.status_code, error_of(bad)["param"]) == (400, "tokens")
    assert neither.status_code == 400
