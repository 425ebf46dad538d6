"""Retention, with real processes: what a tenant with `retention: none` says and hears lies nowhere on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import needs_redis
from tests.e2e.process import ChorusProcess, wait_for

MODEL = "tiny-llama"


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChorusProcess]:
    """Logs all that it ever logs."""
    needs_redis()
    data_dir = tmp_path_factory.mktemp("retention")
    flags = ["--workers", "2", "--dtype", "float32", "--log-level", "debug"]
    with ChorusProcess("serve", str(tiny_llama), *flags, data_dir=data_dir) as running:
        yield running.wait_ready()


def places_of(server: ChorusProcess, text: str) -> list[str]:
    """Files of the data directory (append-only file, database, adapters, …) and logs in which the text lies."""
    wanted = text.encode()
    files = [path for path in server.data_dir.rglob("*") if path.is_file()]
    return [path.name for path in files if wanted in path.read_bytes()] + ["log"] * (text in server.output)


def say(server: ChorusProcess, key: str, canary: str) -> None:
    """Every way in which a text comes in, with good ends and bad ones. Answers echo it."""
    http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)
    messages = [{"role": "user", "content": canary}]
    for stream in (False, True):
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, "stream": stream}
        headers = {"idempotency-key": f"{canary[:8]}-{stream}"}
        assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        answer = http.post("/v1/responses", json={"model": MODEL, "input": canary, "max_output_tokens": 16,
                                                  "instructions": canary, "stream": stream})  # fmt: skip
        assert answer.status_code == 200
    echoed = {"model": MODEL, "prompt": canary, "max_tokens": 4, "echo": True}
    assert canary in http.post("/v1/completions", json=echoed).json()["choices"][0]["text"]
    broken = {"model": MODEL, "messages": [{"role": "user", "content": {canary: canary}}]}
    assert http.post("/v1/chat/completions", json=broken).status_code == 400
    assert http.post("/v1/completions", json=echoed | {"max_tokens": canary}).status_code == 400
    assert http.post("/v1/completions", content=json.dumps(echoed)[:-3]).status_code == 400
    assert http.post("/v1/chat/completions", json=broken | {"messages": messages * 2000}).status_code == 400
    assert http.post("/tokenize", json={"prompt": canary}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input=canary, previous_response_id="resp_" + "0" * 48)
    http.close()
    client.close()


def test_no_text_lies_anywhere(server: ChorusProcess) -> None:
    """No prompt and no answer of a tenant with `retention: none` is in Redis' file, the database, any other file or the
    logs at their loudest, whatever became of the request. (Another tenant's stored response is: the search finds.)"""
    silent, loud = server.make_key("silent"), server.make_key("loud")
    assert server.admin("PATCH", "tenants/silent", json={"retention": "none"}).json()["retention"] == "none"
    say(server, silent, "canaryofsilence")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=loud, max_retries=0) as client:
        client.responses.create(model=MODEL, input="canaryofsound", max_output_tokens=16)

    assert places_of(server, "canaryofsound")
    assert places_of(server, "canaryofsilence") == []


def test_a_store_that_keeps_nothing(server: ChorusProcess) -> None:
    """`store` counts as false and is answered so, what continues from it is 404, conversations are refused by name."""
    key = server.make_key("quiet")
    server.admin("PATCH", "tenants/quiet", json={"retention": "none"})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        made = client.responses.create(model=MODEL, input="hi", max_output_tokens=16, store=True)
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model=MODEL, input="more", previous_response_id=made.id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
        with pytest.raises(openai.BadRequestError) as refused:
            client.conversations.create(items=[{"role": "user", "content": "x"}])
        assert refused.value.code == "zero_data_retention"


def test_it_acts_at_the_next_request_on_every_worker(server: ChorusProcess) -> None:
    """What was stored before is gone when the change is answered, and soon from Redis' file; from then on neither
    worker stores anything."""
    key = server.make_key("changing")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        before = [
            client.responses.create(model=MODEL, input=f"earlycanary {i}", max_output_tokens=16).id for i in range(8)
        ]
        talk = client.conversations.create(items=[{"role": "user", "content": "early"}])
        server.admin("PATCH", "tenants/changing", json={"retention": 1})
        assert client.responses.retrieve(before[0]).id == before[0]
        server.admin("PATCH", "tenants/changing", json={"retention": "none"})
        for old in before:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(old)
        with pytest.raises(openai.NotFoundError):
            client.conversations.items.list(talk.id)
        wait_for(lambda: places_of(server, "earlycanary") == [])
    for _ in range(8):  # a connection each: some go to one worker, some to the other
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            made = client.responses.create(model=MODEL, input="late", max_output_tokens=16)
            assert made.to_dict()["store"] is False
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(made.id)


@pytest.mark.parametrize("wrong", [0, -1, "all", 1.5, True, 10**9])
def test_what_no_retention_can_be(server: ChorusProcess, wrong: object) -> None:
    """400 with `param`, and nothing is changed."""
    server.make_key("wrong")
    answer = server.admin("PATCH", "tenants/wrong", json={"retention": wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "retention")
    assert server.admin("GET", "tenants/wrong").json()["retention"] is None
