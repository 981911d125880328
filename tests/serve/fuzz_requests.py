"""`python tests/serve/fuzz_requests.py 10000 [RESULT]`: so many random requests; none is a fault of the server.

Half of them come from schemathesis, which reads the server's own /openapi.json and makes requests that fit it and
requests that do not. The other half are good requests of which hypothesis has changed some fields, or the bytes. The
model is tiny, real and has a template with thinking and calls. Every answer is checked: no status from 500 on, errors
in one shape, streams that end with a word. The last line printed is JSON.
"""

import copy
import dataclasses
import json
import os
import platform
import sys
import time
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import httpx2
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from scripted import make_tokenizer

from ar2diff import __version__
from ar2diff.clock import SystemClock
from ar2diff.engine.engine import Engine
from ar2diff.testing.models import tiny_diffusion, tiny_model

PATHS = ("/v1/chat/completions", "/v1/completions")
NAME = "tiny"
MAX_TOKENS = 4
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "maxItems": 2}}}
CHAT = {
    "model": NAME,
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hé"}]}],
    "max_tokens": MAX_TOKENS,
}
GOOD = [
    (PATHS[0], CHAT),
    (PATHS[0], {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "stop": ["a", "b"]}),
    (PATHS[0], {**CHAT, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}),
    (PATHS[0], {**CHAT, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}, "stream": True}),
    (PATHS[0], {**CHAT, "response_format": FORM, "logprobs": True, "top_logprobs": 2}),
    (PATHS[0], {**CHAT, "temperature": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "user": "u"}),
    (PATHS[1], {"model": NAME, "prompt": "hello", "max_tokens": MAX_TOKENS, "logprobs": 1, "echo": True}),
    (PATHS[1], {"model": NAME, "prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True, "logprobs": 0}),
    (
        PATHS[1],
        {
            "model": NAME,
            "prompt": ["a", "b"],
            "max_tokens": MAX_TOKENS,
            "logit_bias": {"3": -1.5},
            "repetition_penalty": 1.5,
            "presence_penalty": 1,
            "frequency_penalty": 0.5,
            "diffusion": {
                "mode": "diffusion",
                "policy": "top_k",
                "denoising_steps": 2,
                "block_size": 2,
                "trace": True,
            },
        },
    ),
]


def build_engine():
    loaded = tiny_model(3, diffusion=tiny_diffusion(), vocab_size=300)
    return Engine(dataclasses.replace(loaded, tokenizer=make_tokenizer("hermes")), clock=SystemClock())


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-3, 3),
    st.text(max_size=12),
    st.sampled_from(
        [NAME, "text", "user", "assistant", "tool", "system", "ar", "verified", "none", "auto", "\ud800"]
    ),
    st.sampled_from([TOOL, FORM, {"type": "object"}, {"$ref": "#"}, {"type": "string", "pattern": "(a|b)*c{3}"}]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def changed_requests(draw):
    """A path and a body: a good one with some places changed, taken away or added; now and then its bytes cut."""
    path, body = draw(st.sampled_from(GOOD))
    body = copy.deepcopy(body)
    names = sorted({name for _, good in GOOD for name in good})
    for _ in range(draw(st.integers(0, 3))):
        body = change(draw, body, names)
    content = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=4)) + content[at + draw(st.integers(0, 3)) :]
    return path, content


def change(draw, value, names):
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 4)) == 0:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: change(draw, value[key], names)}
    if isinstance(value, dict):
        return {**value, draw(st.sampled_from(names)): draw(VALUES)}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], change(draw, value[at], names), *value[at + 1 :]]
    return draw(VALUES)


class Fuzz:
    """Random requests to one server, and what came of them."""

    def __init__(self, url):
        self.http = httpx2.Client(base_url=url, timeout=120)
        self.statuses, self.codes = Counter(), Counter()
        self.longest_s = 0.0

    def change(self, count, start):
        """Good requests that were changed."""

        @run_as(count, start)
        @given(changed_requests())
        def run(asked):
            path, content = asked
            self.send(path, content, {"content-type": "application/json"})

        run()

    def describe(self, count, start):
        """Requests that schemathesis makes from the server's description, half of them meant to be wrong."""
        import schemathesis
        from schemathesis import GenerationMode

        schema = schemathesis.openapi.from_dict(narrow(self.http.get("/openapi.json").json()))
        operations = [schema[path]["POST"] for path in PATHS]
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        strategy = st.one_of([op.as_strategy(generation_mode=mode) for op in operations for mode in modes])

        @run_as(count, start)
        @given(strategy)
        def run(case):
            content = b"" if not isinstance(case.body, dict | list | str | int | float | None) else as_json(case.body)
            kind = case.media_type or "application/json"
            self.send(case.path, content, {**dict(case.headers or {}), "content-type": kind})

        run()

    def send(self, path, content, headers):
        started = time.monotonic()
        headers = {name: value for name, value in headers.items() if value.isascii() and value.isprintable()}
        got = self.http.post(path, content=content, headers=headers)
        self.longest_s = max(self.longest_s, time.monotonic() - started)
        self.statuses[got.status_code] += 1
        if (fault := find_fault(got)) is not None:
            raise AssertionError(f"{fault}: {path} {content!r} {got.status_code} {got.text[:500]}")
        if got.status_code != 200:
            self.codes[got.json()["error"]["code"]] += 1


def run_as(count, start):
    calm = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    return lambda run: seed(start)(calm(run))


def as_json(value):
    return json.dumps(value).encode()


def find_fault(got):
    """What is wrong with a response, or None."""
    if got.status_code >= 500:
        return "a fault of the server"
    if got.status_code != 200:
        error = got.json().get("error", {})
        is_whole = set(error) == {"message", "type", "param", "code"} and error["message"] and error["code"]
        return None if is_whole else "an error in another shape"
    if got.headers["content-type"].startswith("text/event-stream"):
        return None if got.text.endswith("data: [DONE]\n\n") else "a stream without an end"
    return None if got.json()["choices"] else "an answer without choices"


def narrow(document):
    """The description with one model and short answers, so that requests that fit it are answered, and soon."""
    for name, body in document["components"]["schemas"].items():
        if name in ("ChatRequest", "CompletionRequest"):
            few = {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}
            body["properties"] |= {"model": {"const": NAME}, "max_tokens": few}
            body["properties"].pop("max_completion_tokens", None)
            body["required"] = sorted({*body["required"], "max_tokens"})
    return document


def main():
    from conftest import running

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    started = time.monotonic()
    warnings.simplefilter("ignore")
    with running(build_engine) as server:
        fuzz = Fuzz(server.url)
        fuzz.change(count // 2, 1)
        fuzz.describe(count - count // 2, 2)
        after = fuzz.http.post(PATHS[0], json=CHAT).status_code
        is_idle, state = server.service.worker.is_idle, server.service.worker.state
        lost = [line for line in server.lines if "internal_error" in line or "engine_dead" in line]
    document = describe(count, fuzz, after, is_idle and state == "ready", lost)
    text = json.dumps({**document, "seconds": round(time.monotonic() - started, 1)})
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(text + "\n", encoding="utf-8")
    print(text)


def describe(count, fuzz, after, is_ready, lost):
    faults = sum(n for status, n in fuzz.statuses.items() if status >= 500) + len(lost)
    bars = [
        ("cases", fuzz.statuses.total(), count, "higher"),
        ("answers of status 500 and above, and faults in the log", faults, 0, "lower"),
        ("engine ready and idle, next answer 200", float(is_ready and after == 200), 1, "higher"),
    ]
    return {
        "benchmark": "fuzz_serve",
        "bars": [
            {
                "name": name,
                "value": value,
                "bar": bar,
                "better": better,
                "holds": value >= bar if better == "higher" else value <= bar,
            }
            for name, value, bar, better in bars
        ],
        "statuses": {str(status): n for status, n in sorted(fuzz.statuses.items())},
        "errors_by_code": dict(fuzz.codes.most_common()),
        "longest_answer_s": round(fuzz.longest_s, 2),
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "ar2diff": __version__,
            "hypothesis": version("hypothesis"),
            "schemathesis": version("schemathesis"),
        },
    }


if __name__ == "__main__":
    main()
