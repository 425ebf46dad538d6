"""The container files: parsed, and every command and variable in them checked against the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = [name for name, service in COMPOSE["services"].items() if service["image"].startswith("chorus")]
NO_VARIABLES_OF_SETTINGS = {"CHORUS_PUBLISH", "CHORUS_CONFIG"}


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
