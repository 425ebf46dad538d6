"""Fuzzing with coverage: `python -m tests.fuzz header|config|pickled|companions CORPUS_DIR [options of libFuzzer]`.

Without `-runs` or `-max_total_time` it goes on until it finds something, and leaves that in a file crash-…; move it to
tests/fuzz/findings/<target>/, where the tests read it again, and mend the parser.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["adapters", "gateway.companions", "tests.fuzz.targets"]):
    from tests.fuzz.targets import TARGETS, run

from tests.fuzz.seeds import seeds, words


def main() -> None:
    target, corpus = sys.argv[1], Path(sys.argv[2])
    if target not in TARGETS:
        sys.exit(f"no such target: {target}")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (corpus / f"seed-{number}").write_bytes(seed)
    dictionary = corpus.with_name(f"{corpus.name}.dict")
    dictionary.write_text("".join(f'"{_escaped(word)}"\n' for word in words(target)))
    atheris.Setup([sys.argv[0], str(corpus), f"-dict={dictionary}", *sys.argv[3:]], partial(run, target))
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
