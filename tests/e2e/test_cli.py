"""The commands over the admin API against a running server; and what they say when it goes wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.cli import main
from tests.e2e.process import ChorusProcess, clean_environment
from tests.tiny import tiny_adapter


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def chorus(*arguments: str, **environ: str) -> Done:
    """The program as its console script runs it, in this process: only the start of an interpreter is spared."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in [name for name in os.environ if name.startswith("CHORUS_")]:
            patch.delenv(name)
        for name, value in ({"COLUMNS": "200"} | environ).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["chorus", *arguments])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


@pytest.fixture
def where(serving: ChorusProcess) -> dict[str, str]:
    """Environment of an operator of the running server."""
    return {"CHORUS_URL": serving.url, "CHORUS_DATA_DIR": str(serving.data_dir)}


def as_json(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tenants_from_first_to_last(where: dict[str, str]) -> None:
    """Create, list, show, change, suspend, delete: each prints what the server answered."""
    made = as_json(
        chorus("tenants", "create", "t-cli", "--tokens-per-minute", "1000", "--model", "a*", "--json", **where)
    )
    assert (made["id"], made["limits"]["tokens_per_minute"], made["models"]) == ("t-cli", 1000, ["a*"])

    assert "t-cli" in [tenant["id"] for tenant in as_json(chorus("tenants", "list", "--json", **where))]
    assert as_json(chorus("tenants", "update", "t-cli", "--suspend", "--json", **where))["suspended"] is True
    assert as_json(chorus("tenants", "show", "t-cli", "--json", **where))["suspended"] is True
    table = chorus("tenants", "list", **where)
    assert "t-cli" in table.stdout
    assert chorus("tenants", "delete", "t-cli", **where).returncode == 0
    gone = chorus("tenants", "show", "t-cli", **where)
    assert gone.returncode == 1
    assert "HTTP 404" in gone.stderr
    assert len(gone.stderr.splitlines()) == 1


def test_keys_from_first_to_last(where: dict[str, str], serving: ChorusProcess) -> None:
    """A key works from the moment it is shown until it is revoked; lists never show it."""
    as_json(chorus("tenants", "create", "k-cli", "--json", **where))
    made = as_json(chorus("keys", "create", "k-cli", "prod", "--concurrency", "2", "--json", **where))

    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=made["key"], max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny-llama"]
        listed = chorus("keys", "list", "k-cli", "--json", **where)
        assert made["key"] not in listed.stdout
        assert [key["id"] for key in json.loads(listed.stdout)] == [made["id"]]
        assert chorus("keys", "revoke", "k-cli", made["id"], **where).returncode == 0
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_adapters_from_first_to_last(
    where: dict[str, str], serving: ChorusProcess, tiny_llama: Path, tmp_path: Path
) -> None:
    """Add, replace, roll back, list, delete an adapter of a tenant; each version answers with its own voice."""
    first = tiny_adapter(tmp_path / "first", tiny_llama, seed=1, strength=3)
    second = tiny_adapter(tmp_path / "second", tiny_llama, seed=2, strength=3, rank=8)
    key = serving.make_key("a-cli")
    mine = ("--tenant", "a-cli", "--json")

    def answer() -> str:
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=key, max_retries=0) as client:
            return (
                client.completions.create(model="voice", prompt="the fox", max_tokens=8, temperature=0).choices[0].text
            )

    added = as_json(chorus("adapters", "add", "voice", str(first), *mine, **where))
    assert (added["id"], added["version"], added["rank"], added["status"]) == ("voice", 1, 4, "ready")
    assert added["digest"].startswith("sha256:")
    one = answer()

    assert as_json(chorus("adapters", "replace", "voice", str(second), *mine, **where))["version"] == 2
    two = answer()
    assert two != one

    as_json(chorus("adapters", "activate", "voice", "1", "--if-current", "2", *mine, **where))
    assert answer() == one
    lost = chorus("adapters", "activate", "voice", "2", "--if-current", "2", *mine, **where)
    assert lost.returncode == 1
    assert "HTTP 409" in lost.stderr

    assert [adapter["id"] for adapter in as_json(chorus("adapters", "list", *mine, **where))] == ["voice"]
    assert as_json(chorus("adapters", "show", "voice", *mine, **where))["digest"] == added["digest"]
    assert chorus("adapters", "delete", "voice", "--tenant", "a-cli", **where).returncode == 0
    with pytest.raises(openai.NotFoundError):
        answer()


def test_an_adapter_directory_is_checked_before_sending(where: dict[str, str], tmp_path: Path) -> None:
    """A directory without the two files is named, and nothing is sent."""
    done = chorus("adapters", "add", "x", str(tmp_path), **where)

    assert done.returncode == 1
    assert "adapter_config.json" in done.stderr


def test_no_server_is_one_line(tmp_path: Path) -> None:
    """A server that is not there: its address and what to do, no traceback."""
    done = chorus(
        "tenants", "list", CHORUS_URL="http://127.0.0.1:9", CHORUS_ADMIN_KEY="k", CHORUS_DATA_DIR=str(tmp_path)
    )

    assert done.returncode == 1
    assert "http://127.0.0.1:9" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_admin_key_is_one_line(tmp_path: Path) -> None:
    """Without an admin key nothing is asked: it says where one would be found."""
    done = chorus("tenants", "list", CHORUS_DATA_DIR=str(tmp_path))

    assert done.returncode == 78
    assert "CHORUS_ADMIN_KEY" in done.stderr


def test_the_wrong_admin_key_is_refused(where: dict[str, str]) -> None:
    """The admin API says no, and the command says so."""
    done = chorus("tenants", "list", **where | {"CHORUS_ADMIN_KEY": "wrong"})

    assert done.returncode == 1
    assert "HTTP 401" in done.stderr


def test_the_program_is_a_program() -> None:
    """`python -m gateway.cli --version` as a process: it starts, and says which it is."""
    command = [sys.executable, "-m", "gateway.cli", "--version"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)

    assert done.returncode == 0
    assert done.stdout.startswith("chorus ")


def test_migrate_and_back(tmp_path: Path) -> None:
    """`chorus migrate` makes the schema and the secrets; --revision base takes the schema back."""
    here = {"CHORUS_DATA_DIR": str(tmp_path)}
    up = chorus("migrate", **here)
    again = chorus("migrate", **here)
    down = chorus("migrate", "--revision", "base", **here)

    assert (up.returncode, again.returncode, down.returncode) == (0, 0, 0)
    assert "admin key" in up.stdout
    assert "admin key" not in again.stdout
    assert "revision none" in down.stdout
    assert (tmp_path / "pepper").exists()


def test_migrate_on_postgres(postgres_url: str, tmp_path: Path) -> None:
    """The same on PostgreSQL; a server that is away is one line without its password."""
    up = chorus("migrate", "--database-url", postgres_url, CHORUS_DATA_DIR=str(tmp_path))
    away = chorus("migrate", "--database-url", "postgresql://u:s3cret@127.0.0.1:9/x", CHORUS_DATA_DIR=str(tmp_path))

    assert up.returncode == 0, up.stderr
    assert away.returncode == 78
    assert "127.0.0.1" in away.stderr
    assert "s3cret" not in away.stderr


def test_health_says_who_answers(serving: ChorusProcess, tmp_path: Path) -> None:
    """`chorus health` is 0 for a part that answers, 1 for one that does not."""
    here = {"CHORUS_DATA_DIR": str(serving.data_dir), "CHORUS_PORT": serving.url.rsplit(":", 1)[1]}

    assert chorus("health", "engine", **here).returncode == 0
    assert chorus("health", "gateway", **here).returncode == 0
    assert chorus("health", "gateway", CHORUS_PORT="9", CHORUS_DATA_DIR=str(tmp_path)).returncode == 1
    assert chorus("health", "engine", CHORUS_DATA_DIR=str(tmp_path)).returncode == 1
