"""`chorus serve` as a person starts it: real processes, real Redis, a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from gateway.settings import Settings
from tests.e2e.process import ChorusProcess, is_running, wait_for
from tests.services import free_port

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def client(server: ChorusProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=60, max_retries=0)


def ask(server: ChorusProcess, key: str, **options: object) -> str:
    with client(server, key) as caller:
        answer = caller.chat.completions.create(  # type: ignore[call-overload]
            model="tiny-llama", messages=MESSAGES, max_tokens=8, temperature=0, **options
        )
    return str(answer.choices[0].message.content)


def test_one_command_serves(serving: ChorusProcess) -> None:
    """`chorus serve DIR`: prints the memory plan and where it listens, makes the admin key, answers."""
    key = serving.make_key("acme")

    assert ask(serving, key) == ask(serving, key)
    assert serving.find(r"(KV .* tokens)")
    assert f"kept in {serving.data_dir / 'admin.key'}): {serving.admin_key}" in serving.output
    assert len(serving.pids("worker")) == 2
    assert len(serving.pids("engine")) == len(serving.pids("redis")) == 1


def test_ready_is_said_when_every_worker_is(tiny_llama: Path, tmp_path: Path) -> None:
    """One of two workers lags behind: /readyz answers already, and "ready" is printed once both would serve."""
    port = free_port()
    arguments = ("serve", str(tiny_llama), "--workers", "2", "--dtype", "float32")
    with ChorusProcess(*arguments, data_dir=tmp_path, CHORUS_PORT=str(port)) as server:
        wait_for(lambda: len(server.pids("worker")) == 2)
        slow = server.pids("worker")[1]
        os.kill(slow, signal.SIGSTOP)

        def one_answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).is_success
            return False

        wait_for(one_answers, 60)
        time.sleep(1)
        assert "ready: " not in server.output
        os.kill(slow, signal.SIGCONT)
        server.wait_ready()


def test_secrets_and_sockets_are_ours_alone(serving: ChorusProcess) -> None:
    """Admin key, pepper and every socket can be opened by this user only."""
    run_dir = Settings(data_dir=serving.data_dir).run_dir

    assert len(list(run_dir.glob("*.sock"))) == 2
    for path in (serving.data_dir / "admin.key", serving.data_dir / "pepper", *run_dir.glob("*.sock")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_port_in_use_is_one_line(serving: ChorusProcess, tiny_llama: Path) -> None:
    """A port that is taken is refused at once, with what to do."""
    port = serving.url.rsplit(":", 1)[1]
    with ChorusProcess("serve", str(tiny_llama), "--port", port) as second:
        assert second.wait_end() == 78

    assert "choose another --host or --port" in second.lines[-1]


def test_data_dir_in_use_is_one_line(serving: ChorusProcess, tiny_llama: Path) -> None:
    """Two servers never share one data directory: the second one refuses, the first one goes on."""
    with ChorusProcess("serve", str(tiny_llama), data_dir=serving.data_dir) as second:
        assert second.wait_end() == 78

    assert "choose another --data-dir" in second.lines[-1]
    assert ask(serving, serving.make_key("second"))


def test_what_cannot_fit_is_refused_with_what_does(tiny_llama: Path) -> None:
    """Too little memory: no start, no restart loop, and a setting that would do."""
    with ChorusProcess("serve", str(tiny_llama), "--kv-memory", "1kB") as server:
        assert server.wait_end() == 78

    assert "--kv-memory" in server.output
    assert "starting it again" not in server.output


def test_an_unknown_model_names_the_known_ones() -> None:
    """A name that is no model is refused with those that are."""
    with ChorusProcess("serve", "no-such-model") as server:
        assert server.wait_end() == 78

    assert "smollm2-135m-instruct" in server.lines[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_lets_streams_end(tiny_llama: Path, number: signal.Signals) -> None:
    """T50: SIGTERM or Ctrl-C in the middle of a stream: the stream ends whole, then everything stops, with status 0."""
    with ChorusProcess("serve", str(tiny_llama)) as server:
        key = server.wait_ready().make_key("acme")
        children = list(server.children())
        pieces: list[str] = []
        with client(server, key) as caller:
            stream = caller.chat.completions.create(
                model="tiny-llama", messages=MESSAGES, max_tokens=400, temperature=1, stream=True,
                extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
            )  # type: ignore[call-overload]  # fmt: skip
            for chunk in stream:
                if not pieces:
                    server.process.send_signal(number)
                pieces.append(chunk.choices[0].finish_reason if chunk.choices else chunk.usage.completion_tokens)

        assert pieces[-1] == 400
        assert "length" in pieces
        assert server.wait_end() == 0
        assert server.lines[-1] == "stopped"
        assert not [pid for pid in children if is_running(pid)]


@pytest.mark.parametrize("api", ["completions", "responses"])
def test_a_stream_longer_than_the_grace(tiny_llama: Path, api: str) -> None:
    """T50: when the time to drain is over, a stream that still runs ends with an error event, not as if it were whole
    and not with a broken connection; what was made until then is in the ledger, once."""
    with ChorusProcess("serve", str(tiny_llama), CHORUS_DRAIN_S="0.2") as server:
        key = server.wait_ready().make_key("acme")
        body: dict[str, object] = {"model": "tiny-llama", "stream": True, "ignore_eos": True}
        body |= {"prompt": [5], "max_tokens": 2040} if api == "completions" else {"input": "x"}
        seen: list[str] = []
        (engine,) = server.pids("engine")
        resumed = threading.Timer(2.0, os.kill, (engine, signal.SIGCONT))
        with httpx.stream(
            "POST", f"{server.url}/v1/{api}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                seen += [line] if line else []
                if line and len(seen) == 12:  # once: the second one would stop at once
                    os.kill(engine, signal.SIGSTOP)  # so that the stream is longer, however fast the machine is
                    server.process.send_signal(signal.SIGTERM)
                    resumed.start()

        assert server.wait_end() == 0
        assert "data: [DONE]" not in seen
        last = json.loads(seen[-1].removeprefix("data: "))
        if api == "responses":
            assert last["type"] == "response.failed"
            assert last["response"]["error"]["code"] == "server_error"
        else:
            assert last["error"]["code"] == "service_unavailable"
        with contextlib.closing(sqlite3.connect(server.data_dir / "chorus.db")) as database:
            rows = list(database.execute("SELECT status, completion_tokens FROM usage_entries"))
        told = '"text":"' if api == "completions" else '"delta":"'
        num_heard = sum(told in line for line in seen)
        assert [status for status, _ in rows] == ["cancelled"]
        assert num_heard <= rows[0][1] < 2040


@pytest.mark.parametrize("step", ["database is at", "memory on"])
def test_stopping_during_the_start(tiny_llama: Path, step: str) -> None:
    """SIGTERM before it is ready, before and after its first child: it ends, and leaves nothing."""
    with ChorusProcess("serve", str(tiny_llama)) as server:
        server.wait_line(step)
        children = list(server.children())
        server.process.terminate()

        assert server.wait_end() in (0, -signal.SIGTERM)
        assert not [pid for pid in children if is_running(pid)]


def test_kill_9_of_the_parent_leaves_no_child(tiny_llama: Path) -> None:
    """However the parent dies, Redis, engine and workers die too; and the next start finds all data."""
    with ChorusProcess("serve", str(tiny_llama)) as server:
        key = server.wait_ready().make_key("acme")
        children = list(server.children())
        assert len(children) >= 3
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not [pid for pid in children if is_running(pid)], timeout_s=10)

    with ChorusProcess("serve", str(tiny_llama), data_dir=server.data_dir) as again:
        again.wait_ready()
        assert "admin key" not in again.output
        assert ask(again, key)


@pytest.mark.parametrize("what", ["worker", "engine", "redis"])
def test_a_killed_child_is_replaced(tiny_llama: Path, what: str) -> None:
    """kill -9 of any child: another takes its place, and requests are answered again, with the same key."""
    with ChorusProcess("serve", str(tiny_llama)) as server:
        key = server.wait_ready().make_key("acme")
        before = ask(server, key)
        (pid,) = server.pids(what)
        os.kill(pid, signal.SIGKILL)
        server.wait_line(rf"{what} ended \(SIGKILL\); starting it again")

        def answers() -> bool:
            try:
                return ask(server, key) == before
            except (openai.APIConnectionError, openai.InternalServerError):
                return False

        wait_for(answers, timeout_s=60)
        assert server.process.poll() is None


def open_connections(pid: int, port: str) -> int:
    """How many connections to `port` the process has."""
    ends = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = {f"socket:[{end[9]}]" for end in ends if end[3] == "01" and end[1].endswith(f":{int(port):04X}")}
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(fd) in ours
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_connections_are_spread_over_the_workers(serving: ChorusProcess) -> None:
    """Clients that keep theirs, as SDKs do, would else have nearly all of their work done by one worker. While the
    other one hangs, whoever comes is served all the same."""
    port = serving.url.rsplit(":", 1)[1]
    first, second = serving.pids("worker")
    before = [open_connections(pid, port) for pid in (first, second)]
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(httpx.Client(base_url=serving.url, timeout=20)) for _ in range(40)]
        assert {caller.get("/livez").status_code for caller in callers} == {200}
        counts = [open_connections(pid, port) for pid in (first, second)]
        assert abs(counts[0] - counts[1]) <= 1, (before, counts)

        os.kill(second, signal.SIGSTOP)
        try:
            late = [stack.enter_context(httpx.Client(base_url=serving.url, timeout=20)) for _ in range(10)]
            assert {caller.get("/livez").status_code for caller in late} == {200}
        finally:
            os.kill(second, signal.SIGCONT)


def test_connections_wait_while_the_only_worker_is_replaced(tiny_llama: Path) -> None:
    """The parent holds the listening socket: a caller that comes between two workers waits, and is answered."""
    with ChorusProcess("serve", str(tiny_llama)) as server:
        key = server.wait_ready().make_key("acme")
        os.kill(server.pids("worker")[0], signal.SIGKILL)

        assert ask(server, key)


def test_without_redis_server_state_is_in_memory(tiny_llama: Path, tmp_path: Path) -> None:
    """No redis-server: it warns, runs one worker whatever was asked, and answers."""
    path = tmp_path / "bin"
    path.mkdir()
    with ChorusProcess("serve", str(tiny_llama), "--workers", "4", PATH=str(path)) as server:
        server.wait_ready()

        assert "redis-server is not installed" in server.output
        assert len(server.children()) == 2
        assert ask(server, server.make_key("acme"))


def test_given_admin_key_is_not_written(tiny_llama: Path) -> None:
    """CHORUS_ADMIN_KEY counts, and is neither shown nor kept."""
    with ChorusProcess("serve", str(tiny_llama), CHORUS_ADMIN_KEY="a-key-from-outside") as server:
        server.wait_ready()
        found = httpx.get(f"{server.url}/admin/v1/tenants", headers={"Authorization": "Bearer a-key-from-outside"})

        assert found.status_code == 200
        assert "a-key-from-outside" not in server.output
        assert not (server.data_dir / "admin.key").exists()


def test_the_two_halves_meet_over_tcp(tiny_llama: Path, redis_url: str, tmp_path: Path) -> None:
    """`chorus engine` and `chorus gateway` on a TCP endpoint with a shared key; without the key neither starts."""
    from engine.client import make_engine_key

    link = {"CHORUS_ENGINE_ENDPOINTS": f"tcp://127.0.0.1:{free_port()}", "CHORUS_REDIS_URL": redis_url}
    for half in ("engine", "gateway"):
        with ChorusProcess(half, str(tiny_llama), **link) as refused:
            assert refused.wait_end() == 78
        assert "CHORUS_ENGINE_KEY" in refused.output

    link["CHORUS_ENGINE_KEY"] = make_engine_key()
    with (
        ChorusProcess("engine", str(tiny_llama), data_dir=tmp_path, **link) as engine,
        ChorusProcess("gateway", str(tiny_llama), data_dir=tmp_path, **link) as gateway,
    ):
        gateway.wait_ready()
        assert ask(gateway, gateway.make_key("acme"))
        assert not gateway.pids("redis")
        engine.process.terminate()
        assert engine.wait_end() == 0


def test_a_second_signal_stops_at_once(tiny_llama: Path) -> None:
    """Ctrl-C twice: no waiting for a stream that goes on."""
    with ChorusProcess("serve", str(tiny_llama)) as server:
        key = server.wait_ready().make_key("acme")
        started, ended = threading.Event(), threading.Event()
        finishes: set[str | None] = set()

        def stream() -> None:
            with client(server, key) as caller, contextlib.suppress(openai.APIError, httpx.HTTPError):
                for chunk in caller.chat.completions.create(
                    model="tiny-llama", messages=MESSAGES, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
                ):  # type: ignore[call-overload]
                    finishes.update(choice.finish_reason for choice in chunk.choices)
                    started.set()
            ended.set()

        thread = threading.Thread(target=stream)
        thread.start()
        assert started.wait(30)
        server.process.send_signal(signal.SIGINT)
        server.wait_line("stopping")
        time.sleep(0.2)
        server.process.send_signal(signal.SIGINT)

        assert server.wait_end() == 0
        thread.join(30)
        assert ended.is_set()
        assert finishes == {None}, "the stream went on to its end"


def test_a_long_path_is_no_trouble(tiny_llama: Path, tmp_path: Path) -> None:
    """A data directory with a path too long for sockets works all the same."""
    deep = tmp_path.joinpath(*["directory-with-a-long-name"] * 5)
    with ChorusProcess("serve", str(tiny_llama), data_dir=deep) as server:
        server.wait_ready()

        assert ask(server, server.make_key("acme"))
    shutil.rmtree(Settings(data_dir=deep).run_dir)


def test_the_admin_port(tiny_llama: Path) -> None:
    """--admin-port: administration and metrics answer there and nowhere else, the rest only on the other one, with and
    without a key; health on both."""
    with ChorusProcess("serve", str(tiny_llama), "--admin-port", "0", "--admin-host", "127.0.0.1") as server:
        server.wait_ready()
        public, admin = server.url, server.find(r"admin: (http\S+)/admin/v1")
        assert public != admin
        keys: dict[str, str] = {"admin": server.admin_key}
        headers = {"Authorization": f"Bearer {keys['admin']}"}
        assert httpx.post(f"{admin}/admin/v1/tenants", json={"id": "acme"}, headers=headers).status_code == 201
        made = httpx.post(f"{admin}/admin/v1/tenants/acme/keys", json={"name": "k"}, headers=headers)
        keys["tenant"] = made.json()["key"]
        for path, key, at in (
            ("/admin/v1/tenants", "admin", admin), ("/metrics", "admin", admin), ("/v1/models", "tenant", public),
        ):  # fmt: skip
            for url in (public, admin):
                answer = httpx.get(f"{url}{path}", headers={"Authorization": f"Bearer {keys[key]}"})
                assert answer.status_code == (200 if url == at else 404), (url, path)
                assert httpx.get(f"{url}{path}").status_code == (401 if url == at else 404), (url, path)
        assert [httpx.get(f"{url}/readyz").status_code for url in (public, admin)] == [200, 200]
