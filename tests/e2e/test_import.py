"""Moving in from vLLM, against a running server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file

from adapters.storage import content_digest
from tests.e2e.process import ChorusProcess
from tests.e2e.test_cli import as_json, chorus
from tests.tiny import tiny_adapter


@pytest.fixture
def where(serving: ChorusProcess) -> dict[str, str]:
    return {"CHORUS_URL": serving.url, "CHORUS_DATA_DIR": str(serving.data_dir)}


def answers(serving: ChorusProcess, key: str, model: str) -> str:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=key, max_retries=0) as client:
        found = client.completions.create(model=model, prompt="the fox", max_tokens=8, temperature=0)
    assert found.model == model
    return found.choices[0].text


def rows(text: str) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(text)}


def test_clients_go_on_as_before(
    serving: ChorusProcess, where: dict[str, str], tiny_llama: Path, tmp_path: Path, tenant: str
) -> None:
    """Old names work, whether they fit the pattern or not; a second run changes nothing; new weights a version."""
    sql = tiny_adapter(tmp_path / "sql", tiny_llama, seed=1, strength=3)
    (sql / "generation_config.json").write_text('{"temperature": 1.9, "max_new_tokens": 1}')
    chat = tiny_adapter(tmp_path / "chat", tiny_llama, seed=2, strength=3)
    key = serving.make_key(tenant)
    serving.admin("PATCH", f"tenants/{tenant}", json={"model_names": {"gpt-4": "sql"}})
    command = (
        "import", "vllm", "--tenant", tenant, "--json", "--lora-modules", f"sql={sql}",
        json.dumps({"name": "org/chat lora", "path": str(chat), "base_model_name": "tiny"}),
    )  # fmt: skip

    first = as_json(chorus(*command, **where))
    second = as_json(chorus(*command, **where))

    assert [(row["name"], row["id"], row["outcome"]) for row in first] == [
        ("sql", "sql", "created"), ("org/chat lora", "org-chat-lora", "created")
    ]  # fmt: skip
    assert [row["outcome"] for row in second] == ["unchanged", "unchanged"]
    assert answers(serving, key, "sql") == answers(serving, key, "gpt-4") != answers(serving, key, "org/chat lora")
    assert serving.admin("GET", f"tenants/{tenant}").json()["model_names"] == {
        "gpt-4": "sql", "org/chat lora": "org-chat-lora"
    }  # fmt: skip
    kept = serving.admin("GET", f"tenants/{tenant}/adapters/sql").json()
    (sql / "generation_config.json").unlink()
    assert (kept["version"], kept["digest"]) == (1, f"sha256:{content_digest(sql)}")

    tiny_adapter(sql, tiny_llama, seed=3, strength=3)
    assert [row["outcome"] for row in as_json(chorus(*command, **where))] == ["replaced", "unchanged"]


def test_an_old_name_never_takes_anothers_adapter(
    where: dict[str, str], serving: ChorusProcess, tiny_llama: Path, tmp_path: Path, tenant: str
) -> None:
    """HS-14: names that would become the same here stay two adapters, in one run or in two; a name that stands for
    another model already is not turned round."""
    serving.make_key(tenant)
    for seed in (1, 2, 3):
        tiny_adapter(tmp_path / str(seed), tiny_llama, seed=seed)
    mine = ("import", "vllm", "--tenant", tenant, "--json")

    one = as_json(chorus(*mine, f"a/b={tmp_path / '1'}", **where))
    two = as_json(chorus(*mine, f"a b={tmp_path / '2'}", **where))
    serving.admin("PATCH", f"tenants/{tenant}", json={"model_names": {"taken": "a-b"}})
    lost = chorus(*mine, f"taken={tmp_path / '3'}", **where)

    assert one[0]["id"] == "a-b"
    assert two[0]["id"].startswith("a-b-")
    assert (lost.returncode, rows(lost.stdout)["taken"]["code"]) == (1, "conflict")
    found = serving.admin("GET", f"tenants/{tenant}/adapters").json()["data"]
    assert {row["digest"] for row in found} == {f"sha256:{content_digest(tmp_path / str(seed))}" for seed in (1, 2)}


def test_a_dry_run_and_a_partial_failure(
    serving: ChorusProcess, where: dict[str, str], tiny_llama: Path, tmp_path: Path, tenant: str
) -> None:
    """A row per adapter: ready, or code and cure, with nothing sent; then what is fine comes in, the rest is told."""
    adapters = tmp_path / "adapters"
    tiny_adapter(adapters / "fine", tiny_llama, seed=1)
    pickled = tiny_adapter(adapters / "pickled", tiny_llama, seed=2)
    torch.save(load_file(pickled / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    (pickled / "adapter_model.safetensors").unlink()
    tiny_adapter(adapters / "large", tiny_llama, seed=3, rank=128)
    shutil.copytree(adapters / "fine", adapters / "cut")
    whole = (adapters / "cut" / "adapter_model.safetensors").read_bytes()
    (adapters / "cut" / "adapter_model.safetensors").write_bytes(whole[:-1])
    shutil.copytree(adapters / "fine", adapters / "tiny-llama")
    serving.make_key(tenant)
    command = ("import", "vllm", str(adapters), f"gone={tmp_path / 'gone'}", "--tenant", tenant, "--json")

    dry = chorus(*command, "--dry-run", "--model", str(tiny_llama), CHORUS_DATA_DIR=str(tmp_path))
    assert not serving.admin("GET", f"tenants/{tenant}/adapters").json()["data"]
    real = chorus(*command, **where)

    assert (dry.returncode, real.returncode) == (1, 1)
    wanted = {
        "fine": None, "pickled": None, "large": "rank_too_large", "cut": "weights_truncated", "gone": "file_missing",
        "tiny-llama": "name_reserved",
    }  # fmt: skip
    assert {name: row["code"] for name, row in rows(dry.stdout).items()} == wanted
    assert {name: row["code"] for name, row in rows(real.stdout).items()} == wanted
    assert all(row["cure"] for row in rows(dry.stdout).values() if row["code"])
    assert {name: row["digest"] for name, row in rows(dry.stdout).items() if not row["code"]} == {
        name: row["digest"] for name, row in rows(real.stdout).items() if not row["code"]
    }
    table = chorus(*command[:-1], "--dry-run", "--model", str(tiny_llama), CHORUS_DATA_DIR=str(tmp_path)).stdout
    assert "rank_too_large" in table


def test_shared_adapters_need_fitting_names(where: dict[str, str], tiny_lora: Path) -> None:
    """Without a tenant there is nobody whose names could be mapped; it says so, and nothing is sent."""
    done = chorus("import", "vllm", f"a/b={tiny_lora}", "--json", **where)

    assert (done.returncode, rows(done.stdout)["a/b"]["code"]) == (1, "name_invalid")
    assert not any(row["id"] == "a-b" for row in as_json(chorus("adapters", "ls", "--json", **where)))
