"""The conversation between bench/peers.py and one engine's process, as lines of JSON. Standard library only: it runs in
each peer's own environment.

The process is started with its setup as the only argument and says {"load_s": …} when ready. Then, for each job
{"prompts": [[id, …], …], "output_len": n, "adapters": [index or null per prompt]}, it makes exactly n tokens per
prompt, greedily, and answers {"seconds": …, "answers": …}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[dict[str, Any]], Any]


def serve(start: Callable[[dict[str, Any]], Run]) -> None:
    """Answers jobs until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    began = time.perf_counter()
    run = start(json.loads(sys.argv[1]))
    say(load_s=time.perf_counter() - began)
    for line in sys.stdin:
        began = time.perf_counter()
        made = run(json.loads(line))
        say(seconds=time.perf_counter() - began, answers=made)
