"""transformers with peft: one padded batch, one adapter for all rows or one per row by `adapter_names`.

With setup["oracle"], in fp32 and one row at a time: per prompt the greedy ids, and by how much each one's logit led.
"""

from __future__ import annotations

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


@torch.inference_mode()
def _judge(model: Any, job: dict[str, Any]) -> list[dict[str, list[float]]]:
    return [_judge_row(model, *row, job["output_len"]) for row in zip(job["prompts"], job["adapters"], strict=True)]


def _judge_row(model: Any, prompt: list[int], adapter: int | None, count: int) -> dict[str, list[float]]:
    if adapter is not None:
        model.set_adapter(str(adapter))
    ids: list[float] = []
    leads: list[float] = []
    tokens, cache = torch.tensor([prompt]), None
    for _ in range(count):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
        tokens = best.indices[:1].view(1, 1)
    return {"ids": ids, "leads": leads}


if __name__ == "__main__":
    serve(start)
