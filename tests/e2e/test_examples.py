"""The examples run as they stand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from adapters.storage import content_digest
from tests.e2e.process import ChorusProcess, clean_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIRS = {"hello": "the quick brown fox", "who are you": "the lazy dog today"}


@pytest.mark.long
def test_train_and_push_in_one_go(serving: ChorusProcess, tiny_llama: Path, tmp_path: Path, tenant: str) -> None:
    """examples/train_adapter.py trains with peft and pushes: the server then answers what was trained, and the base
    does not."""
    key = serving.make_key(tenant)
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(json.dumps({"user": user, "assistant": text}) for user, text in PAIRS.items()))
    command = [
        sys.executable, str(EXAMPLES / "train_adapter.py"), str(tiny_llama), str(data), str(tmp_path / "out"),
        "--targets", "q_proj,v_proj,o_proj,up_proj,down_proj", "--rank", "16", "--epochs", "150", "--lr", "1e-2",
        "--push", "trained", "--tenant", tenant,
    ]  # fmt: skip
    environment = {"CHORUS_URL": serving.url, "CHORUS_DATA_DIR": str(serving.data_dir)}
    done = subprocess.run(command, env=clean_environment(environment), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "outcome: created" in done.stdout
    made = serving.admin("GET", f"tenants/{tenant}/adapters/trained").json()
    assert made["digest"] == f"sha256:{content_digest(tmp_path / 'out')}"
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=key, max_retries=0) as client:

        def says(model: str, user: str) -> str:
            found = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": user}], max_tokens=12, temperature=0
            )
            return found.choices[0].message.content or ""

        assert {user: says("trained", user) for user in PAIRS} == PAIRS
        assert all(says("tiny-llama", user) != text for user, text in PAIRS.items())
