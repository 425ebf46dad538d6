"""Profiles: how versions want to be asked, read from the store at their first use and kept by digest; and requests
dressed accordingly. What a request says goes before the version's defaults, these before its generation_config.json,
and that before the base.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from adapters.new_tokens import TOKENS_FILE
from adapters.spec import AdapterError, AdapterRef, AdapterUnsupported
from engine.params import SamplingParams
from engine.protocol import Refused
from engine.template import TemplateFault
from engine.template_sandbox import TemplateSandbox
from engine.text import Render, Tokenizer, TokenizerError
from gateway.answer import Ask
from gateway.companions import Profile, parse_companions, template_invalid
from gateway.prompts import Chat, Prompt, Text

if TYPE_CHECKING:
    from adapters.storage import AdapterStore
    from gateway.models import Model

CACHE_SIZE = 1000
NOTHING = Profile()


class Profiles:
    """Of one worker. Templates run in `sandbox` and nowhere else. `vocab_size` and `tokenizer` are the base's."""

    def __init__(self, store: AdapterStore, sandbox: TemplateSandbox, vocab_size: int, tokenizer: Tokenizer) -> None:
        self._store = store
        self._sandbox = sandbox
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._cache: OrderedDict[str, Profile] = OrderedDict()

    def check(self, files: Mapping[str, bytes], num_added: int) -> Profile:
        """Of an upload. Blocks. Raises AdapterInvalid, AdapterUnsupported."""
        return check_companions(files, self._sandbox, self._vocab_size + num_added, self._tokenizer)

    async def of(self, model: Model) -> Profile:
        """Raises Refused when what is stored is not what was uploaded, or can't be read."""
        if model.adapter is None or not model.companions:
            return NOTHING
        digest = model.adapter.digest
        found = self._cache.get(digest)
        if found is None:
            found = await asyncio.to_thread(self._read, model.adapter, dict(model.companions))
            self._cache[digest] = found
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(digest)
        return found

    def _read(self, ref: AdapterRef, wanted: Mapping[str, str]) -> Profile:
        try:
            files = {name: self._store.read(ref.digest, name) or b"" for name in wanted}
            for name, data in files.items():
                if hashlib.sha256(data).hexdigest() != wanted[name]:
                    raise Refused("adapter_invalid", f"The adapter's {name} is no longer what was uploaded.")
            return _parse(files, self._vocab_size + ref.num_added, self._tokenizer)
        except AdapterError as error:
            raise Refused("adapter_invalid", error.message) from error
        except OSError as error:
            raise Refused("adapter_not_found", "The adapter's files can't be read at the moment.") from error

    def dress(self, ask: Ask, profile: Profile) -> Ask:
        """The same request with what it leaves open."""
        if profile is NOTHING:
            return ask
        limit = "max_tokens" in profile.sampling and "max_tokens" not in ask.given
        return replace(
            ask, params=_params(ask, profile), prompts=[self.dress_prompt(prompt, profile) for prompt in ask.prompts],
            is_limit_soft=limit, tokenizer=profile.tokenizer,
        )  # fmt: skip

    def dress_prompt(self, prompt: Prompt, profile: Profile) -> Prompt:
        """Raw prompts get nothing but new tokens."""
        if isinstance(prompt, Text):
            return replace(prompt, tokenizer=profile.tokenizer)
        if not isinstance(prompt, Chat):
            return prompt
        messages = prompt.messages
        if profile.system_prompt is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": profile.system_prompt}, *messages]
        return replace(prompt, messages=messages, render=self._render(profile), tokenizer=profile.tokenizer)

    def _render(self, profile: Profile) -> Render | None:
        if profile.template is None:
            return None
        controls = ([], []) if profile.tokenizer is None else profile.tokenizer.new_controls
        return partial(self._sandbox.render, profile.template, controls=controls)


def check_companions(
    files: Mapping[str, bytes], sandbox: TemplateSandbox, vocab_size: int, tokenizer: Tokenizer
) -> Profile:
    """They are understood, and the template renders plain conversations. `vocab_size` counts the adapter's own tokens,
    `tokenizer` is the base's. Raises AdapterInvalid, AdapterUnsupported."""
    profile = _parse(files, vocab_size, tokenizer)
    if profile.template is not None:
        try:
            sandbox.check(profile.template)
        except TemplateFault as fault:
            raise template_invalid(str(fault)) from fault
    return profile


def _parse(files: Mapping[str, bytes], vocab_size: int, tokenizer: Tokenizer) -> Profile:
    profile = parse_companions(files, vocab_size)
    try:
        grown = tokenizer.grown(profile.new_tokens) if profile.new_tokens else None
    except TokenizerError as error:
        raise AdapterUnsupported("unsupported_vocabulary", error.message, TOKENS_FILE) from error
    return replace(profile, tokenizer=grown)


def _params(ask: Ask, profile: Profile) -> SamplingParams:
    open_fields = {name: value for name, value in profile.sampling.items() if name not in ask.given}
    if profile.end_ids and not ask.params.ignore_eos:
        open_fields["stop_token_ids"] = [*(ask.params.stop_token_ids or ()), *profile.end_ids]
    return msgspec.structs.replace(ask.params, **open_fields)
