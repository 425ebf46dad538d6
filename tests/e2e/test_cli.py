"""The commands over the admin API against a running server; and what they say when it goes wrong."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from adapters.storage import content_digest
from gateway.cli import main
from gateway.cli.cures import CURES
from tests.e2e.process import ChorusProcess, clean_environment, wait_for
from tests.tiny import grown_adapter, tiny_adapter


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
    """Push, push again, roll back, list, delete an adapter of a tenant; each version answers with its own voice."""
    first = tiny_adapter(tmp_path / "first", tiny_llama, seed=1, strength=3)
    second = tiny_adapter(tmp_path / "second", tiny_llama, seed=2, strength=3, rank=8)
    key = serving.make_key("a-cli")
    mine = ("--tenant", "a-cli", "--json")

    def answer() -> str:
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=key, max_retries=0) as client:
            return (
                client.completions.create(model="voice", prompt="the fox", max_tokens=8, temperature=0).choices[0].text
            )

    added = as_json(chorus("adapters", "push", str(first), "--as", "voice", *mine, **where))
    assert (added["outcome"], added["version"], added["rank"], added["status"]) == ("created", 1, 4, "ready")
    assert added["digest"] == f"sha256:{content_digest(first)}"
    one = answer()

    again = as_json(chorus("adapters", "push", str(first), "--as", "voice", *mine, **where))
    assert (again["outcome"], again["version"]) == ("unchanged", 1)
    assert as_json(chorus("adapters", "push", str(second), "--as", "voice", *mine, **where))["version"] == 2
    two = answer()
    assert two != one

    as_json(chorus("adapters", "activate", "voice", "1", "--if-current", "2", *mine, **where))
    assert answer() == one
    lost = chorus("adapters", "activate", "voice", "2", "--if-current", "2", *mine, **where)
    assert lost.returncode == 1
    assert "HTTP 409" in lost.stderr
    assert json.loads(lost.stdout)["error"]["code"] == "conflict"

    as_json(chorus("adapters", "activate", "voice", "2", *mine, **where))
    assert as_json(chorus("adapters", "rollback", "voice", *mine, **where))["current_version"] == 1
    assert answer() == one
    back = [as_json(chorus("adapters", "rollback", "voice", *mine, **where))["current_version"] for _ in range(2)]
    assert back == [2, 1]
    nothing = chorus("adapters", "rollback", "voice", *mine, **where)
    assert (nothing.returncode, json.loads(nothing.stdout)["error"]["code"]) == (1, "no_earlier_version")

    half = as_json(chorus("adapters", "activate", "voice", "2", "--percent", "50", *mine, **where))
    assert (half["canary"], half["current_version"]) == ({"version": 2, "percent": 50}, 1)
    assert as_json(chorus("adapters", "rollback", "voice", "--if-current", "1", *mine, **where))["canary"] is None
    assert as_json(chorus("adapters", "alias", "voice", "stable", "2", *mine, **where))["id"] == "voice:stable"
    assert as_json(chorus("adapters", "alias", "voice", *mine, **where))[0]["version"] == 2
    lost = chorus("adapters", "alias", "voice", "stable", "1", "--if-current", "1", *mine, **where)
    assert json.loads(lost.stdout)["error"]["code"] == "conflict"
    kept = chorus("adapters", "rm", "voice", "--version", "2", *mine, **where)
    assert json.loads(kept.stdout)["error"]["code"] == "version_in_use"
    assert chorus("adapters", "alias", "voice", "stable", *mine, **where).returncode == 2
    assert chorus("adapters", "alias", "voice", "stable", "--rm", *mine, **where).returncode == 0
    assert chorus("adapters", "rm", "voice", "--version", "2", *mine, **where).returncode == 0

    [row] = as_json(chorus("adapters", "ls", *mine, **where))
    assert (row["id"], row["tier"]) == ("voice", "resident")
    table = chorus("adapters", "ls", "--tenant", "a-cli", **where).stdout
    assert "resident" in table
    shown = as_json(chorus("adapters", "show", "voice", *mine, **where))
    assert (shown["digest"], shown["num_tensors"], shown["scales"]) == (added["digest"], 28, [2.0])
    wait_for(lambda: as_json(chorus("adapters", "show", "voice", *mine, **where))["last_used_on"])
    assert "28/28" in chorus("adapters", "show", "voice", "--tenant", "a-cli", **where).stdout
    assert chorus("adapters", "rm", "voice", "--tenant", "a-cli", **where).returncode == 0
    with pytest.raises(openai.NotFoundError):
        answer()


@pytest.mark.parametrize("name", ["..", "../tenants/acme", "a/b", "", "é", "tiny-llama", "x?y", "x" * 65])
def test_a_name_is_never_a_path(where: dict[str, str], tiny_lora: Path, name: str) -> None:
    """AU-05, HS-14: whatever is given as a name stays a name, and the door says what is wrong with it."""
    done = chorus("adapters", "push", str(tiny_lora), "--as", name or " ", "--json", **where)

    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] in ("name_invalid", "name_reserved")


def test_dots_delete_nothing(where: dict[str, str]) -> None:
    """AU-05: `..` where a name belongs would mean what lies above it: it is refused before anything is asked."""
    as_json(chorus("tenants", "create", "dots-cli", "--json", **where))

    for command in (("adapters", "rm", "..", "--tenant", "dots-cli"), ("keys", "revoke", "dots-cli", "..")):
        assert chorus(*command, **where).returncode == 1

    assert as_json(chorus("tenants", "show", "dots-cli", "--json", **where))["id"] == "dots-cli"


def test_a_directory_of_links_is_pushed(where: dict[str, str], tiny_lora: Path, tmp_path: Path) -> None:
    """As the hub's cache lays adapters out: links to files elsewhere. Digest and weights are those of the files."""
    for path in tiny_lora.iterdir():
        (tmp_path / path.name).symlink_to(path)

    made = as_json(chorus("adapters", "push", str(tmp_path), "--as", "linked", "--json", **where))

    assert made["digest"] == f"sha256:{content_digest(tiny_lora)}"
    assert chorus("adapters", "rm", "linked", **where).returncode == 0


def test_new_tokens_are_pushed_along(where: dict[str, str], tiny_llama: Path, tmp_path: Path) -> None:
    """A directory with tokenizer.json: the server keeps its new tokens, digest and weights are compared as ever, and
    pushing again changes nothing."""
    grown_adapter(tmp_path, tiny_llama)

    made, again = (
        as_json(chorus("adapters", "push", str(tmp_path), "--as", "grown", "--json", **where)) for _ in range(2)
    )

    checked = as_json(chorus("adapters", "check", str(tmp_path), "--model", str(tiny_llama), "--json"))

    assert list(made["companion_sums"]) == ["new_tokens.json"]
    assert made["digest"] == again["digest"] == checked["digest"] != f"sha256:{content_digest(tmp_path)}"
    assert again["outcome"] == "unchanged"
    assert (tmp_path / "tokenizer.json").is_file()  # a check reads, and no more
    assert chorus("adapters", "rm", "grown", **where).returncode == 0


def test_what_the_server_stored_is_compared(
    where: dict[str, str], tiny_lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that changed on the way are not taken for what was sent."""
    monkeypatch.setattr("gateway.cli.push.digest_of", lambda *_: "sha256:" + "0" * 64)

    done = chorus("adapters", "push", str(tiny_lora), "--as", "changed", "--json", **where)

    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "digest_mismatch"
    assert chorus("adapters", "rm", "changed", **where).returncode == 0


def test_a_refusal_says_the_cure(where: dict[str, str], tiny_lora: Path, tmp_path: Path) -> None:
    """One line with the server's words, the code, and what to do; as JSON the same in fields."""
    broken = shutil.copytree(tiny_lora, tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"PK\x03\x04" + b"x" * 100)

    plain = chorus("adapters", "push", str(broken), **where)
    structured = chorus("adapters", "push", str(broken), "--json", **where)

    assert plain.returncode == structured.returncode == 1
    assert len(plain.stderr.splitlines()) == 1
    assert "Cure: push `adapter_model.bin` from its directory" in plain.stderr
    error = json.loads(structured.stdout)["error"]
    assert error["code"] == "weights_not_safetensors"
    assert error["cure"] == CURES[error["code"]]


def test_what_lies_beside_the_weights_goes_along(
    where: dict[str, str], tiny_llama: Path, tiny_lora: Path, tmp_path: Path
) -> None:
    """Template, defaults and generation config are part of what is pushed and of its digest; --bare leaves them out; a
    bad one is refused by the server and by `check` with one code."""
    full = shutil.copytree(tiny_lora, tmp_path / "full")
    (full / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    (full / "defaults.json").write_text('{"temperature": 0.5}')
    (full / "README.md").write_text("not sent")
    base = ("--model", str(tiny_llama), "--json")

    made = as_json(chorus("adapters", "push", str(full), "--json", **where))
    assert made["digest"] == f"sha256:{content_digest(full)}" == as_json(
        chorus("adapters", "check", str(full), *base)
    )["digest"]  # fmt: skip
    bare = as_json(chorus("adapters", "push", str(full), "--bare", "--json", **where))
    assert (bare["outcome"], bare["digest"]) == ("replaced", f"sha256:{content_digest(tiny_lora)}")
    (full / "chat_template.jinja").write_text("{{ 7 ** (7 ** (7 ** 7)) }}")
    for done in (
        chorus("adapters", "push", str(full), "--json", **where), chorus("adapters", "check", str(full), *base)
    ):  # fmt: skip
        assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (1, "chat_template_invalid")
    assert chorus("adapters", "rm", "full", **where).returncode == 0


def test_probes_are_asked(where: dict[str, str], tiny_llama: Path, tiny_lora: Path, tmp_path: Path) -> None:
    """probes.jsonl goes along: a version that fails is refused and the one before stays; --force passes them over;
    other probes alone are another push; bad ones are refused by the server and by `check`."""
    here = shutil.copytree(tiny_lora, tmp_path / "probed")
    probe = {"messages": [{"role": "user", "content": "hi"}], "expect": ".", "max_tokens": 4}
    never = probe | {"expect": "no such words"}

    def pushed(*options: str) -> Done:
        return chorus("adapters", "push", str(here), "--json", *options, **where)

    (here / "probes.jsonl").write_text(json.dumps(never))
    assert json.loads(pushed().stdout)["error"]["code"] == "probes_failed"
    (here / "probes.jsonl").write_text(json.dumps(probe))
    assert as_json(pushed())["outcome"] == "created"
    assert as_json(pushed())["outcome"] == "unchanged"
    (here / "probes.jsonl").write_text(json.dumps(never))
    assert as_json(pushed())["outcome"] == "probed"
    refused = chorus("adapters", "activate", "probed", "1", "--json", **where)
    assert json.loads(refused.stdout)["error"]["code"] == "probes_failed"
    assert chorus("adapters", "activate", "probed", "1", "--force", **where).returncode == 0
    tiny_adapter(here, tiny_llama, seed=9)
    assert json.loads(pushed().stdout)["error"]["code"] == "probes_failed"
    assert as_json(pushed("--force"))["version"] == 2
    (here / "probes.jsonl").write_text('{"expect": "x"}')
    wrong = chorus("adapters", "check", str(here), "--model", str(tiny_llama), "--json")
    assert json.loads(wrong.stdout)["error"]["code"] == "probes_invalid"
    assert "applied: 28/28" in chorus("adapters", "show", "probed", **where).stdout
    assert chorus("adapters", "rm", "probed", **where).returncode == 0


def test_check_needs_no_server(tiny_llama: Path, tiny_lora: Path, tmp_path: Path) -> None:
    """Offline, against the base's config.json alone: what the door would say, with the digest it would give."""
    (tmp_path / "base").mkdir()
    shutil.copyfile(tiny_llama / "config.json", tmp_path / "base" / "config.json")
    base = ("--model", str(tmp_path / "base"), "--json")

    fine = as_json(chorus("adapters", "check", str(tiny_lora), *base))
    ranks = chorus("adapters", "check", str(tiny_lora), *base, "--max-lora-rank", "2")
    other = shutil.copytree(tiny_lora, tmp_path / "other")
    (other / "adapter_config.json").write_text("{}")
    refused = chorus("adapters", "check", str(other), *base)

    assert (fine["status"], fine["num_tensors"], fine["num_modules"], fine["rank"]) == ("ready", 28, 14, 4)
    assert fine["digest"] == f"sha256:{content_digest(tiny_lora)}"
    assert (ranks.returncode, json.loads(ranks.stdout)["error"]["code"]) == (1, "rank_too_large")
    assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (1, "config_invalid")
    assert chorus("adapters", "check", str(tiny_lora)).returncode == 78  # no base given


def test_an_adapter_directory_is_checked_before_sending(where: dict[str, str], tmp_path: Path) -> None:
    """A directory without the two files is named, and nothing is sent."""
    done = chorus("adapters", "push", str(tmp_path), **where)

    assert done.returncode == 1
    assert "adapter_config.json" in done.stderr


def test_no_server_is_one_line(tmp_path: Path) -> None:
    """A server that is not there: its address and what to do, no traceback."""
    done = chorus(
        "tenants", "list", CHORUS_URL="http://127.0.0.1:9", CHORUS_ADMIN_KEY="k", CHORUS_DATA_DIR=str(tmp_path)
    )

    assert done.returncode == 69
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
