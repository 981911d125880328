"""Queueing, going away, failing and stopping: every request hears how it ended, and no slot is lost."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from ar2diff.engine.engine import Engine
from ar2diff.errors import ConfigError, ModelError
from ar2diff.serve.keys import Keys
from ar2diff.serve.log import JsonLog
from ar2diff.serve.stream import Disconnected, send_stream
from ar2diff.testing.models import nan_model, tiny_diffusion


def send(server, body, path="/v1/chat/completions"):
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=15)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def is_idle(server):
    return lambda: server.service.worker.is_idle


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_the_slot_within_one_pass(kit, stream):
    engine = kit.gated(permits=2)
    with kit.running(engine) as server:
        connection = send(server, kit.chat_body(max_tokens=200, stream=stream))
        kit.wait_for(lambda: engine.num_passes == 2)
        connection.close()
        kit.wait_for(lambda: server.service.worker._cancelled)
        engine.allow(1)
        kit.wait_for(is_idle(server))
        assert engine.num_passes == 3
        kit.wait_for(lambda: engine.num_left == 1)
        engine.allow(1000)
        assert server.chat().status_code == 200
        assert "ar2diff_cancelled_total 1.0" in server.http.get("/metrics").text


def test_a_client_that_goes_away_while_it_waits_is_never_started(kit):
    engine = kit.gated()
    with kit.running(engine) as server:
        first = send(server, kit.chat_body())
        kit.wait_for(lambda: server.service.worker.num_running == 1)
        second = send(server, kit.chat_body())
        kit.wait_for(lambda: server.service.worker.num_waiting == 1)
        second.close()
        kit.wait_for(lambda: server.service.worker.num_waiting == 0)
        engine.allow(1000)
        assert kit.read_all(first).startswith(b"HTTP/1.1 200")
        first.close()
        assert engine.num_started == 1


def test_after_many_cancelled_requests_the_next_one_is_answered(kit):
    with kit.running() as server:
        body = kit.chat_body(max_tokens=200, stream=True)
        for idx in range(200):
            connection = send(server, {**body, "stream": bool(idx % 2), "n": 1 + idx % 3})
            if idx % 4:
                time.sleep(0.003)
            connection.close()
        started = time.monotonic()
        kit.wait_for(lambda: server.service.worker.num_waiting == 0)
        assert server.chat().status_code == 200
        assert time.monotonic() - started < 5
        kit.wait_for(is_idle(server))


def test_beyond_the_queue_requests_are_told_to_come_back(kit):
    engine = kit.gated()
    with kit.running(engine, limits={"max_waiting": 2}) as server:
        held = []
        for running, waiting in ((1, 0), (1, 1), (1, 2)):
            held.append(send(server, kit.chat_body()))
            kit.wait_for(lambda r=running, w=waiting: _load(server) == (r, w))
        started = time.monotonic()
        refused = [server.chat() for _ in range(20)]
        assert time.monotonic() - started < 5
        assert {r.status_code for r in refused} == {429}
        assert all(1 <= int(r.headers["retry-after"]) <= 30 for r in refused)
        assert refused[0].json()["error"]["code"] == "queue_full"
        assert 'ar2diff_rejected_total{reason="queue_full"} 20.0' in server.http.get("/metrics").text
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        with client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=kit.name, prompt="x")
        engine.allow(1000)
        assert [kit.read_all(c).split()[1] for c in held] == [b"200"] * 3
        [c.close() for c in held]


def test_the_bound_of_the_queue_holds_for_choices_and_a_request_is_taken_whole_or_not_at_all(kit):
    engine = kit.gated()
    with kit.running(engine, limits={"max_waiting": 5}) as server:
        never = server.chat(n=7)  # one runs, five wait: a place for all seven never comes
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        first = send(server, kit.chat_body(n=4))
        kit.wait_for(lambda: _load(server) == (1, 3))
        for refused in (server.chat(n=3), server.complete(prompt=["a", "b", "c"]), server.chat(n=6, stream=True)):
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert _load(server) == (1, 3)
        second = send(server, kit.chat_body(n=2))
        kit.wait_for(lambda: _load(server) == (1, 5))
        assert server.chat().status_code == 429
        engine.allow(1000)
        assert [kit.read_all(c).split()[1] for c in (first, second)] == [b"200"] * 2
        [c.close() for c in (first, second)]
        kit.wait_for(is_idle(server))
        whole = server.chat(n=6)
        assert (whole.status_code, len(whole.json()["choices"])) == (200, 6)


def _load(server):
    return server.service.worker.num_running, server.service.worker.num_waiting


def test_a_request_that_waits_too_long_is_given_up(kit):
    engine = kit.gated()
    with kit.running(engine, limits={"queue_s": 0.3}) as server:
        first = send(server, kit.chat_body())
        kit.wait_for(lambda: server.service.worker.num_running == 1)
        for stream in (False, True):
            got = server.chat(stream=stream)
            assert (got.status_code, got.json()["error"]["code"]) == (503, "queue_timeout")
        assert server.service.worker.num_waiting == 0
        engine.allow(1000)
        assert kit.read_all(first).startswith(b"HTTP/1.1 200")
        first.close()


def test_an_answer_that_takes_too_long_ends_with_an_error_event(kit):
    engine = kit.gated(permits=2)
    with kit.running(engine, limits={"request_s": 0.5}) as server:
        got = server.chat(stream=True, max_tokens=100)
        assert got.status_code == 200
        last = got.text.rstrip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["code"] == "request_timeout"
        kit.wait_for(lambda: server.service.worker._cancelled)
        engine.allow(1)
        kit.wait_for(is_idle(server))
        got = server.chat(max_tokens=100)
        assert got.status_code == 504


def test_a_model_without_finite_logits_fails_the_request_and_the_server_lives(kit):
    engine = Engine(nan_model(diffusion=tiny_diffusion()), clock=kit.clock)
    with kit.running(engine) as server:
        for stream in (False, True):
            got = server.chat(stream=stream)
            assert (got.status_code, got.json()["error"]["code"]) == (500, "generation_failed")
        assert server.http.get("/health").status_code == 200
        assert server.service.worker.state == "ready"


def test_a_crashed_engine_answers_all_who_wait_and_shows_in_health(kit):
    engine = kit.gated(permits=2)
    with kit.running(engine) as server, ThreadPoolExecutor(5) as pool:
        assert server.http.get("/ready").status_code == 200
        running = pool.submit(server.chat, stream=True, max_tokens=100)
        kit.wait_for(lambda: engine.num_passes == 2)
        waiting = [pool.submit(server.chat, stream=bool(idx % 2)) for idx in range(4)]
        kit.wait_for(lambda: server.service.worker.num_waiting == 4)
        engine.crash = RuntimeError("the device is gone")
        engine.allow(1)
        last = running.result().text.rstrip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["code"] == "engine_dead"
        assert {w.result().status_code for w in waiting} == {503}
        health = server.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead", "reason": "RuntimeError"})
        assert server.http.get("/ready").status_code == 503
        line = next(json.loads(line) for line in server.lines if "engine_dead" in line)
        assert line["fault"] == "RuntimeError"
        assert "conftest.py" in str(line["at"])
        assert "device is gone" not in "".join(server.lines)
        started = time.monotonic()
        assert server.chat().status_code == 503
        assert time.monotonic() - started < 2
        assert "device is gone" not in server.chat().text


def test_the_public_client_raises_on_an_error_in_a_stream(kit):
    engine = kit.gated(permits=2)
    with kit.running(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        messages = [{"role": "user", "content": "hello"}]
        with client.chat.completions.create(model=kit.name, messages=messages, stream=True) as stream:
            next(stream)
            engine.crash = RuntimeError()
            engine.allow(1)
            with pytest.raises(openai.APIError):
                list(stream)


def test_a_model_that_loads_is_not_ready_and_refuses_for_now(kit):
    go = threading.Event()

    def load():
        assert go.wait(20)
        return kit.direct

    with kit.running(load, wait=False) as server:
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ready").status_code == 503
        assert server.chat().json()["error"]["code"] == "server_loading"
        assert server.http.get("/v1/models").json()["data"] == []
        assert server.http.get("/v1/provenance").status_code == 503
        go.set()
        kit.wait_for(lambda: server.http.get("/ready").status_code == 200)
        assert server.chat().status_code == 200


def test_a_model_with_another_root_is_not_served(kit):
    with kit.running(required_root="0" * 64, wait=False) as server:
        kit.wait_for(lambda: server.service.worker.state == "dead")
        assert isinstance(server.service.worker.fault, ModelError)
        assert server.service.served is None
    with kit.running(required_root=kit.loaded.tensor_root) as server:
        assert server.chat().status_code == 200


def test_draining_answers_what_is_queued_and_refuses_the_rest(kit):
    engine = kit.gated(permits=1)
    with kit.running(engine) as server, ThreadPoolExecutor(4) as pool:
        running = pool.submit(server.chat, stream=True)
        waiting = pool.submit(server.chat)
        kit.wait_for(lambda: _load(server) == (1, 1))
        server.server.ask_to_stop()
        kit.wait_for(lambda: server.service.worker.state == "draining")
        assert server.chat().json()["error"]["code"] == "server_draining"
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        engine.allow(1000)
        assert running.result().text.endswith("data: [DONE]\n\n")
        assert waiting.result().status_code == 200
        kit.wait_for(lambda: server.service.worker.state == "stopped")


@pytest.mark.parametrize("how", ["the time is over", "asked twice"])
def test_what_is_not_finished_in_time_ends_with_an_error_event(kit, how):
    engine = kit.gated(permits=2)
    drain_s = 0.2 if how == "the time is over" else 30
    with kit.running(engine, limits={"drain_s": drain_s}) as server, ThreadPoolExecutor(4) as pool:
        running = pool.submit(server.chat, stream=True, max_tokens=100)
        kit.wait_for(lambda: engine.num_passes == 2)
        waiting = pool.submit(server.chat)
        kit.wait_for(lambda: _load(server) == (1, 1))
        started = time.monotonic()
        server.server.ask_to_stop()
        if how == "asked twice":
            server.server.ask_to_stop()
        last = running.result().text.rstrip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert waiting.result().status_code == 503
        assert time.monotonic() - started < 4


def test_a_reader_that_falls_too_far_behind_is_dropped(kit):
    engine = kit.gated()
    with kit.running(engine, limits={"max_buffered_passes": 3}) as server, ThreadPoolExecutor(1) as pool:
        # The event loop itself is held up, so that passes pile up before anyone can read them.
        running = pool.submit(server.chat, stream=True, max_tokens=100)
        kit.wait_for(lambda: engine.num_started == 1)
        hold = threading.Event()
        server.loop.call_soon_threadsafe(hold.wait, 5)
        engine.allow(20)
        kit.wait_for(lambda: engine.num_passes >= 15)
        hold.set()
        got = running.result()
        assert "slow_reader" in got.text
        engine.allow(1000)
        kit.wait_for(is_idle(server))


KEY = "a-long-key-for-tests"


def ask_with(server, *headers, path="/v1/models"):
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    data = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode("latin-1")
    return int(server.raw(data).split()[1])


def test_every_route_but_health_needs_a_key(kit):
    with kit.running(keys=[KEY, "another-long-key"]) as server:
        bearer = f"Bearer {KEY}"
        assert ask_with(server, path="/health") == 200
        for path in (
            "/v1/models",
            "/ready",
            "/metrics",
            "/v1/provenance",
            "/openapi.json",
            "/nope",
            "/%68ealth",
            "//",
        ):
            assert ask_with(server, path=path) == 401
        assert ask_with(server, ("Authorization", bearer)) == 200
        assert ask_with(server, ("authorization", "bearer another-long-key")) == 200
        for wrong in ("", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"{bearer}x", bearer[:-1], "Bearer \xfc\xff"):
            assert ask_with(server, ("Authorization", wrong)) == 401
        assert ask_with(server, ("Authorization", bearer), ("Authorization", bearer)) == 401
        assert ask_with(server, ("Authorization", "Bearer " + "a" * 1_000_000)) == 400
        assert ask_with(server, ("Host", "x"), path="/v1/models?/health") in (400, 401, 421)
        assert server.chat().status_code == 401
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            assert [m.id for m in client.models.list()] == [kit.name]
        assert not any(KEY in line for line in server.lines)


def test_keys_come_from_a_file_or_the_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# team\nfirst-long-key\n\n second-long-key \n")
    keys = Keys.read(path, "third-long-key fourth-long-key")
    for key in (b"first-long-key", b"second-long-key", b"third-long-key", b"fourth-long-key"):
        assert keys.open_for([(b"authorization", b"Bearer " + key)])
    assert not keys.open_for([(b"authorization", b"Bearer # team")])
    assert Keys.read(None, None).open_for([])
    path.write_text("\n# nothing\n")
    for place, environment in ((path, None), (None, "  "), (tmp_path / "absent", None), (None, "short")):
        with pytest.raises(ConfigError):
            Keys.read(place, environment)


def test_the_log_is_json_lines_without_prompts_or_answers(kit):
    with kit.running() as server:
        secret = "do not write this down"
        got = server.chat(messages=[{"role": "user", "content": secret}], logit_bias={"65": 100})
        bad = server.chat(messages=[{"role": secret, "content": secret}])
        kit.wait_for(lambda: len(server.lines) >= 2)
        lines = [json.loads(line) for line in server.lines]
    assert [(line["event"], line["status"]) for line in lines] == [("request", 200), ("request", 400)]
    assert lines[0]["request_id"] == got.headers["x-request-id"]
    assert got.json()["id"].endswith(lines[0]["request_id"])
    assert bad.headers["x-request-id"] == lines[1]["request_id"]
    assert "AAAAAA" in got.text
    assert not any(secret in line or "AAAA" in line for line in server.lines)


def test_a_full_disk_costs_log_lines_only(kit):
    def write(line):
        raise OSError(28, "No space left on device")

    log = JsonLog(write, kit.clock)
    with kit.running(log=log) as server:
        assert server.chat().status_code == 200
        assert server.chat(n=0).status_code == 400
        kit.wait_for(lambda: log.lost == 2)
        assert "ar2diff_lost_log_lines 2.0" in server.http.get("/metrics").text


def test_our_own_mistake_is_answered_without_its_details(kit, monkeypatch):
    with kit.running() as server:
        monkeypatch.setattr(type(server.service), "find", lambda self, name: 1 / 0)
        got = server.chat()
        assert (got.status_code, got.json()["error"]["code"]) == (500, "internal_error")
        assert "division" not in got.text
        kit.wait_for(lambda: any("ZeroDivisionError" in line for line in server.lines))
        monkeypatch.undo()
        assert server.chat().status_code == 200


def test_a_reader_that_takes_nothing_is_dropped():
    async def events():
        yield {"first": 1}
        yield {"second": 2}

    sent = []

    async def send(message):
        sent.append(message["type"])
        if len(sent) == 3:
            await asyncio.sleep(30)

    started = time.monotonic()
    with pytest.raises(Disconnected):
        asyncio.run(send_stream(send, events(), slow_reader_s=0.1))
    assert time.monotonic() - started < 10
    assert len(sent) == 3
