"""A call that is asked for comes, whatever the model would rather say: required, named, with thinking or a form."""

import dataclasses
import json

import jsonschema
import pytest
from scripted import MODEL, ScriptedEngine, make_tokenizer

from ar2diff.clock import SystemClock
from ar2diff.engine.engine import Engine

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "bl<ue"]}, "on": {"type": "boolean"}},
    "required": ["colour", "on"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
# A random model would fill its answer with the white space that JSON allows.
SPACES = {str(idx): -100 for idx in (9, 10, 13, 32)}
NAMED = {"type": "function", "function": {"name": "paint"}}
FORMATS = [(name, tags) for name in ("hermes", "minicpm5", "llama3") for tags in (False, True)]


@pytest.fixture(scope="module", params=FORMATS, ids=lambda form: f"{form[0]}-{'tokens' if form[1] else 'texts'}")
def random_server(kit, request):
    """A real engine over random weights under one format's template; it would never call by itself."""
    name, tags = request.param
    tokenizer = make_tokenizer(name, has_tags=tags)
    engine = Engine(dataclasses.replace(MODEL, tokenizer=tokenizer), clock=SystemClock())
    with kit.running(engine) as server:
        server.think_end = tokenizer.token_to_id("</think>")
        yield server


def ask(server, **fields):
    asked = {"tools": TOOLS, "max_tokens": 160, "temperature": 1, "chat_template_kwargs": {"enable_thinking": False}}
    bias = SPACES | fields.pop("logit_bias", {})
    got = server.chat(**{**asked, **fields, "logit_bias": bias})
    assert got.status_code == 200, got.text
    return got.json()["choices"][0]


@pytest.mark.parametrize("mode", ["diffusion", "verified", "ar"])
def test_a_required_call_always_parses_and_a_named_one_is_that_tool(random_server, mode):
    for seed in range(3):
        asked = {"seed": seed, "diffusion": {"mode": mode}, "parallel_tool_calls": False}
        required = ask(random_server, tool_choice="required", **asked)
        named = ask(random_server, tool_choice=NAMED, **asked)
        for choice in (required, named):
            assert choice["finish_reason"] == "tool_calls", choice
            assert choice["message"]["content"] is None
            [call] = choice["message"]["tool_calls"]
            if call["function"]["name"] == "paint":
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
            else:
                assert call["function"]["arguments"] == "{}"
        assert named["message"]["tool_calls"][0]["function"]["name"] == "paint"


def test_a_required_call_may_follow_thinking(random_server):
    if random_server.think_end is None:
        pytest.skip("thinking ends by chance only where its end is no token")
    bias = {str(random_server.think_end): 100}
    thinking = {"enable_thinking": True}
    choice = ask(random_server, tool_choice=NAMED, chat_template_kwargs=thinking, logit_bias=bias)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "paint"


def test_a_form_holds_for_the_answer_after_thinking(random_server):
    schema = {"type": "array", "items": {"enum": ["a", 7]}, "minItems": 2, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"tools": None, "response_format": form, "seed": 1}
    plain = ask(random_server, **asked)
    jsonschema.validate(json.loads(plain["message"]["content"]), schema)
    if random_server.think_end is not None:
        bias = {str(random_server.think_end): 100}
        choice = ask(random_server, **asked, chat_template_kwargs={"enable_thinking": True}, logit_bias=bias)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_a_misspelled_word_in_a_forced_tool_is_refused_with_its_name(random_server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "propertys": {}}}}]
    got = random_server.chat(tools=tools, tool_choice="required")
    assert (got.status_code, got.json()["error"]["param"]) == (400, "tools")
    assert "unknown keyword 'propertys'" in got.json()["error"]["message"]


CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_of_every_token_calls_and_thinking_too(kit, tags, stream):
    engine = ScriptedEngine("hermes", f"<think>hm</think>é{CALL}", step=4, has_tags=tags)
    usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with kit.running(engine) as server:
        got = server.chat(tools=TOOLS, logprobs=True, max_tokens=200, **usage)
    if stream:
        lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
        pieces = [json.loads(line) for line in lines]
        scored = [entry for piece in pieces for choice in piece["choices"] for entry in _entries(choice)]
        count = pieces[-1]["usage"]["completion_tokens"]
    else:
        scored = got.json()["choices"][0]["logprobs"]["content"]
        count = got.json()["usage"]["completion_tokens"]
    text = b"".join(bytes(entry["bytes"]) for entry in scored).decode()
    assert len(scored) == count > 10
    assert text == f"<think>hm</think>é{CALL}"


def _entries(choice):
    return (choice.get("logprobs") or {}).get("content") or []
