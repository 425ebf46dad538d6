"""schemathesis over our own OpenAPI document: whatever it invents, valid or not, no answer is a fault of ours, and none
is of a status or type that the document does not declare."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.openapi import ERROR
from tests.gateway.live import ADMIN_KEY, Live

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip


def references(part: Any) -> list[str]:
    if isinstance(part, list):
        return [name for entry in part for name in references(entry)]
    if not isinstance(part, dict):
        return []
    own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
    return own + [name for entry in part.values() for name in references(entry)]


async def test_the_document_is_whole(server: Live) -> None:
    """Every reference leads somewhere, every error has OpenAI's shape, every operation but the public ones a key; the
    bodies are all there, although FastAPI never sees them."""
    client = await server.http(await server.key("acme"))

    document = (await client.get("/openapi.json")).json()

    for reference in references(document):
        part: Any = document
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]
    assert document["components"]["schemas"]["Error"] == ERROR
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path not in ("/livez", "/readyz", "/health")), path
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert sum("requestBody" in operation for operation in operations) > 10
    message = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "role" in message["properties"]["messages"]["items"]["properties"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
async def test_no_answer_is_undeclared(server: Live, mode: GenerationMode) -> None:
    """Every operation, with bodies and parameters that fit the document and with such that don't."""
    key = await server.key("acme", "inference", "adapters:write")
    document = (await (await server.http()).get("/openapi.json")).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)

    def run() -> Counter[int]:
        answers: Counter[int] = Counter()
        for operation in schema.get_all_operations():
            with suppress(Unsatisfiable):  # nothing of it can be wrong
                _try(operation.ok(), mode, key, answers)
        return answers

    answers = await asyncio.to_thread(run)
    assert answers.total() > 300
    assert answers[200] > (40 if mode is GenerationMode.POSITIVE else 0)
    assert answers[400] > (200 if mode is GenerationMode.NEGATIVE else 0)


def _try(operation: Any, mode: GenerationMode, key: str, answers: Counter[int]) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY if operation.path.startswith(('/admin', '/metrics')) else key}"}

    @EXAMPLES
    @given(case=operation.as_strategy(generation_mode=mode))
    def attempt(case: Any) -> None:
        response = case.call(headers=headers, timeout=20)
        answers[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    attempt()
