"""A stream says what the whole answer says, wherever passes, tokens and characters are cut, in every format."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine
from test_reading import BAD, DIALECTS, GOOD, TOOLS

from ar2diff.engine.request import Request
from ar2diff.serve.bodies import AnswerHead
from ar2diff.serve.stream import pieces

TEXTS = [
    *(text for _, text, _ in GOOD),
    *(text for _, text in BAD),
    "<think>",
    "</think>",
    " \n",
    "é😀<",
    "x",
    "STOP",
]


class Played:
    """An answer whose passes are known; what `pieces` reads of an `Answer`."""

    def __init__(self, passes):
        self._passes = passes

    async def outcomes(self):
        for step in self._passes:
            yield 0, step


def play(name, tags, text, plan, lens, stop):
    """The passes of one scripted answer, of these lengths in turn."""
    engine = ScriptedEngine(name, text, has_tags=tags)
    engine.add("key", Request(prompt_ids=(1,), max_tokens=9000, reader=plan, stop=stop))
    passes = []
    while engine.running:
        engine.step_len = lens[len(passes) % len(lens)]
        passes += [step for _, step in engine.step()]
    return passes


def head_of(name, tags, plan, *, has_logprobs=False):
    return AnswerHead(
        route="chat",
        request_id="id",
        created=0,
        model="tiny",
        fingerprint="f",
        tokenizer=DIALECTS[name, tags].tokenizer,
        prompts=((1,),),
        choices_per_prompt=1,
        has_logprobs=has_logprobs,
        is_echoed=False,
        plan=plan,
    )


async def spell(head, passes):
    """The message that the stream's pieces add up to, and the reason."""
    message = {"content": "", "reasoning_content": "", "calls": []}
    reasons = []
    async for piece in pieces(Played(passes), head, usage=False, trace=False):
        [choice] = piece["choices"]
        delta = choice["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["calls"].append([call["id"], call["function"]["name"], ""])
            message["calls"][call["index"]][2] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message, reasons


@settings(max_examples=200, deadline=None)
@given(
    key=st.sampled_from([*DIALECTS]),
    parts=st.lists(st.sampled_from(TEXTS), max_size=5),
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    stop=st.sampled_from([(), ("STOP",), ("x", "é")]),
    is_open=st.booleans(),
    is_single=st.booleans(),
)
def test_a_stream_spells_the_whole_answer(key, parts, lens, stop, is_open, is_single):
    plan = DIALECTS[key].plan(TOOLS, is_open=is_open, is_single=is_single)
    passes = play(*key, "".join(parts), plan, lens, stop)
    head = head_of(*key, plan)
    generation = passes[-1].generation
    whole = head.whole([generation])["choices"][0]
    message, reasons = asyncio.run(spell(head, passes))
    assert message["content"] == (whole["message"]["content"] or "")
    assert message["reasoning_content"] == whole["message"].get("reasoning_content", "")
    calls = [
        [call["id"], call["function"]["name"], call["function"]["arguments"]]
        for call in whole["message"].get("tool_calls", ())
    ]
    assert message["calls"] == calls
    assert reasons == [whole["finish_reason"]]
    assert all(isinstance(json.loads(call[2]), dict) for call in calls)


@pytest.mark.parametrize("key", DIALECTS)
def test_where_passes_are_cut_changes_nothing(key):
    good = "\n".join(text for name, text, _ in GOOD if name == key[0])
    text = f"<think>a thought</think>\n\n{good} and é😀"
    plan = DIALECTS[key].plan(TOOLS)
    found = []
    for size in (1, 2, 3, 7, 50, 9000):
        passes = play(*key, text, plan, [size], ())
        found.append(asyncio.run(spell(head_of(*key, plan), passes)))
    assert all(one == found[0] for one in found)
    assert found[0][0]["calls"] or key[0] == "llama3"
