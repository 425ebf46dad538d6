"""Train a small LoRA adapter with peft on the pairs of a JSONL file: one {"user": …, "assistant": …} a line.

    python examples/train_adapter.py MODEL_DIR examples/data/pirate.jsonl OUT_DIR --rank 4 --targets q_proj,v_proj

OUT_DIR gets adapter_config.json and adapter_model.safetensors, ready for `chorus adapters push`; with `--push NAME`
that is done at once, to the server that CHORUS_URL and CHORUS_ADMIN_KEY (or CHORUS_DATA_DIR) name:

    python examples/train_adapter.py MODEL_DIR examples/data/pirate.jsonl OUT_DIR --push pirate --tenant acme

On two CPU cores and the demo model this takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

IGNORE = -100


def encode(tokenizer, pair: dict[str, str]) -> tuple[list[int], list[int]]:
    """(ids, labels) of one conversation: only the answer and its end-of-turn token are learned."""
    turn = [{"role": "user", "content": pair["user"]}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    answer = pair["assistant"] + tokenizer.eos_token
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return prompt_ids + answer_ids, [IGNORE] * len(prompt_ids) + answer_ids


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
    }


def push(directory: Path, name: str, tenant: str | None) -> None:
    """Makes it what the server has under this name."""
    owner = ["--tenant", tenant] if tenant else []
    command = [sys.executable, "-m", "gateway.cli", "adapters", "push", str(directory), "--as", name, *owner]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="q_proj,v_proj")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--push", metavar="NAME", help="push it to a running server under this name")
    parser.add_argument("--tenant", help="whose it becomes [shared by all]")
    args = parser.parse_args()

    torch.manual_seed(0)
    random.seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules=args.targets.split(","), task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config)
    model.print_trainable_parameters()

    rows = [encode(tokenizer, json.loads(line)) for line in args.data.read_text().splitlines()]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr, weight_decay=0.0)
    steps = args.epochs * ((len(rows) + args.batch - 1) // args.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps, pct_start=0.1)
    for epoch in range(args.epochs):
        random.shuffle(rows)
        total = 0.0
        batches = [rows[i : i + args.batch] for i in range(0, len(rows), args.batch)]
        for batch in batches:
            loss = model(**collate(batch, tokenizer.pad_token_id)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total += float(loss)
        print(f"epoch {epoch + 1}/{args.epochs}: loss {total / len(batches):.3f}", flush=True)

    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = args.model.name
    model.save_pretrained(args.out)
    (args.out / "README.md").unlink(missing_ok=True)  # peft's empty model card
    if args.push:
        push(args.out, args.push, args.tenant)


if __name__ == "__main__":
    main()
