"""Tokenizer: text and chats → ids, ids → bytes and text. text_stream: answers, as they come.

What knows text on the engine's side; loads no torch and no transformers.
Errors: engine.vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from adapters.spec import NewToken
from engine.new_tokens import NewTokens, is_splittable
from engine.template import ChatTemplate, Message, TemplateFault
from engine.vocabulary import PromptError, TextError, TokenBytes, TokenizerError

__all__ = ["PromptError", "TextError", "Tokenizer", "TokenizerError"]

Render = Callable[[list[Message], dict[str, Any]], tuple[str, str]]
"""(messages, variables) → (text, mark), as ChatTemplate.render. Raises TemplateFault."""

SAID = "\ue000"
"""Stands for what is said, where only what a template adds is asked: a character of nobody's."""
_BRACKETED = re.compile(r"(<.+>|\[.+\])\Z", re.DOTALL)


class Tokenizer:
    """The tokenizer of a checkpoint directory (tokenizer.json, tokenizer_config.json, chat_template.jinja).

    Safe to use from several threads; `encode` releases the interpreter lock while it works.
    """

    def __init__(self, directory: Path) -> None:
        try:
            raw = json.loads((directory / "tokenizer.json").read_text("utf-8"))
            config = _read_json(directory / "tokenizer_config.json")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{directory}: no usable tokenizer.json: {error}") from error
        added = {token["id"]: token for token in raw.get("added_tokens") or []}
        control = {i: t["content"] for i, t in added.items() if _is_control(t["special"], t["content"])}
        raw["truncation"] = raw["padding"] = None
        self._full = FastTokenizer.from_str(json.dumps(raw))
        raw["added_tokens"] = [token for i, token in added.items() if i not in control]
        raw["post_processor"] = None
        self._plain = FastTokenizer.from_str(json.dumps(raw))
        self._decoder = TokenBytes(self._full, raw.get("decoder"), frozenset(added))
        self._special_ids = frozenset(i for i, token in added.items() if token["special"])
        self._controls = list(control.values())
        self._control = _any_of(self._controls)
        self._new = self._new_plain = NewTokens(())
        self.new_controls: tuple[list[str], list[str]] = [], []
        self._is_splittable = is_splittable((raw.get("normalizer"), raw.get("pre_tokenizer")))
        self.vocab_size = self._full.get_vocab_size(with_added_tokens=True)
        self._bos_text = _token_text(config.get("bos_token"))
        self.bos_token_id = self._full.token_to_id(self._bos_text) if self._bos_text else None
        self.template_setting = self._template_setting(config, control)
        self._template = self._read_template(directory, config)
        self._known: dict[str, list[int]] = {}
        if self._is_splittable and _are_separate(added, control):
            self._known = {content: [i] for i, content in control.items()}
            self._known |= {piece: self.encode(piece, add_special_tokens=False) for piece in self._own_pieces()}

    def _template_setting(
        self, config: dict[str, Any], control: dict[int, str]
    ) -> tuple[dict[str, str], list[str], list[str]]:
        """What any chat template for this tokenizer is given: variables, special tokens, tags (ChatTemplate)."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        variables = {name: text for name in names if (text := _token_text(config.get(name))) is not None}
        special = [text for i, text in control.items() if i in self._special_ids]
        tags = [text for i, text in control.items() if i not in self._special_ids]
        return variables, special, tags

    def _read_template(self, directory: Path, config: dict[str, Any]) -> ChatTemplate | None:
        source = _template_source(directory, config)
        try:
            return None if source is None else ChatTemplate(source, *self.template_setting)
        except TemplateFault as error:
            raise TokenizerError(f"{directory}: {error}") from error

    def _own_pieces(self) -> set[str]:
        """What the template itself puts between control tokens, whatever is said."""
        turns = [{"role": role, "content": SAID} for role in ("system", "user", "assistant", "user")]
        found: set[str] = set()
        for wanted in (turns[:2], turns[1:2], turns[1:]):
            with contextlib.suppress(TemplateFault):
                if self._template is not None:
                    text, mark = self._template.render(wanted, {"add_generation_prompt": True})
                    found.update(
                        piece for piece in self._control.split(text) if SAID not in piece and mark not in piece
                    )
        return found - {""}

    def grown(self, tokens: Sequence[NewToken]) -> Tokenizer:
        """The same with an adapter's tokens. Cheap: all else is shared. Raises TokenizerError for a tokenizer that does
        something to where a text begins, which no piece of a text may suffer."""
        if not tokens:
            return self
        if not self._is_splittable:
            raise TokenizerError("tokens can't be added to a tokenizer of this kind")
        other = copy.copy(self)
        controls = [token for token in tokens if _is_control(token.special, token.content)]
        other._known = {}
        other._new = NewTokens(tokens)
        other._new_plain = NewTokens([token for token in tokens if token not in controls])
        other._controls = self._controls + [token.content for token in controls]
        other._control = _any_of(other._controls)
        special = [token.content for token in controls if token.special]
        tags = [token.content for token in controls if not token.special]
        other.new_controls = special, tags
        other._template = None if self._template is None else self._template.grown(special, tags)
        other._special_ids = self._special_ids | {token.id for token in tokens if token.special}
        other._decoder = self._decoder.grown({token.id: token.content.encode() for token in tokens})
        other.vocab_size = max(self.vocab_size, 1 + max(token.id for token in tokens))
        return other

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes: a text of B bytes has at least B / this many tokens."""
        return self._decoder.longest

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt: texts of control tokens in it are control tokens (its writer owns all of it). A BOS that the
        tokenizer adds is not doubled when the text brings its own."""
        ids = self._ids(self._full, self._new, text, add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            assert self._bos_text is not None
            if text.startswith(self._bos_text) and not text.startswith(self._bos_text * 2):
                return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Text only: nothing in it becomes a control token, nothing is added."""
        return self._ids(self._plain, self._new_plain, text, False)

    def _ids(self, tokenizer: FastTokenizer, new: NewTokens, text: str, add_special_tokens: bool) -> list[int]:
        pieces = list(new.split(text))
        if all(isinstance(piece, str) for piece in pieces):
            return _ids(tokenizer, text, add_special_tokens)
        ids = [
            token
            for piece in pieces
            for token in ([piece] if isinstance(piece, int) else _ids(tokenizer, piece, False))
        ]
        if not add_special_tokens:
            return ids
        probe, framed = (_ids(tokenizer, "a", adds) for adds in (False, True))
        before = next((i for i in range(len(framed)) if framed[i : i + len(probe)] == probe), 0)
        return framed[:before] + ids + framed[before + len(probe) :]

    def encode_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        variables: dict[str, Any] | None = None,
        render: Render | None = None,
    ) -> list[int]:
        """The ids of a conversation: exactly what the template says, with every control token its own. Each message
        has "role" and "content" (a string). `render` takes the place of this tokenizer's own template (for those of
        strangers: engine.template_sandbox). Raises PromptError with param "messages"."""
        if render is None and self._template is not None:
            render = self._template.render
        if render is None:
            raise PromptError("This model has no chat template; use /v1/completions.", "messages")
        final = str(messages[-1]["content"]).strip() if continue_final_message and messages else ""
        try:
            generate = add_generation_prompt and not continue_final_message
            text, mark = render(messages, (variables or {}) | {"add_generation_prompt": generate})
        except TemplateFault as error:
            raise PromptError(f"The chat template refuses these messages: {error}", "messages") from error
        if continue_final_message:
            text = _cut_after_final(text, final, mark)
        return self._encode_rendered(text, mark, add_special_tokens)

    def _encode_rendered(self, text: str, mark: str, add_special_tokens: bool) -> list[int]:
        if self._known and not add_special_tokens:
            return self._encode_pieces(text, mark)
        if mark not in text:
            return self.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        clean = ""  # text that the whole tokenizer may read: it carries no mark
        start = 0
        for end, control in [(match.start(), match[0]) for match in self._control.finditer(text)] + [(len(text), "")]:
            between = text[start:end]
            if mark in between:
                ids += self.encode(clean, add_special_tokens=add_special_tokens and not ids)
                ids += self.encode_plain(between.replace(mark, ""))
                clean = ""
            else:
                clean += between
            clean += control
            start = end + len(control)
        return ids + self.encode(clean, add_special_tokens=False) if clean else ids

    def _encode_pieces(self, text: str, mark: str) -> list[int]:
        """Where control tokens divide a text into parts that have nothing to do with each other: the template's own
        parts are known, only what was said is encoded."""
        parts = [piece for piece in self._control.split(text) if piece]
        plain = {piece: self.encode_plain(piece.replace(mark, "")) for piece in parts if mark in piece}
        known = self._known | plain if plain else self._known
        said = [piece for piece in parts if piece not in known]
        encoded = iter(_batch(self._full, said, False))
        return [token for piece in parts for token in (known.get(piece) or next(encoded))]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self._decoder[i] for i in ids if not (skip_special_tokens and i in self._special_ids))
        return self._decoder.trim_start(data).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to a text: not always a whole character. Empty for ids without a token."""
        return self._decoder[token]

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def trim_start(self, data: bytes) -> bytes:
        """`data` as the start of a text: sentencepiece vocabularies put a space before the first word."""
        return self._decoder.trim_start(data)


def _is_control(is_special: bool, content: str) -> bool:
    return is_special or _BRACKETED.match(content) is not None


def _are_separate(added: Mapping[int, Mapping[str, Any]], control: Mapping[int, str]) -> bool:
    """Whether control tokens are found in a text as they are written, take no white space along, and lie across none
    of the other added tokens."""
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    others = [token["content"] for i, token in added.items() if i not in control]
    return not any(
        any(added[i].get(flag) for flag in flags) or any(content[0] in other for other in others)
        for i, content in control.items()
    )


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """In a group, so that it splits a text into what lies between and them."""
    return re.compile(
        "(" + "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) + ")" if texts else r"(?!)"
    )


def _ids(tokenizer: FastTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return _batch(tokenizer, [text], add_special_tokens)[0]


def _batch(tokenizer: FastTokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    try:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError) as error:  # the latter, about its input, is what a str can cause only so
        raise PromptError("The text holds a lone surrogate, which is no character.") from error
    return [list(encoding.ids) for encoding in encodings]


def _cut_after_final(text: str, final: str, mark: str) -> str:
    """The rendered text up to the end of the last message's content, so that the model goes on with it."""
    plain = text.replace(mark, "")
    at = plain.rfind(final)
    if not final or at < 0:
        raise PromptError("The chat template changes the final message, so that it can't be continued.", "messages")
    wanted = at + len(final)
    for position, char in enumerate(text):
        if wanted == 0:
            return text[:position]
        wanted -= char != mark
    return text


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json's; of several named ones, "default"."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
