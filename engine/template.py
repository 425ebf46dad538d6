"""ChatTemplate: a checkpoint's Jinja chat template in a sandbox. Knows no tokenizer; renders messages to text.

What people write must never become a control token. `render` therefore breaks every control-token text inside the
strings it is given with a mark (a Unicode noncharacter that none of them contains); the template's own control tokens
stay whole. The caller splits on marks and encodes what carries one as plain text.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


class TemplateFault(Exception):
    """The template refuses these messages, or fails on them; the message is the template's own where it has one."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


class ChatTemplate:
    """`special` are the texts of control tokens; `tags` are further bracketed tokens (`<think>`), which assistants
    may write in their own turns (templates look for them there), and nobody else."""

    def __init__(self, source: str, variables: Mapping[str, str], special: Iterable[str], tags: Iterable[str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._variables = dict(variables)
        self._special, self._tags = list(special), list(tags)
        self._assistant = _breaker(self._special)
        self._others = _breaker([*self._special, *self._tags])
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # read at every rendering: a chain of maps is slow
        except jinja2.TemplateError as error:
            raise TemplateFault(f"the chat template can't be read: {error}") from error

    def grown(self, special: Iterable[str], tags: Iterable[str]) -> ChatTemplate:
        """The same for a tokenizer with more control tokens."""
        other = copy.copy(self)
        other._special, other._tags = [*self._special, *special], [*self._tags, *tags]
        other._assistant = _breaker(other._special)
        other._others = _breaker([*other._special, *other._tags])
        return other

    def render(self, messages: list[Message], variables: Mapping[str, Any]) -> tuple[str, str]:
        """→ (text, mark): what the template makes of the messages, with `mark` inside what people wrote that looks
        like a control token. Raises TemplateFault."""
        try:
            mark = self._free_mark(messages, variables)
            safe = [
                {
                    key: value if key == "role" else _map(value, self._break(mark, message["role"] == "assistant"))
                    for key, value in message.items()
                }
                for message in messages
            ]
            values = {key: _map(value, self._break(mark, False)) for key, value in variables.items()}
            return self._template.render(self._variables | values | {"messages": safe}), mark
        except _FAULTS as error:
            raise TemplateFault(str(error) or type(error).__name__) from error

    def _break(self, mark: str, by_assistant: bool) -> Callable[[str], str]:
        pattern = self._assistant if by_assistant else self._others
        if pattern is None:
            return lambda text: text
        return lambda text: pattern.sub(lambda match: match[0] + mark, text)

    def _free_mark(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        if all(isinstance(text, str) and text.isascii() for message in messages for text in message.values()) and all(
            isinstance(value, bool) for value in variables.values()
        ):
            return _MARKS[0]
        free = set(_MARKS)

        def look(text: str) -> str:
            if not text.isascii():
                free.difference_update(text)
            return text

        _map([messages, dict(variables)], look)
        if not free:
            raise TemplateFault("the messages contain every Unicode noncharacter from U+FDD0 to U+FDEF")
        return min(free)


def _breaker(tokens: list[str]) -> re.Pattern[str] | None:
    """Matches the first character of whatever may begin one of `tokens`: it is followed by the second one, or by the
    end of the string (the rest may come from elsewhere)."""
    seconds: dict[str, set[str]] = {}
    for token in tokens:
        seconds.setdefault(token[0], set()).add(re.escape(token[1:2]))
    parts = [
        re.escape(first) + ("" if "" in following else f"(?=[{''.join(sorted(following))}]|\\Z)")
        for first, following in sorted(seconds.items())
    ]
    return re.compile("|".join(parts)) if parts else None


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map(key, change): _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, change) for item in value]
    return value
