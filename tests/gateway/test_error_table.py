"""The table of errors: durations, retry headers, paths, and what is told of unknown faults."""

from __future__ import annotations

import json

from gateway.errors import ApiError, go_duration, json_path, rate_headers, retry_headers, to_api_error
from tenants.quotas import Window


def test_durations() -> None:
    """T31: reset headers are durations as Go prints them."""
    assert [go_duration(s) for s in (0.012, 1, 1.5, 60, 360, 3661.25)] == [
        "12ms",
        "1s",
        "1.5s",
        "1m0s",
        "6m0s",
        "1h1m1.25s",
    ]
    headers = rate_headers({"requests": Window(5000, 4999, 0.012), "tokens": Window(160_000, -5, 0.009)})
    assert headers == {
        "x-ratelimit-limit-requests": "5000", "x-ratelimit-remaining-requests": "4999",
        "x-ratelimit-reset-requests": "12ms", "x-ratelimit-limit-tokens": "160000",
        "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "9ms",
    }  # fmt: skip


def test_retry_headers() -> None:
    """T26: Retry-After is an integer of at least 1; retry-after-ms beside it."""
    assert retry_headers(0.2) == {"retry-after": "1", "retry-after-ms": "200"}
    assert retry_headers(2.1) == {"retry-after": "3", "retry-after-ms": "2100"}


def test_paths_and_unknown_faults() -> None:
    """T1: locations become JSON paths; an error that nobody knows tells nothing; quoted input is bounded."""
    assert json_path(("messages", 0, "content", "str")) == "messages[0].content"
    assert json_path(("prompt", "list[int]", 3)) == "prompt[3]"
    assert "secret" not in to_api_error(KeyError("secret")).message
    body = json.loads(ApiError(400, "x\ud800" + "y" * 5000).body())
    assert len(body["error"]["message"]) == 1000
