"""vLLM's CPU build. LoRA is on only where adapters are given, with as many slots as adapters: its best setting."""

from __future__ import annotations

import os
from typing import Any

from worker import Run, serve

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def start(setup: dict[str, Any]) -> Run:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    directories = setup["adapters"]
    slots = {"enable_lora": True, "max_loras": len(directories), "max_cpu_loras": len(directories), "max_lora_rank": 16}
    llm = LLM(
        model=setup["model"], dtype="bfloat16", max_model_len=setup["max_len"], max_num_seqs=setup["batch"],
        enable_prefix_caching=False, seed=0, **(slots if directories else {}),
    )  # fmt: skip
    adapters = [LoRARequest(str(index), 1 + index, path) for index, path in enumerate(directories)]

    def run(job: dict[str, Any]) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=job["output_len"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        chosen = [adapters[index] for index in job["adapters"]] if directories else None
        outputs = llm.generate(prompts, params, lora_request=chosen, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


if __name__ == "__main__":
    serve(start)
