"""llama.cpp through its Python binding, one sequence at a time; setup["model"] is a GGUF file."""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

from worker import Run, serve


def start(setup: dict[str, Any]) -> Run:
    from llama_cpp import Llama

    threads = os.cpu_count()
    llama = Llama(setup["model"], n_ctx=setup["max_len"], n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(job: dict[str, Any]) -> list[list[int]]:
        answers = []
        for prompt in job["prompts"]:
            llama.reset()
            answers.append([int(i) for i in islice(llama.generate(prompt, temp=0.0), job["output_len"])])
        return answers

    return run


if __name__ == "__main__":
    serve(start)
