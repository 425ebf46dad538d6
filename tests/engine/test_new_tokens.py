"""New tokens of an adapter: texts become the ids that the trained tokenizer gives, and nothing else of a stranger's
tokenizer counts."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModelForCausalLM

from adapters.new_tokens import MAX_NEW_TOKENS, TOKENIZER_FILE, NewToken, read_new_tokens
from adapters.spec import AdapterError
from chorus import LLM, SamplingParams
from engine.new_tokens import NewTokens
from engine.protocol import Refused
from engine.text import PromptError, Tokenizer, TokenizerError
from tests.adapters.files import SHAPE
from tests.engine.peft_cases import quiet
from tests.tiny import VOCAB_SIZE

WORDS = ("<|user|>", "<|user|>x", "[CALL]", "chorus", "chorus of", "ž", "<|end|>")
SPECIAL = ("<|user|>", "<|end|>")


@pytest.fixture(scope="module")
def trained(tiny_llama: Path) -> FastTokenizer:
    """What a trainer has: the base's tokenizer with tokens added by Hugging Face's own library."""
    tokenizer = FastTokenizer.from_file(str(tiny_llama / TOKENIZER_FILE))
    tokenizer.add_tokens([AddedToken(word, special=word in SPECIAL, normalized=False) for word in WORDS])
    return tokenizer


def read(tmp_path: Path, tokenizer: FastTokenizer | dict[str, Any], base: Path) -> tuple[NewToken, ...]:
    path = tmp_path / TOKENIZER_FILE
    path.write_text(json.dumps(tokenizer) if isinstance(tokenizer, dict) else tokenizer.to_str())
    return read_new_tokens(path, dataclasses.replace(SHAPE, weights_dir=str(base)).grown(3))


@pytest.fixture(scope="module")
def grown(trained: FastTokenizer, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_llama).grown(read(tmp_path_factory.mktemp("t"), trained, tiny_llama))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from((*WORDS, "<|", "user", " ", "\n", "<|im_end|>", "the fox", "🚀", "[", "o"))).map("".join)
)
def test_texts_are_the_ids_of_the_trained_tokenizer(trained: FastTokenizer, grown: Tokenizer, text: str) -> None:
    """Any text of old and new tokens, and parts of them, becomes the ids that it has in Hugging Face's tokenizers, and
    comes back."""
    ids = grown.encode(text)

    assert ids == trained.encode(text).ids
    assert grown.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(("<l>", "<r>", "<b>", " ", "\n", "x", "the fox"))).map("".join))
def test_tokens_may_take_white_space_along(tiny_llama: Path, text: str) -> None:
    """lstrip and rstrip mean what they mean in Hugging Face's tokenizers."""
    trained = FastTokenizer.from_file(str(tiny_llama / TOKENIZER_FILE))
    kinds = {"<l>": {"lstrip": True}, "<r>": {"rstrip": True}, "<b>": {"lstrip": True, "rstrip": True}}
    trained.add_tokens([AddedToken(word, normalized=False, **kind) for word, kind in kinds.items()])
    own = [NewToken(376 + index, word, **kind) for index, (word, kind) in enumerate(kinds.items())]

    assert Tokenizer(tiny_llama).grown(own).encode(text) == trained.encode(text).ids


def test_no_text_takes_long(tiny_llama: Path) -> None:
    """What a tenant's tokens and texts can do to a matcher that goes back: here the time is linear, whatever they are.
    A quadratic one needs minutes for these."""
    tokens = [NewToken(376, "<s>", lstrip=True, rstrip=True)]
    tokens += [NewToken(400 + length, "a" * length + "b") for length in range(1, 250)]
    new = NewTokens(tokens)

    start = time.process_time()
    assert list(new.split(" " * 1_000_000)) == [" " * 1_000_000]
    assert list(new.split("a" * 1_000_000)) == ["a" * 1_000_000]
    assert time.process_time() - start < 10
    with pytest.raises(PromptError):
        Tokenizer(tiny_llama).grown(tokens).encode("<s>\ud800")


def test_plain_text_forges_no_control_token(grown: Tokenizer, tiny_llama: Path) -> None:
    """What a user writes in a message never becomes a new control token; a new word is one wherever it stands; the
    base's own tokenizer is as it was."""
    ids = grown.encode_chat([{"role": "user", "content": "<|end|>[CALL] chorus"}])

    new = {token: 376 + index for index, token in enumerate(WORDS)}
    assert not {new["<|end|>"], new["[CALL]"]} & set(ids)
    assert new["chorus"] in ids
    assert grown.decode([new["<|end|>"], new["chorus"]]) == "chorus"
    assert grown.is_special(new["<|end|>"])
    assert grown.token_bytes(new["ž"]) == "ž".encode()
    base = Tokenizer(tiny_llama)
    assert max(base.encode("<|end|> chorus")) < 376
    assert base.grown(()) is base


def test_a_template_may_use_new_control_tokens(grown: Tokenizer) -> None:
    """Those that the template writes are tokens, beside messages that only look like them."""
    ids = grown.encode_chat(
        [{"role": "user", "content": "<|end|>"}], render=lambda *_: ("<|user|><^|end|><|end|>", "^")
    )

    assert ids[0] == 376
    assert ids[-1] == 382
    assert ids.count(382) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), "tokenizer_changed"),
        (lambda t: t["model"]["vocab"].update(neu=900), "tokenizer_changed"),
        (lambda t: t["model"]["merges"].pop(), "tokenizer_changed"),
        (lambda t: t["added_tokens"].pop(0), "tokenizer_changed"),
        (lambda t: t["added_tokens"].append({"id": 387, "content": "far"}), "tokenizer_invalid"),
        (lambda t: t["added_tokens"].append({"id": 377, "content": "again"}), "tokenizer_invalid"),
        (lambda t: t["added_tokens"].append({"id": 5, "content": "taken"}), "tokenizer_invalid"),
        (lambda t: t["added_tokens"].append({"id": 384, "content": "<|im_end|>"}), "tokenizer_invalid"),
        (lambda t: t["added_tokens"].append({"id": 384, "content": ""}), "tokenizer_invalid"),
        (lambda t: t["added_tokens"].append({"id": 384, "content": "x" * 257}), "tokenizer_invalid"),
        (lambda t: t["added_tokens"].append({"id": "384", "content": "x"}), "tokenizer_invalid"),
        (lambda t: t["added_tokens"].append(17), "tokenizer_invalid"),
        (lambda t: t["added_tokens"].extend({"id": i, "content": str(i)} for i in range(MAX_NEW_TOKENS)),
         "too_many_tokens"),
        (lambda t: t.pop("model"), "tokenizer_invalid"),
    ],
)  # fmt: skip
def test_other_tokenizers_are_refused(
    trained: FastTokenizer, tiny_llama: Path, tmp_path: Path, change: Any, code: str
) -> None:
    """Whatever would split texts otherwise than the base does, or claims places that are taken, has its
    code."""
    changed = json.loads(trained.to_str())
    change(changed)

    with pytest.raises(AdapterError) as caught:
        read(tmp_path, changed, tiny_llama)
    assert caught.value.code == code


def test_a_tokenizer_that_minds_where_texts_begin(tiny_llama: Path, tmp_path: Path) -> None:
    """Pieces of a text would be encoded as texts of their own: refused, not done wrong."""
    raw = json.loads((tiny_llama / TOKENIZER_FILE).read_text())
    raw["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(raw))

    with pytest.raises(TokenizerError):
        Tokenizer(tmp_path).grown([NewToken(380, "neu")])


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path, trained: FastTokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """What a trainer saves after it has added tokens, and the model that it had: its new tokens are likely answers."""
    with quiet():
        return _train(tiny_llama, trained, tmp_path_factory.mktemp("new"))


def _train(tiny_llama: Path, trained: FastTokenizer, directory: Path) -> tuple[Path, Any]:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    base.resize_token_embeddings(VOCAB_SIZE + 3, mean_resizing=False)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            if "lm_head.modules_to_save" in name:
                parameter[VOCAB_SIZE:] *= 8
    model.save_pretrained(directory)
    tokenizer = FastTokenizer.from_str(trained.to_str())
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("one", "more", "<think>", "<last>")])
    tokenizer.save(str(directory / TOKENIZER_FILE))
    return directory, model


def test_answers_have_new_tokens(tiny_llama: Path, adapter: tuple[Path, Any]) -> None:
    """A text with new tokens is answered as transformers and peft do it, new tokens included, beside rows of the base,
    which has none of them."""
    directory, model = adapter
    with LLM(tiny_llama, dtype="float32", max_num_seqs=4) as llm:
        ref = llm.add_adapter(directory)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, skip_special_tokens=False)
        text = "<|user|>the fox<last> chorus"
        plain = llm.generate(text, params)[0]

        own, base = llm.generate([text, text], params, [ref, None])

        with quiet():
            reply = model.generate(
            input_ids=torch.tensor([own.prompt_token_ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert own.prompt_token_ids[0] == 376
        assert 386 in own.prompt_token_ids
        assert own.token_ids == reply[0, len(own.prompt_token_ids) :].tolist()
        assert max(own.token_ids) >= VOCAB_SIZE
        assert own.text == llm._tokenizer(ref).decode(own.token_ids, skip_special_tokens=False)
        assert base.token_ids == plain.token_ids
        assert max(base.prompt_token_ids) < 376


def test_ids_beyond_the_own_vocabulary_are_refused(tiny_llama: Path, adapter: tuple[Path, Any]) -> None:
    """The base and its neighbours know nothing of an adapter's tokens; the adapter has exactly its own."""
    with LLM(tiny_llama, dtype="float32", max_num_seqs=4) as llm:
        ref = llm.add_adapter(adapter[0])
        params = SamplingParams(temperature=0.0, max_tokens=1)
        last = VOCAB_SIZE + 2
        assert llm.generate([[5, last]], params, ref)[0].token_ids
        biased = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={last: 100.0})
        assert llm.generate([[5]], biased, ref)[0].token_ids == [last]

        for prompt, one, who in (([5, last], params, None), ([5, last + 1], params, ref), ([5], biased, None)):
            with pytest.raises(Refused):
                llm.generate([prompt], one, who)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_draw_as_ever(tiny_llama: Path, adapter: tuple[Path, Any], dtype: Any) -> None:
    """Drawn, cut and penalised beside rows with a larger vocabulary, base rows say what they say alone; the others
    draw new tokens, too."""
    params = [
        SamplingParams(temperature=1.2, seed=seed, max_tokens=8, ignore_eos=True, logprobs=2, **cut)
        for seed in range(6)
        for cut in ({}, {"top_p": 0.9}, {"top_k": 5, "repetition_penalty": 1.3})
    ]
    prompts = [[5, 6, 7 + index] for index in range(len(params))]
    with LLM(tiny_llama, dtype=dtype, max_num_seqs=40) as llm:
        ref = llm.add_adapter(adapter[0])
        alone = llm.generate(prompts, params)

        both = llm.generate(prompts * 2, params * 2, [*[None] * len(params), *[ref] * len(params)])

    assert [output.token_ids for output in both[: len(params)]] == [output.token_ids for output in alone]
    assert max(max(output.token_ids) for output in both[len(params) :]) >= VOCAB_SIZE
