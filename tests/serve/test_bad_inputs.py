"""Every bad input gets its answer, in one shape, and the server goes on."""

import json
import socket
import time

import pytest

BIG = 10**21
DEEP = 100_000


def post(body, *, headers="", path="/v1/chat/completions", kind="application/json"):
    content = body if isinstance(body, bytes) else body.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{headers}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def status_and_error(received):
    head, _, body = received.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


def check(server, data, status, code=None):
    got, error = status_and_error(server.raw(data))
    assert got == status, error
    assert code is None or error["code"] == code
    return error


# Text that is not a chat request: refused by the parser.
TEXTS = {
    "empty": "",
    "list": "[]",
    "null": "null",
    "string": '"x"',
    "number": "1",
    "cut": '{"model": "tiny"',
    "deep lists": "[" * DEEP,
    "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "closed deep lists": '{"messages":' + "[" * 90 + "]" * 90 + "}",
    "double key": '{"model": "tiny", "model": "tiny", "messages": []}',
    "double key inside": '{"model": "tiny", "messages": [{"role": "user", "role": "user", "content": "x"}]}',
    "NaN": '{"temperature": NaN}',
    "infinity": '{"temperature": -Infinity}',
    "1e400": '{"temperature": 1e400}',
    "5,000 digits": '{"seed": ' + "9" * 5000 + "}",
    "lone surrogate": '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "lone surrogate key": '{"\\udfff": 1}',
    "doubled surrogate key": '{"\\udfff": 1, "\\udfff": 2}',
    "UTF-16": '{"model": "tiny"}'.encode("utf-16"),
    "UTF-16 without mark": '{"model": "tiny"}'.encode("utf-16-le"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "latin-1": '{"model": "t\xe9"}'.encode("latin-1"),
    "trailing": '{"model": "tiny"} x',
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_json_object_is_refused(shared, name):
    check(shared, post(TEXTS[name]), 400)
    check(shared, post(TEXTS[name], path="/v1/completions"), 400)


# Fields that are wrong, with the name that the error must give.
FIELDS = [
    ("temperature", [2.01, -0.1, "1", True, [], {}, 1e300]),
    ("top_p", [0, 1.01, -1, "0.5", False]),
    ("top_k", [0, -1, 1.0, "3", True]),
    ("min_p", [1.1, -0.1, "0", False]),
    ("n", [0, 9, -1, 1.5, "2", True]),
    ("max_tokens", [0, -5, 1.0, "6", True]),
    ("max_completion_tokens", [0, 7.5, "6", 7]),
    ("seed", [2**64, -(2**63) - 1, 1.0, "1", True]),
    ("stop", ["", [""], ["a"] * 17, ["x"] * 100_000, 3, [3], ["a" * 257], {"a": 1}]),
    ("stream", ["true", 1, 0]),
    ("stream_options", [{"include_usage": True}, 1, "x"]),
    ("user", [3, ["x"], "u" * 513]),
    ("presence_penalty", [2.5, -2.1, "0", False]),
    ("frequency_penalty", [2.1, -3, True]),
    ("repetition_penalty", [0, -1, 2.1, "1"]),
    ("logprobs", [0, 1, "true"]),
    ("top_logprobs", [1, 5, 21, -1, True, 1.0]),
    ("response_format", [{"type": "xml"}, {"type": "json_schema"}, "text", {}, [], {"type": "text", "x": 1}]),
    ("response_format.json_schema", [{"type": "json_schema", "json_schema": value} for value in ({}, {"name": "x"})]),
    ("tools", [[{"type": "function", "function": {"name": "f"}}]]),
    ("tool_choice", ["auto", "required", {"type": "function"}]),
    ("functions", [[{}]]),
    ("chat_template_kwargs", [{"tokenize": True}, {"enable_thinking": False}]),
    ("no_such_field", [None, 1]),
    ("model", [None, 1, ["tiny"]]),
    ("messages", [None, [], {}, "x", [[]], [{}]]),
    (
        "messages[0].role",
        [[{"role": "robot", "content": "x"}], [{"role": 1, "content": "x"}], [{"content": "x"}]],
    ),
    ("messages[0].content", [[{"role": "user", "content": value}] for value in (None, 3, {}, [])]),
    ("messages[1].content", [[{"role": "user", "content": "x"}, {"role": "user"}]]),
    ("messages[0].name", [[{"role": "user", "content": "x", "name": "Ann"}]]),
    ("messages[0].tool_calls", [[{"role": "assistant", "content": "x", "tool_calls": []}]]),
    ("logit_bias", [{"260": 1}, {str(idx): 1 for idx in range(301)}, [], "x", 3]),
    ("logit_bias.3", [{"3": 100.5}, {"3": "1"}, {"3": True}, {"3": None}]),
    ("diffusion", [3, "ar", []]),
    ("diffusion.mode", [{"mode": "fast"}, {"mode": 1}]),
    ("diffusion.denoising_steps", [{"denoising_steps": value} for value in (0, -1, 10**9, 1e9, "4", True)]),
    ("diffusion.block_size", [{"block_size": value} for value in (0, 3, 10**9, 2.0, "4")]),
    ("diffusion.policy", [{"policy": "best"}, {"policy": 3}, {"policy": "best", "policy_parameter": 1}]),
    ("diffusion.policy_parameter", [{"policy_parameter": value} for value in (2, -0.1, "0.9", True)]),
    ("diffusion.policy_parameter", [{"policy": "top_k", "policy_parameter": 3}]),
    ("diffusion.trace", [{"trace": 1}, {"trace": "yes"}]),
    ("diffusion.steps", [{"steps": 4}]),
]


@pytest.mark.parametrize(("param", "values"), FIELDS, ids=[name for name, _ in FIELDS])
def test_a_wrong_field_is_refused_by_name(shared, param, values):
    field = param.partition(".")[0].partition("[")[0]
    for value in values:
        got = shared.chat(**{field: value})
        assert got.status_code == 400, (value, got.text)
        assert got.json()["error"]["param"].startswith(param), got.text


def test_a_bad_bias_key_names_the_field(shared):
    for key in ("-1", "01", "x", "", "1.0", "9" * 30, "²"):
        got = shared.chat(logit_bias={key: 1})
        assert got.status_code == 400
        assert got.json()["error"]["param"].startswith("logit_bias")


def test_values_that_ask_for_nothing_are_taken(shared):
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "response_format": {"type": "text"},
        "tools": None,
        "stop": None,
        "n": None,
        "user": "somebody",
        "min_p": 0,
    }
    assert shared.chat(**neutral).json()["choices"] == shared.chat().json()["choices"]


def test_images_are_refused_and_not_fetched(shared):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        got = shared.chat(messages=[{"role": "user", "content": [part]}])
        assert got.status_code == 400
        assert got.json()["error"]["param"].startswith("messages[0].content[0]")
        trap.settimeout(0.2)
        with pytest.raises(TimeoutError):
            trap.accept()


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], [1.5], [True], [260], [-1], [[1], "x"], 3, None, {}, ["x"] * 33]
)
def test_a_bad_prompt_is_refused_by_name(shared, prompt):
    got = shared.complete(prompt=prompt)
    assert got.status_code == 400, got.text
    assert got.json()["error"]["param"].startswith("prompt")


def test_completion_fields_that_are_not_built_are_refused(shared):
    for field, value in (("suffix", "x"), ("best_of", 2)):
        assert shared.complete(**{field: value}).json()["error"]["param"] == field


def test_more_choices_than_are_allowed_are_refused(shared):
    assert shared.complete(prompt=["x"] * 8, n=8).json()["error"]["param"] == "n"


def test_a_prompt_that_fills_the_context_is_refused_before_any_work(shared):
    got = shared.complete(prompt=[7] * 256).json()["error"]
    assert (got["code"], got["param"]) == ("context_length_exceeded", "prompt")
    got = shared.chat(messages=[{"role": "user", "content": "x" * 10_000}]).json()["error"]
    assert (got["code"], got["param"]) == ("context_length_exceeded", "messages")


def test_a_hundred_thousand_messages_are_refused_at_once(shared):
    started = time.monotonic()
    got = shared.chat(messages=[{}] * 100_000)
    assert got.status_code == 400
    assert got.json()["error"]["param"] == "messages"
    assert time.monotonic() - started < 5
    assert shared.chat(messages=[{"role": "user", "content": ""}] * 1025).status_code == 400


@pytest.mark.parametrize("model", ["../../etc/passwd", "", "TINY", "/etc", "tiny\u0000"])
def test_a_model_name_is_looked_up_and_never_a_path(shared, model):
    got = shared.chat(model=model)
    assert (got.status_code, got.json()["error"]["code"]) == (404, "model_not_found")


HEADERS = {
    "form": ({"kind": "application/x-www-form-urlencoded"}, 415),
    "plain": ({"kind": "text/plain"}, 415),
    "charset": ({"kind": "application/json; charset=utf-16"}, 415),
    "gzip": ({"headers": "Content-Encoding: gzip\r\n"}, 415),
    "both lengths": ({"headers": "Transfer-Encoding: chunked\r\n"}, 400),
    "expected host missing": ({"headers": "Host: evil.example\r\n"}, 421),
}


@pytest.mark.parametrize("name", HEADERS)
def test_wrong_headers_are_refused(shared, name):
    asked, status = HEADERS[name]
    received = shared.raw(post("{}", **asked))
    assert int(received.split()[1]) in (status, 400)
    if name != "expected host missing":
        assert status_and_error(received)[0] == status


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil", "169.254.169.254:80"]
)
def test_another_hosts_name_is_not_answered(shared, host):
    check(shared, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(), 421, "wrong_host")
    check(shared, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(), 421, "wrong_host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:9"])
def test_names_of_this_machine_are_answered(shared, host):
    received = shared.raw(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert received.split()[1] == b"200"


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(shared):
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1", 404),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
    ):
        check(shared, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode(), status)


def test_large_bodies_are_refused_before_they_are_read(kit):
    with kit.running(limits={"max_body_bytes": 1000}) as server:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        check(server, head + b"Content-Length: 1001\r\n\r\n", 413)
        chunk = b"190\r\n" + b"x" * 0x190 + b"\r\n"
        check(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3, 413)
        assert server.chat().status_code == 200


def test_slow_bodies_are_cut_off(kit):
    with kit.running(limits={"body_s": 0.3}) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        started = time.monotonic()
        check(server, head + b"Content-Length: 50\r\n\r\n{", 408)
        assert time.monotonic() - started < 5
        assert server.chat().status_code == 200


def test_oversized_headers_are_refused(shared):
    received = shared.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000)
    assert received.split()[1] == b"400"


def test_broken_http_is_refused(shared):
    for data in (b"hello\r\n\r\n", b"\x16\x03\x01" + b"\0" * 200 + b"\r\n\r\n"):
        assert shared.raw(data).split()[1] == b"400", data


def test_bad_inputs_again_and_again_leave_nothing_behind(shared):
    texts = [post(TEXTS[name]) for name in TEXTS if not name.startswith("deep")]
    for _ in range(5):
        for text in texts:
            check(shared, text, 400)
    assert shared.service.worker.is_idle
    assert shared.http.get("/health").status_code == 200
