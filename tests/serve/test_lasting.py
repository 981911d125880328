"""What many bad inputs leave behind, and what one costly input does to everyone else."""

import gc
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ar2diff.engine.grammar import GrammarCompiler

MANY = 1000


def build_all_of(depth):
    pair = [{"properties": {f"a{depth}": {"type": "string"}}}, {"properties": {f"b{depth}": {"type": "string"}}}]
    return {"allOf": [{"anyOf": pair}, build_all_of(depth - 1)]} if depth else {"type": "object"}


BOMBS = {
    "a product of 2^20 schemas": build_all_of(20),
    "a pattern that explodes": {"type": "string", "pattern": "((a{0,1000}){0,1000}){0,1000}b{1000}(x|y)*x(x|y){900}"},
    "a huge divisor": {"type": "integer", "multipleOf": 1_234_567},
}


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}


def test_schema_and_regex_bombs_are_refused_while_others_are_answered(shared):
    assert shared.chat().status_code == 200
    with ThreadPoolExecutor(len(BOMBS)) as pool:
        bombs = [pool.submit(shared.chat, response_format=form(schema), max_tokens=1) for schema in BOMBS.values()]
        for _ in range(3):
            started = time.monotonic()
            assert shared.chat().status_code == 200
            assert time.monotonic() - started < 5
        for bomb in bombs:
            got = bomb.result()
            if got.status_code != 200:  # a pattern that compiles in time is no bomb
                assert (got.status_code, got.json()["error"]["param"]) == (400, "response_format")
        assert bombs[0].result().status_code == 400
    assert shared.chat().status_code == 200


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_a_thousand_bad_inputs_cost_no_memory(shared):
    bad = [
        b"",
        b"[]",
        b'{"a":' * 2000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        json.dumps({"model": "tiny", "messages": [{}] * 2000}).encode(),
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}).encode(),
        json.dumps({"model": "tiny", "messages": [{"role": "robot", "content": "x"}], "n": 9}).encode(),
    ]

    def send(count):
        for idx in range(count):
            headers = {"content-type": "application/json"}
            got = shared.http.post("/v1/chat/completions", content=bad[idx % len(bad)], headers=headers)
            assert got.status_code == 400, got.text

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    send(200)
    before = resident()
    send(MANY)
    assert resident() < 1.05 * before
    assert shared.service.worker.is_idle


COUNT = 50_000
FLOODS = [
    ("prompt[0]", {"prompt": [True] * COUNT}),
    ("prompt[0][0]", {"prompt": [[True] * COUNT]}),
    ("stop[0]", {"stop": [1] * COUNT}),
    ("logit_bias", {"logit_bias": {f"x{idx}": "x" for idx in range(COUNT)}}),
    ("a0", {f"a{idx}": 1 for idx in range(COUNT)}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [1] * COUNT}]}),
    ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [1] * COUNT}]}),
    ("messages[0]", {"messages": [{f"a{idx}": 1 for idx in range(COUNT)}]}),
    ("tools[0]", {"tools": [1] * COUNT}),
    ("diffusion", {"diffusion": {f"a{idx}": 1 for idx in range(COUNT)}}),
]


@pytest.mark.parametrize(("param", "fields"), FLOODS, ids=[param for param, _ in FLOODS])
def test_a_flood_of_wrong_values_is_one_fault_at_the_first_of_them(shared, param, fields):
    got = shared.complete(**fields) if "prompt" in fields else shared.chat(**fields)
    assert got.status_code == 400
    assert got.json()["error"]["param"] == param


@pytest.mark.parametrize("field", ["chat_template", "guided_regex", "guided_json", "structured_outputs", "mm_data"])
def test_fields_that_hurt_other_servers_are_unknown_here(shared, field):
    got = shared.chat(**{field: "{% for x in range(10 ** 9) %}x{% endfor %}"})
    assert (got.status_code, got.json()["error"]["param"]) == (400, field)


def test_forms_are_kept_for_a_while_not_for_ever(kit):
    compiler = GrammarCompiler(kit.loaded.tokenizer, kit.loaded.config.vocab_size)
    assert compiler._compile_once.cache_parameters()["maxsize"] == 64


def test_a_caller_does_not_choose_the_id_of_a_request(shared):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    got = shared.http.post("/v1/completions", json=body, headers={"X-Request-Id": "chosen"})
    assert "chosen" not in got.headers["x-request-id"] + got.text
