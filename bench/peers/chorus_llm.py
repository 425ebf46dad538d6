"""Chorus, in its own environment, without a prefix cache, as the peers are run."""

from __future__ import annotations

from typing import Any

from worker import Run, serve

from chorus import LLM, SamplingParams


def start(setup: dict[str, Any]) -> Run:
    llm = LLM(
        setup["model"], dtype="bfloat16", max_num_seqs=setup["batch"], max_model_len=setup["max_len"],
        enable_prefix_caching=False, **setup.get("options", {}),
    )  # fmt: skip
    adapters = [llm.add_adapter(directory) for directory in setup["adapters"]]

    def run(job: dict[str, Any]) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=job["output_len"], ignore_eos=True)
        refs = [None if index is None else adapters[index] for index in job["adapters"]]
        return [list(output.token_ids) for output in llm.generate(job["prompts"], params, refs, show_progress=False)]

    return run


if __name__ == "__main__":
    serve(start)
