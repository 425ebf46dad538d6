"""transformers with peft: one padded batch, one adapter for all rows or one per row by `adapter_names`.

With setup["oracle"], in fp32 and one row at a time: of each token of job["made"], which follows its prompt and the
tokens made before it, by how much its logit is less than the best one's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from worker import Run, serve


def start(setup: dict[str, Any]) -> Run:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    is_oracle = setup.get("oracle", False)
    dtype = torch.float32 if is_oracle else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=dtype).eval()
    for index, directory in enumerate(setup["adapters"]):
        if index == 0:
            model = PeftModel.from_pretrained(model, directory, adapter_name="0")
        else:
            model.load_adapter(directory, adapter_name=str(index))
    model = model.to(dtype).eval()
    return (lambda job: _judge(model, job)) if is_oracle else (lambda job: _generate(model, job))


@torch.inference_mode()
def _generate(model: Any, job: dict[str, Any]) -> list[list[int]]:
    ids = torch.tensor(job["prompts"])
    names = [str(index) for index in job["adapters"]]
    rows = {"adapter_names": names} if len(set(names)) > 1 else {}
    count = job["output_len"]
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, pad_token_id=2, **rows,
    )  # fmt: skip
    answers: list[list[int]] = made[:, ids.shape[1] :].tolist()
    return answers


def _judge(model: Any, job: dict[str, Any]) -> list[list[float]]:
    rows = zip(job["prompts"], job["made"], job["adapters"], strict=True)
    return [_judge_row(model, *row) for row in rows]


@torch.inference_mode()
def _judge_row(model: Any, prompt: list[int], made: list[int], adapter: int | None) -> list[float]:
    if adapter is not None:
        model.set_adapter(str(adapter))
    is_bare = adapter is None and hasattr(model, "disable_adapter")  # a row of the base, with adapters loaded
    ids = torch.tensor([prompt + made[:-1]])
    with model.disable_adapter() if is_bare else nullcontext():
        logits = model(input_ids=ids, logits_to_keep=len(made)).logits[0]
    own = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    shortfalls: list[float] = (logits.max(dim=1).values - own).tolist()
    return shortfalls


if __name__ == "__main__":
    serve(start)
