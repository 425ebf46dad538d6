"""Run by test_old_client.py in a process of its own: the wire as openai 1.x sees it. argv: base URL, key."""

import sys

import openai

assert openai.VERSION.startswith("1."), openai.VERSION
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
messages = [{"role": "user", "content": "hi"}]

plain = client.chat.completions.create(model="tiny", messages=messages, n=2, logprobs=True, top_logprobs=1)
assert [choice.message.content for choice in plain.choices] == ["ok", "ok"]
assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens

chunks = list(client.chat.completions.create(
    model="tiny", messages=messages, n=2, stream=True, stream_options={"include_usage": True}
))  # fmt: skip
texts = ["", ""]
for chunk in chunks:
    for choice in chunk.choices:
        texts[choice.index] += choice.delta.content or ""
assert texts == ["ok", "ok"]
assert chunks[-1].choices == []
assert chunks[-1].usage.total_tokens == plain.usage.total_tokens
assert all(chunk.usage is None for chunk in chunks[:-1])

with client.beta.chat.completions.stream(model="tiny", messages=messages) as stream:
    assert stream.get_final_completion().choices[0].message.content == "ok"

text = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=9)
assert [choice.index for choice in text.choices] == [0, 1]

made = client.responses.create(model="tiny", input="hi")
assert made.output_text == "ok"
with client.responses.stream(model="tiny", input="hi", previous_response_id=made.id) as events:
    assert events.get_final_response().output_text == "ok"
assert client.responses.retrieve(made.id).id == made.id

assert [model.id for model in client.models.list()] == ["tiny"]
assert client.models.retrieve("tiny").id == "tiny"

for kind, call in [
    (openai.NotFoundError, lambda: client.chat.completions.create(model="nope", messages=messages)),
    (openai.BadRequestError, lambda: client.chat.completions.create(model="tiny", messages=messages, temperature=9)),
    (openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list()),
    (openai.NotFoundError, lambda: client.responses.retrieve("resp_nope")),
]:
    body = None
    try:
        call()
    except kind as error:
        body = error.body
    assert isinstance(body, dict), kind
    assert set(body) == {"message", "type", "param", "code"}, body
print("all well")
