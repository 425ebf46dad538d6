"""`chorus plans · keys · admin-keys · usage` against a running server."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.cli.nouns import body_of
from tests.e2e.process import ChorusProcess, wait_for
from tests.e2e.test_cli import as_json, chorus

MODEL = "tiny-llama"


@pytest.fixture
def where(serving: ChorusProcess) -> dict[str, str]:
    """Environment of an operator of the running server."""
    return {"CHORUS_URL": serving.url, "CHORUS_DATA_DIR": str(serving.data_dir)}


def status_of(serving: ChorusProcess, key: str) -> int:
    """Of one small request."""
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=key, max_retries=0) as client:
        try:
            client.completions.create(model=MODEL, prompt="a", max_tokens=1)
        except openai.APIStatusError as error:
            return error.status_code
    return 200


def test_plans_from_first_to_last(where: dict[str, str]) -> None:
    """Create, refer to, set, take off, delete: a plan's limits are replaced, what it says of models stays."""
    made = as_json(chorus("plans", "create", "gold", "--concurrency", "4", "--soft", "tokens_per_day",
                          "--tokens-per-day", "99", "--json", **where))  # fmt: skip
    assert (made["limits"]["concurrency"], made["limits"]["soft"]) == (4, ["tokens_per_day"])
    as_json(chorus("tenants", "create", "p-cli", "--plan", "gold", "--json", **where))
    changed = as_json(chorus("plans", "set", "gold", "--requests-per-minute", "7", "--json", **where))
    assert (changed["limits"]["requests_per_minute"], changed["limits"]["concurrency"]) == (7, None)
    assert [plan["id"] for plan in as_json(chorus("plans", "list", "--json", **where))] == ["gold"]
    assert chorus("plans", "delete", "gold", **where).returncode == 1
    assert as_json(chorus("tenants", "update", "p-cli", "--unset", "plan", "--json", **where))["plan"] is None
    assert chorus("plans", "delete", "gold", **where).returncode == 0
    assert "404" in chorus("plans", "show", "gold", **where).stderr


def test_a_tenant_is_changed(where: dict[str, str]) -> None:
    """What is given changes, what is unset is null again, what is wrong is one line."""
    as_json(chorus("tenants", "create", "c-cli", "--retention", "24", "--requests-per-minute", "5", "--json", **where))
    flags = ["--retention", "none", "--unset", "limits.requests_per_minute", "--unknown-fields", "warn"]
    changed = as_json(chorus("tenants", "update", "c-cli", *flags, "--json", **where))
    assert (changed["retention"], changed["unknown_fields"]) == ("none", "warn")
    assert changed["limits"]["requests_per_minute"] is None
    wrong = chorus("tenants", "update", "c-cli", "--unset", "weight", **where)
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (1, 1)


def test_a_key_is_changed_and_rotated(where: dict[str, str], serving: ChorusProcess) -> None:
    """PATCH and rotation from the shell act at the next request."""
    as_json(chorus("tenants", "create", "r-cli", "--json", **where))
    old = as_json(chorus("keys", "create", "r-cli", "prod", "--expires-at", "2099-01-01T00:00:00Z", "--json", **where))
    assert status_of(serving, old["key"]) == 200
    update = ("keys", "update", "r-cli", old["id"], "--json")
    assert as_json(chorus(*update, "--allow-ip", "10.0.0.0/8", **where))["allowed_ips"] == ["10.0.0.0/8"]
    assert status_of(serving, old["key"]) == 401
    changed = as_json(chorus(*update, "--unset", "allowed_ips", "--unset", "expires_at", "--name", "n", **where))
    assert (changed["allowed_ips"], changed["expires_at"], changed["name"]) == (None, None, "n")
    new = as_json(chorus("keys", "rotate", "r-cli", old["id"], "--overlap-s", "0", "--json", **where))
    assert new["rotated_from"] == old["id"]
    assert (status_of(serving, old["key"]), status_of(serving, new["key"])) == (401, 200)
    assert as_json(chorus("keys", "show", "r-cli", new["id"], "--json", **where))["id"] == new["id"]


def test_a_key_of_another_gateway(
    where: dict[str, str], serving: ChorusProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported by its SHA-256, or from standard input, where it is hashed: the server never sees it but in use."""
    as_json(chorus("tenants", "create", "l-cli", "--json", **where))
    first, second = "sk-an-old-key-1234", "sk-an-old-key-5678"
    sha256 = hashlib.sha256(first.encode()).hexdigest()
    made = as_json(chorus("keys", "import", "l-cli", "old", "--sha256", sha256, "--json", **where))
    assert made["legacy"] is True
    monkeypatch.setattr(sys, "stdin", io.StringIO(second + "\n"))
    assert as_json(chorus("keys", "import", "l-cli", "older", "--json", **where))["hint"] == "5678"
    assert [status_of(serving, key) for key in (first, second)] == [200, 200]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert chorus("keys", "import", "l-cli", "none", **where).returncode == 78


def test_admin_keys_from_first_to_last(where: dict[str, str]) -> None:
    """A viewer's key made in the shell reads and changes nothing; revoked, it is nobody's."""
    made = as_json(chorus("admin-keys", "create", "Ann", "--role", "viewer", "--json", **where))
    ann = where | {"CHORUS_ADMIN_KEY": made["key"]}
    assert chorus("tenants", "list", **ann).returncode == 0
    assert "403" in chorus("tenants", "create", "x-cli", **ann).stderr
    assert made["key"] not in chorus("admin-keys", "list", **where).stdout
    assert as_json(chorus("admin-keys", "revoke", made["id"], "--json", **where))["deleted"] is True
    assert "401" in chorus("tenants", "list", **ann).stderr
    assert "409" in chorus("admin-keys", "revoke", "settings", **where).stderr
    assert chorus("admin-keys", "restore", **where).returncode == 0


def test_usage(where: dict[str, str], serving: ChorusProcess, tmp_path: Path) -> None:
    """`usage show` sums by what is asked, `usage export` writes a month's attempts as CSV or JSON lines; both agree
    with the answers."""
    as_json(chorus("tenants", "create", "u-cli", "--json", **where))
    key = as_json(chorus("keys", "create", "u-cli", "k", "--json", **where))
    headers, used = {"authorization": f"Bearer {key['key']}"}, 0
    for user in ("ann", "ben", "ann"):
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 3, "user": user}
        answer = httpx.post(f"{serving.url}/v1/completions", json=body, headers=headers, timeout=60)
        used += answer.json()["usage"]["total_tokens"]

    def rows(*flags: str) -> list[dict[str, Any]]:
        return list(as_json(chorus("usage", "show", "--tenant", "u-cli", *flags, "--json", **where)))

    wait_for(lambda: rows()[:1] and rows()[0]["num_requests"] == 3)
    assert [(row["tenant"], row["total_tokens"]) for row in rows()] == [("u-cli", used)]
    assert {row["user"]: row["num_requests"] for row in rows("--by", "user")} == {"ann": 2, "ben": 1}
    assert rows("--key", key["id"], "--by", "day,model")[0]["model"] == MODEL
    assert rows("--start", "2099-01-01T00:00:00Z") == []
    assert "total_tokens" in chorus("usage", "show", **where).stdout
    assert "400" in chorus("usage", "show", "--by", "colour", **where).stderr

    month, path = datetime.now(UTC).strftime("%Y-%m"), tmp_path / "usage.csv"
    export = ("usage", "export", "--month", month, "--tenant", "u-cli")
    assert chorus(*export, "--output", str(path), **where).returncode == 0
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert sum(int(row["prompt_tokens"]) + int(row["completion_tokens"]) for row in lines) == used
    path = tmp_path / "usage.jsonl"
    assert chorus(*export, "--format", "jsonl", "--output", str(path), **where).returncode == 0
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [row["id"] for row in lines]
    assert "400" in chorus("usage", "export", "--month", "2026-13", "--output", str(path), **where).stderr


def test_bodies() -> None:
    """Flags make a body of what was given, with objects inside; `--unset` is null."""
    flags = {"name": None, "models": [], "limits.concurrency": 0, "plan": "gold"}
    assert body_of(flags, ["limits.tokens_per_day", "expires_at"]) == {
        "limits": {"concurrency": 0, "tokens_per_day": None}, "plan": "gold", "expires_at": None,
    }  # fmt: skip
