"""Log probabilities, penalties and prompt scoring over HTTP are the engine's."""

import json
from itertools import chain

import openai
import pytest

from ar2diff.engine.request import Request
from ar2diff.serve.logprobs import LOWEST, CompletionLogprobs, Scored, describe_chat

PROMPT = tuple(b"hello")


def direct(kit, *, chat=True, **fields):
    ids = PROMPT
    if chat:
        ids = tuple(
            kit.loaded.tokenizer.encode_chat([{"role": "user", "content": "hello"}], add_generation_prompt=True)
        )
    asked = {"max_tokens": 6, "temperature": 1.0, "seed": 11, "adaptive_draft": True, "copy_drafts": True, **fields}
    return kit.direct.generate(Request(prompt_ids=ids, **asked))


def as_ids(entries):
    """The byte tokenizer's ids are its bytes."""
    return [idx for entry in entries for idx in entry["bytes"]]


def streamed(response):
    pieces = [piece.removeprefix("data: ") for piece in response.text.split("\n\n") if piece]
    assert pieces.pop() == "[DONE]"
    return [json.loads(piece)["choices"][0] for piece in pieces]


@pytest.mark.parametrize(
    "field",
    [{"min_p": 0.01}, {"presence_penalty": 2}, {"frequency_penalty": -2}, {"repetition_penalty": 0.3}],
    ids=str,
)
def test_a_sampling_field_reaches_the_engine(shared, kit, field):
    name, value = next(iter(field.items()))
    asked = {"max_tokens": 20, "diffusion": {"mode": "ar"}}
    want = direct(kit, mode="ar", max_tokens=20, **{name: float(value)})
    assert shared.chat(**asked, **field).json()["choices"][0]["message"]["content"] == want.text
    assert want.text != direct(kit, mode="ar", max_tokens=20).text


@pytest.mark.parametrize("mode", ["diffusion", "verified", "ar"])
def test_chat_logprobs_are_the_engines_whole_and_streamed(shared, kit, mode):
    asked = {"logprobs": True, "top_logprobs": 2, "n": 2, "diffusion": {"mode": mode}}
    choices = shared.chat(**asked).json()["choices"]
    want = direct(kit, mode=mode, top_logprobs=2)
    content = choices[0]["logprobs"]["content"]
    assert as_ids(content) == list(want.token_ids)
    # Choices share a forward, so the last bits may differ from an answer alone.
    assert [entry["logprob"] for entry in content] == pytest.approx(list(want.logprobs), abs=1e-4)
    for entry, top in zip(content, want.top_logprobs, strict=True):
        assert as_ids(entry["top_logprobs"]) == [idx for idx, _ in top]
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx([lp for _, lp in top], abs=1e-4)
    pieces = streamed(shared.chat(**asked, stream=True))
    for idx in (0, 1):
        mine = [p["logprobs"]["content"] for p in pieces if p["index"] == idx and p.get("logprobs")]
        assert as_ids(chain.from_iterable(mine)) == as_ids(choices[idx]["logprobs"]["content"])
    assert shared.chat().json()["choices"][0]["logprobs"] is None


def test_completion_logprobs_hold_the_token_itself_and_offsets(shared, kit):
    want = direct(kit, chat=False, top_logprobs=1)
    got = shared.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert got["token_logprobs"] == list(want.logprobs)
    for token, logprob, top in zip(got["tokens"], got["token_logprobs"], got["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert 1 <= len(top) <= 2
    pieces = [p["logprobs"] for p in streamed(shared.complete(logprobs=1, stream=True)) if p["logprobs"]]
    for name in got:
        assert list(chain.from_iterable(piece[name] for piece in pieces)) == got[name]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echoed_prompt_is_scored(shared, kit, max_tokens):
    want = direct(kit, chat=False, max_tokens=max_tokens, prompt_logprobs=1, top_logprobs=1, temperature=0.0)
    asked = {"prompt": list(PROMPT), "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": max_tokens}
    got = shared.complete(**asked).json()
    choice = got["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"] == "hello" + want.text
    assert scores["tokens"][:5] == list("hello")
    assert scores["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert scores["token_logprobs"][:5] == list(want.prompt_logprobs)
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert len(scores["tokens"]) == 5 + max_tokens
    assert got["usage"]["completion_tokens"] == len(want.token_ids)


def test_an_answer_that_ends_at_once_still_has_an_entry_behind_the_prompt(shared, kit):
    end = kit.loaded.tokenizer.eos_token_ids[0]
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {str(end): 100}, "temperature": 0}
    scores = shared.complete(**asked).json()["choices"][0]["logprobs"]
    assert len(scores["tokens"]) == len(PROMPT) + 1
    assert scores["token_logprobs"][-1] is None
    assert None not in scores["token_logprobs"][1:-1]


def test_an_echo_without_logprobs_repeats_the_prompt_only(shared, kit):
    choice = shared.complete(echo=True, n=2).json()["choices"][1]
    assert choice["text"].startswith("hello")
    assert choice["logprobs"] is None
    assert shared.complete(echo=True, max_tokens=0).json()["choices"][0]["text"] == "hello"


def test_fields_that_need_another_are_refused_by_name(shared):
    for asked, param in [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "stream": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
    ]:
        got = shared.complete(**asked)
        assert (got.status_code, got.json()["error"]["param"]) == (400, param)
    assert shared.chat(top_logprobs=2).json()["error"]["param"] == "top_logprobs"


def test_an_impossible_log_probability_is_a_number_and_part_characters_keep_apart(kit):
    tokenizer = kit.loaded.tokenizer
    score = Scored(token_id=0xC3, logprob=float("-inf"), top=((0xA9, -1.0),))
    chat = describe_chat(tokenizer, [score])["content"][0]
    assert (chat["logprob"], chat["bytes"]) == (LOWEST, [0xC3])
    writer = CompletionLogprobs(tokenizer)
    found = writer.describe([score, Scored(token_id=0xA9, logprob=-0.5), Scored(token_id=65, logprob=-0.5)])
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "A"]
    assert found["top_logprobs"][0] == {"bytes:\\xa9": -1.0, "bytes:\\xc3": LOWEST}
    assert found["text_offset"] == [0, 0, 1]


def test_a_schema_holds_the_answer_and_the_public_client_reads_it(shared, kit):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none needed", max_retries=0) as client:
        asked = {"model": kit.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
        bias = {"32": -100, "10": -100, "13": -100, "9": -100}
        got = client.chat.completions.create(**asked, response_format=form, n=2, logprobs=True, logit_bias=bias)
        for choice in got.choices:
            assert set(json.loads(choice.message.content)) == {"ok"}
            assert choice.finish_reason == "stop"
            assert b"".join(bytes(t.bytes) for t in choice.logprobs.content).decode() == choice.message.content
        penalised = client.chat.completions.create(**asked, presence_penalty=1, frequency_penalty=0.5, seed=3)
        assert penalised.choices[0].message.content
        text = client.chat.completions.create(**asked, response_format={"type": "json_object"}, temperature=0)
        assert text.choices[0].message.content.lstrip().startswith("{")
        scored = client.completions.create(
            model=kit.name, prompt=list(PROMPT), echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        assert len(scored.choices[0].logprobs.token_logprobs) == len(PROMPT) + 1


def test_a_schema_that_cannot_be_kept_is_refused_by_name(shared):
    for schema in ({"type": "no such type"}, {"type": "array", "uniqueItems": True}, {"$ref": "#/nowhere"}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        got = shared.chat(response_format=form)
        assert got.status_code == 400, got.text
        assert got.json()["error"]["param"] == "response_format"
    assert shared.chat().status_code == 200
