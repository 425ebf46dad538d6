"""What a version of an adapter may bring along beside its weights: chat_template.jinja, defaults.json,
generation_config.json → a Profile; understood whole, or refused by the name of the key. Knows no requests.

defaults.json           the owner's word: DefaultValues, nothing else
generation_config.json  as Hugging Face writes it: what decides about sampling is used, the rest is left out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adapters.new_tokens import TOKENS_FILE, parse_new_tokens
from adapters.spec import AdapterInvalid, NewToken, shown
from adapters.strict_json import parse_object
from engine.params import ParamsError, SamplingParams
from engine.text import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
DEFAULTS_FILE = "defaults.json"
GENERATION_FILE = "generation_config.json"
PARTS = {"chat_template": TEMPLATE_FILE, "defaults": DEFAULTS_FILE, "generation_config": GENERATION_FILE}
"""Parts of an upload."""
CODES = {
    TEMPLATE_FILE: "chat_template_invalid", DEFAULTS_FILE: "defaults_invalid",
    GENERATION_FILE: "generation_config_invalid",
}  # fmt: skip
_SAID_ELSEWHERE = frozenset(
    ("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "max_length", "use_cache")
)
"""Keys of generation_config.json that the base decides, or that say nothing about sampling."""


class DefaultValues(BaseModel):
    """What a request gets where it says nothing itself."""

    model_config = ConfigDict(extra="forbid", strict=True)

    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class Profile:
    """How a version wants to be asked.

    template        Jinja source in place of the base's chat template
    system_prompt   of conversations that have none
    sampling        fields of SamplingParams, for those that a request leaves open
    end_ids         further ids that end an answer, as end-of-sequence tokens do
    new_tokens      what its vocabulary has beside the base's
    tokenizer       that knows these; None = the base's own
    warnings        what was left out
    """

    template: str | None = None
    system_prompt: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    new_tokens: tuple[NewToken, ...] = ()
    tokenizer: Tokenizer | None = None


def parse_companions(files: Mapping[str, bytes], vocab_size: int) -> Profile:
    """File name → content; `vocab_size` counts the adapter's own tokens. Raises AdapterInvalid. (Whether the template
    renders is not looked at.)"""
    generation, end_ids, warnings = _generation(files[GENERATION_FILE], vocab_size) if GENERATION_FILE in files else (
        {}, (), ()
    )  # fmt: skip
    defaults = _defaults(files[DEFAULTS_FILE]) if DEFAULTS_FILE in files else {}
    system_prompt = defaults.pop("system_prompt", None)
    template = _text(files[TEMPLATE_FILE]) if TEMPLATE_FILE in files else None
    tokens = parse_new_tokens(files[TOKENS_FILE]) if TOKENS_FILE in files else ()
    return Profile(template, system_prompt, generation | defaults, end_ids, warnings, tokens)


def template_invalid(message: str) -> AdapterInvalid:
    return AdapterInvalid(CODES[TEMPLATE_FILE], f"{TEMPLATE_FILE}: {shown(message, 500)}", TEMPLATE_FILE)


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise template_invalid("is not UTF-8") from None
    if not text.strip():
        raise template_invalid("is empty")
    return text


def _defaults(data: bytes) -> dict[str, Any]:
    try:
        found = DefaultValues.model_validate(_object(data, DEFAULTS_FILE)).model_dump(exclude_none=True)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        _invalid(DEFAULTS_FILE, str(detail["loc"][0]), detail["msg"])
    _check_ranges(DEFAULTS_FILE, {name: value for name, value in found.items() if name != "system_prompt"})
    return found


def _generation(data: bytes, vocab_size: int) -> tuple[dict[str, Any], tuple[int, ...], tuple[str, ...]]:
    raw = {name: value for name, value in _object(data, GENERATION_FILE).items() if value is not None}
    found: dict[str, Any] = {}
    kinds: dict[str, tuple[type, ...]] = {
        "temperature": (int, float), "top_p": (int, float), "min_p": (int, float), "repetition_penalty": (int, float),
        "top_k": (int,), "max_new_tokens": (int,), "do_sample": (bool,),
    }  # fmt: skip
    for name, types in kinds.items():
        if name in raw and (type(raw[name]) not in types):
            _invalid(GENERATION_FILE, name, f"must be {' or '.join(kind.__name__ for kind in types)}")
        if name in raw:
            found[name] = raw[name]
    if found.pop("do_sample", True) is False:
        found["temperature"] = 0.0
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    _check_ranges(GENERATION_FILE, found)
    ids = raw.get("eos_token_id", [])
    end_ids = tuple(ids) if isinstance(ids, list) else (ids,)
    if not all(type(token) is int and 0 <= token < vocab_size for token in end_ids):
        _invalid(GENERATION_FILE, "eos_token_id", f"must be ids of tokens in [0, {vocab_size})")
    unused = sorted(
        name for name in raw if name not in {*kinds, "eos_token_id", *_SAID_ELSEWHERE} and not name.startswith("_")
    )
    names = ", ".join(shown(name, 40) for name in unused[:10])
    return found, end_ids, (f"{GENERATION_FILE}: not used: {names}",) if unused else ()


def _check_ranges(file: str, values: Mapping[str, Any]) -> None:
    try:
        SamplingParams(**values)
    except ParamsError as error:
        name = "max_new_tokens" if file == GENERATION_FILE and error.param == "max_tokens" else error.param
        _invalid(file, name, error.message)


def _object(data: bytes, file: str) -> dict[str, Any]:
    try:
        return parse_object(data)
    except ValueError as error:
        _invalid(file, None, str(error))


def _invalid(file: str, key: str | None, problem: str) -> NoReturn:
    subject = file if key is None else f"{file}: {shown(key)}"
    raise AdapterInvalid(CODES[file], f"{subject} {shown(problem, 300)}", key or file)
