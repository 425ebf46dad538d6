"""GGUF file → checkpoint directory (bf16 safetensors, config, tokenizer, chat template), as a command of its own:

    python -m engine.model.gguf FILE OUT_DIR

It loads torch and transformers, which read the format, so its caller needs neither.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(file: Path, directory: Path) -> None:
    """Writes into `directory` what engine.model.weights and engine.text read. Quantised weights become bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
