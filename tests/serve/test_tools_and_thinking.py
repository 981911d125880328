"""Tools and thinking over HTTP, with the public client: whole, streamed, and back through the template."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel
from scripted import ScriptedEngine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none needed", max_retries=0)


def join(chunks):
    """The message and the reason that a stream spells."""
    message, reason = {"content": "", "reasoning_content": "", "calls": []}, None
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or []:
                if part.id:
                    message["calls"].append([part.id, part.function.name, ""])
                message["calls"][part.index][2] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    return message, reason


@pytest.mark.parametrize("step", [1, 4, 500])
@pytest.mark.parametrize("tags", [False, True])
def test_a_stream_is_the_whole_answer(kit, step, tags):
    text = f"<think>\nhm\n</think>\n\nLook:\n{CALL}\n{CALL}"
    with kit.running(ScriptedEngine("hermes", text, step=step, has_tags=tags)) as server, client_of(server) as client:
        whole = client.chat.completions.create(**ASKED, tools=TOOLS)
        choice = whole.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content, choice.message.reasoning_content) == ("Look:", "hm")
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"a": 1}] * 2
        assert whole.usage.completion_tokens_details.reasoning_tokens > 0
        with client.chat.completions.create(**ASKED, tools=TOOLS, stream=True) as stream:
            message, reason = join(stream)
    assert reason == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("Look:", "hm")
    assert [call[1:] for call in message["calls"]] == [["f", '{"a": 1}']] * 2
    assert len({call[0] for call in message["calls"]}) == 2


def test_thinking_that_takes_all_tokens_leaves_an_empty_answer(kit):
    with kit.running(ScriptedEngine("hermes", "<think>" + "hm " * 50)) as server, client_of(server) as client:
        got = client.chat.completions.create(**{**ASKED, "max_tokens": 40})
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == ("", "length")
    assert got.choices[0].message.reasoning_content.startswith("hm hm")
    assert got.usage.completion_tokens == 40
    assert got.usage.completion_tokens_details.reasoning_tokens == 40 - len("<think")


def test_stop_texts_count_in_content_only(kit):
    text = '<think>STOP</think>\n\n<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>aSTOPb'
    with kit.running(ScriptedEngine("hermes", text)) as server:
        got = server.chat(tools=TOOLS, stop="STOP", max_tokens=400).json()["choices"][0]
    assert (got["message"]["content"], got["message"]["reasoning_content"]) == ("a", "STOP")
    assert (got["finish_reason"], len(got["message"]["tool_calls"])) == ("tool_calls", 1)


def test_a_call_and_its_result_go_back_through_the_template(kit):
    engine = ScriptedEngine("hermes", f"<think>hm</think>{CALL}", "It is 4.")
    with kit.running(engine) as server, client_of(server) as client:
        first = client.chat.completions.create(**ASKED, tools=TOOLS).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "4"}
        turns = [*ASKED["messages"], first, result]
        got = client.chat.completions.create(**{**ASKED, "messages": turns}, tools=TOOLS)
        assert got.choices[0].message.content == "It is 4."
        prompt = engine.tokenizer.decode(list(engine.requests[1].prompt_ids), skip_special=False)
        assert f"assistant\n<think>hm</think>{CALL}<|im_end|>\n<|im_start|>tool\n4<|im_end|>" in prompt
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**ASKED, "messages": [*ASKED["messages"], result]}, tools=TOOLS)
        assert refused.value.param == "messages[1].tool_call_id"


def test_enable_thinking_reaches_the_template(kit):
    with kit.running(ScriptedEngine("hermes", "hm</think>\n\nHi", "Hi")) as server:
        on = server.chat(chat_template_kwargs={"enable_thinking": True}, max_tokens=99).json()["choices"][0][
            "message"
        ]
        off = server.chat(chat_template_kwargs={"enable_thinking": False}, max_tokens=99).json()["choices"][0][
            "message"
        ]
        refused = server.chat(chat_template_kwargs={"tokenize": True}).json()["error"]
    assert (on["content"], on["reasoning_content"]) == ("Hi", "hm")
    assert off["content"] == "Hi"
    assert "reasoning_content" not in off
    assert refused["param"] == "chat_template_kwargs.tokenize"


def test_one_call_and_no_call_can_be_asked_for(kit):
    with kit.running(ScriptedEngine("hermes", f"{CALL}\n{CALL}")) as server:
        one = server.chat(tools=TOOLS, parallel_tool_calls=False, max_tokens=400).json()["choices"][0]
        none = server.chat(tools=TOOLS, tool_choice="none", max_tokens=400).json()["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    assert none["message"]["content"] == f"{CALL}\n{CALL}"
    assert none["finish_reason"] == "stop"


def test_choices_call_each_for_itself(kit):
    with kit.running(ScriptedEngine("hermes", CALL, "No.")) as server:
        got = server.chat(tools=TOOLS, n=2, max_tokens=400).json()["choices"]
    assert [choice["finish_reason"] for choice in got] == ["tool_calls", "stop"]


def test_the_async_client_gets_calls(kit):
    async def ask(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none needed", max_retries=0) as client:
            return await client.chat.completions.create(**ASKED, tools=TOOLS)

    with kit.running(ScriptedEngine("hermes", CALL)) as server:
        got = asyncio.run(ask(server.url))
    assert got.choices[0].message.tool_calls[0].function.name == "f"


class Verdict(BaseModel):
    ok: bool


def test_a_model_class_is_parsed(shared):
    with client_of(shared) as client:
        bias = {str(idx): -100 for idx in (9, 10, 13, 32)}
        got = client.chat.completions.parse(**ASKED, response_format=Verdict, logit_bias=bias)
    assert isinstance(got.choices[0].message.parsed, Verdict)


REFUSED = [
    ("tools", {"tools": TOOLS * 2}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("parallel_tool_calls", {"parallel_tool_calls": True}),
    (
        "tools[0].function.parameters",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
    ),
]


def test_wrong_tools_are_refused_by_name(kit):
    with kit.running(ScriptedEngine("hermes", "x")) as server:
        for param, fields in REFUSED:
            got = server.chat(**fields)
            assert got.status_code == 400
            assert got.json()["error"]["param"].startswith(param)
