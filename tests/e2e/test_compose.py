"""The container files: parsed, and every command and variable in them checked against the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.settings import Settings
from tests.e2e.process import ChorusProcess
from tests.services import RedisServer

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = [name for name, service in COMPOSE["services"].items() if service["image"].startswith("chorus")]


@pytest.mark.parametrize("name", OURS)
def test_every_command_of_ours_exists(name: str) -> None:
    """What a container runs, and what checks its health, are commands of the program with options that it knows."""
    service = COMPOSE["services"][name]
    commands = [service["command"]]
    if "healthcheck" in service:
        program, *check = service["healthcheck"]["test"][1:]
        assert program == "chorus"
        commands.append(check)
    for command in commands:
        shown = CliRunner().invoke(app, [command[0], "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert {word for word in command if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", shown.stdout))


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting(name: str) -> None:
    """A variable that the program does not read would be ignored in silence."""
    for variable in COMPOSE["services"][name]["environment"]:
        assert variable.removeprefix("CHORUS_").lower() in Settings.model_fields


def test_no_password_has_a_default() -> None:
    """Compose refuses to start without passwords of the operator's own, and the example file holds none."""
    text = (ROOT / "docker-compose.yml").read_text()
    example = dict(re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    for secret in ("POSTGRES_PASSWORD", "REDIS_PASSWORD", "CHORUS_ADMIN_KEY", "CHORUS_PEPPER"):
        uses = re.findall(rf"\$\{{{secret}(.)", text)
        assert uses
        assert set(uses) == {":"}
        assert re.search(rf"\$\{{{secret}:\?", text)
        assert not re.search(rf"\$\{{{secret}:-", text)
        assert example[secret] == ""


def test_the_example_names_every_variable() -> None:
    """Whoever fills in .env.example has seen everything that compose asks for."""
    text = (ROOT / "docker-compose.yml").read_text()
    example = dict(re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))

    assert set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", text)) <= set(example)


def test_redis_keeps_what_it_is_told() -> None:
    """An append-only file, fsynced every second, and no eviction: quotas and usage are no cache."""
    command = " ".join(COMPOSE["services"]["redis"]["command"])

    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction", "--requirepass"):
        assert option in command


def test_everything_waits_for_what_it_needs() -> None:
    """Migrations come first, once; nothing starts on a database that is not ready; one engine per profile."""
    services = COMPOSE["services"]

    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert services["migrate"]["restart"] == "no"
    for name in ("gateway", "engine", "engine-gpu"):
        assert services[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert (services["engine"]["profiles"], services["engine-gpu"]["profiles"]) == (["cpu"], ["gpu"])
    assert services["gateway"]["depends_on"]["redis"]["condition"] == "service_healthy"
    for name in ("postgres", "redis", "engine", "engine-gpu", "gateway"):
        assert services[name]["healthcheck"]["test"]
        assert services[name]["volumes"]


def test_the_image_holds_every_package() -> None:
    """The Dockerfile copies every package of the distribution, and .dockerignore lets them through."""
    dockerfile, ignored = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().splitlines()
    for package in ("chorus", "gateway", "engine", "adapters", "tenants", "migrations"):
        assert f"COPY {package} {package}\n" in dockerfile
        assert f"!{package}" in ignored


def composed(name: str, values: dict[str, str]) -> dict[str, str]:
    """The environment of a service, with the variables of .env filled in."""

    def fill(match: re.Match[str]) -> str:
        return values.get(match[1]) or (match[3] if match[2] == ":-" else "")

    environment = COMPOSE["services"][name]["environment"]
    return {key: re.sub(r"\$\{([A-Z_]+)(?:(:-|:\?)([^}]*))?\}", fill, text) for key, text in environment.items()}


def test_the_services_work_together(
    postgres_url: str, own_redis: RedisServer, tiny_llama: Path, tmp_path: Path
) -> None:
    """Each service's own command and environment, in the order of compose, on a real PostgreSQL and Redis: migrate ends
    with 0, engine and gateway become healthy, and an answer comes back."""
    values = {
        "POSTGRES_PASSWORD": "p",
        "REDIS_PASSWORD": "r",
        "CHORUS_ADMIN_KEY": "an-admin-key-16c",
        "CHORUS_PEPPER": "pepper",
    }

    def start(name: str) -> ChorusProcess:
        environment = composed(name, values | {"CHORUS_MODEL": str(tiny_llama), "CHORUS_WORKERS": "1"})
        assert environment.pop("CHORUS_DATA_DIR") == "/data"
        if "CHORUS_DATABASE_URL" in environment:
            assert environment["CHORUS_DATABASE_URL"] == "postgresql+asyncpg://chorus:p@postgres:5432/chorus"
            assert environment["CHORUS_REDIS_URL"] == "redis://:r@redis:6379/0"
            environment |= {"CHORUS_DATABASE_URL": postgres_url, "CHORUS_REDIS_URL": own_redis.url}
        return ChorusProcess(*COMPOSE["services"][name]["command"], data_dir=tmp_path, **environment)

    with start("migrate") as migrate:
        assert migrate.wait_end() == 0
    with start("engine"), start("gateway") as gateway:
        gateway.wait_ready()
        for name in ("engine", "gateway"):
            check = COMPOSE["services"][name]["healthcheck"]["test"][2:]
            with ChorusProcess(*check, data_dir=tmp_path, CHORUS_PORT=gateway.url.rsplit(":", 1)[1]) as health:
                assert health.wait_end() == 0
        key = gateway.make_key("acme")
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "tiny-llama", "prompt": "the fox", "max_tokens": 4}
        assert httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
