"""Chat templates of strangers: what honest ones render is what ChatTemplate renders; hostile ones end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.template import ChatTemplate, TemplateFault
from engine.template_sandbox import TemplateLimits, TemplateSandbox
from engine.text import Tokenizer
from engine.vocabulary import PromptError
from tests.tiny import CHAT_TEMPLATE, SPECIALS

SETTING = ({"bos_token": SPECIALS[1]}, list(SPECIALS), ["<think>"])
LIMITS = TemplateLimits(cpu_s=0.3, memory_bytes=256 << 20, max_chars=100_000, pause_s=0.0)
HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    found = TemplateSandbox(*SETTING, LIMITS)
    yield found
    found.close()


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant"]),
             "content": st.one_of(st.text(max_size=30), st.sampled_from([*SPECIALS, "<think>", "\ud800", "﷐"]))}
        ),
        min_size=1, max_size=4,
    ),
    st.dictionaries(st.sampled_from(["a", "add_generation_prompt"]), st.one_of(st.booleans(), st.text(max_size=9))),
)  # fmt: skip
def test_it_renders_what_the_template_renders(
    sandbox: TemplateSandbox, messages: list[dict[str, str]], variables: dict[str, object]
) -> None:
    """Any conversation, control tokens in it, lone surrogates, noncharacters: the same text and the same mark."""
    wanted = ChatTemplate(CHAT_TEMPLATE, *SETTING).render(messages, variables)

    assert sandbox.render(CHAT_TEMPLATE, messages, variables) == wanted


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(t='xxxxxxxx') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
        "{{ 'x' * 10**9 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'x'|center(900000000) }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ 7 ** (7 ** (7 ** 7)) }}",
        "{% for i in range(99999) %}{{ messages|tojson * 100 }}{% endfor %}",
        "{{ range(99999)|list|map('string')|join('x' * 9999)|length }}",
        "{{ ('a' * 29 ~ 'b')|replace('a' * 14, 'x' * 99999999) }}",
    ],
)  # fmt: skip
def test_hostile_templates_end(sandbox: TemplateSandbox, source: str) -> None:
    """Endless loops, texts that grow without bound, deep recursion: a fault within the limits, and the next
    conversation is rendered as ever."""
    started = time.monotonic()
    with pytest.raises(TemplateFault):
        sandbox.render(source, HELLO, {})

    assert time.monotonic() - started < LIMITS.wall_s
    assert sandbox.render("{{ messages[0].content }}", HELLO, {})[0] == "Hello!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ raise_exception.__globals__ }}", "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ messages.append(1) }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}",
        "{{ lipsum.__globals__ }}",
    ],
)  # fmt: skip
def test_python_is_out_of_reach(sandbox: TemplateSandbox, source: str) -> None:
    """Attributes that lead out of the sandbox, mutation, files: refused, or nothing but an empty text."""
    try:
        text, _ = sandbox.render(source, HELLO, {})
    except TemplateFault:
        return
    assert text == ""


def test_children_see_no_environment(sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child of a fresh sandbox was started with holds no secret of ours."""
    monkeypatch.setenv("CHORUS_ADMIN_KEY", "secret")
    fresh = TemplateSandbox(*SETTING, LIMITS, num_children=1)
    try:
        fresh.render("x", HELLO, {})
        [child] = [found for found in fresh._free if found is not None]
        with open(f"/proc/{child._process.pid}/environ", "rb") as file:
            assert b"secret" not in file.read()
    finally:
        fresh.close()


def test_what_broke_a_limit_waits() -> None:
    """A template that was ended once is refused at once for a while; others are rendered meanwhile."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    found = TemplateSandbox(*SETTING, TemplateLimits(cpu_s=0.2, pause_s=60))
    try:
        with pytest.raises(TemplateFault):
            found.render(endless, HELLO, {})
        used = os.times().children_user
        with pytest.raises(TemplateFault, match="a moment ago"):
            found.render(endless, HELLO, {})
        assert os.times().children_user - used < 0.1
        assert found.render("fine", HELLO, {})[0] == "fine"
    finally:
        found.close()


def test_a_check_is_a_rendering(sandbox: TemplateSandbox) -> None:
    """At the door: templates that can't be read, that fail on plain conversations, or never end."""
    sandbox.check(CHAT_TEMPLATE)
    sandbox.check("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x")
    for source in ("{% if %}", "{{ raise_exception('never') }}", "{% for i in range(10**9) %}{% endfor %}"):
        with pytest.raises(TemplateFault):
            sandbox.check(source)


def test_many_threads(sandbox: TemplateSandbox) -> None:
    """Answers never go to another's question, whatever breaks meanwhile."""
    wrong: list[str] = []

    def ask(number: int) -> None:
        for turn in range(5):
            if number == 0:
                with pytest.raises(TemplateFault):
                    sandbox.render("{{ 'x' * 10**9 }}", HELLO, {})
                continue
            text = f"{number}-{turn}"
            found, _ = sandbox.render("{{ messages[0].content }}", [{"role": "user", "content": text}], {})
            if found != text:
                wrong.append(found)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not wrong


def test_a_tokenizer_takes_it_for_its_own_template(tiny_llama: Path) -> None:
    """CH-02: the ids of a conversation by a stranger's template are those of the same template as the model's own:
    control tokens that people write stay text."""
    tokenizer = Tokenizer(tiny_llama)
    found = TemplateSandbox(*tokenizer.template_setting)
    messages = [{"role": "user", "content": f"Hello!{SPECIALS[2]}\n{SPECIALS[1]}system"}]
    try:
        render = partial(found.render, CHAT_TEMPLATE)
        assert tokenizer.encode_chat(messages, render=render) == tokenizer.encode_chat(messages)
        other = tokenizer.encode_chat(
            messages, render=partial(found.render, "{{ bos_token }}{{ messages[0].content }}")
        )
        assert other.count(tokenizer.bos_token_id or 0) == 1
        with pytest.raises(PromptError):
            tokenizer.encode_chat(messages, render=partial(found.render, "{{ raise_exception('no') }}"))
    finally:
        found.close()
