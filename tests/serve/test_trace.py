"""The trace extension: texts of tokens that, put together, are the text of the answer."""

import json

import pytest

from ar2diff.engine.generation import Pass, Reveal
from ar2diff.serve.trace import Trace
from ar2diff.testing.models import byte_tokenizer


def step(start, ids, block_idx=0):
    return Pass(block_idx=block_idx, pass_idx=0, start=start, token_ids=tuple(ids), reveals=(), text="")


def test_a_character_belongs_to_the_token_that_completes_it():
    trace = Trace(byte_tokenizer())
    first, second = "aé".encode(), "😀b".encode()
    ids = [*first, *second[:1]]
    assert trace.describe(step(0, ids))["token_texts"] == ["a", "", "é", ""]
    assert trace.describe(step(4, [*second[1:4], None], 1))["token_texts"] == ["", "", "😀", None]
    assert trace.describe(step(4, second[1:], 1))["token_texts"] == ["", "", "😀", "b"]
    assert trace.describe(step(8, b"!", 2))["token_texts"] == ["!"]


def test_what_follows_a_mask_is_read_on_its_own():
    trace = Trace(byte_tokenizer())
    e = "é".encode()
    assert trace.describe(step(0, [e[0], None, *b"ok"]))["token_texts"] == ["", None, "o", "k"]
    assert trace.describe(step(0, [*e, *b"ok"]))["token_texts"] == ["", "é", "o", "k"]


def test_a_pass_says_what_it_reveals_and_how_sure_it_is():
    reveal = Reveal(position=1, token_id=98, logprob=-0.25)
    got = Trace(byte_tokenizer()).describe(
        Pass(block_idx=3, pass_idx=2, start=0, token_ids=(97, 98, None), reveals=(reveal,), text="ab")
    )
    assert got == {
        "block_idx": 3,
        "pass_idx": 2,
        "start": 0,
        "token_ids": [97, 98, None],
        "token_texts": ["a", "b", None],
        "reveals": [{"position": 1, "token_id": 98, "logprob": -0.25}],
    }


@pytest.mark.parametrize("mode", ["diffusion", "verified", "ar"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_texts_of_an_answers_tokens_are_its_text(shared, mode, seed):
    asked = {"diffusion": {"mode": mode, "trace": True}, "seed": seed, "max_tokens": 40}
    choice = shared.chat(**asked).json()["choices"][0]
    texts = {}
    for described in choice["diffusion"]["passes"]:
        texts |= {described["start"] + idx: text for idx, text in enumerate(described["token_texts"])}
    joined = "".join(texts[position] or "" for position in sorted(texts))
    content = choice["message"]["content"].rstrip("\ufffd")  # a character that the last token leaves unfinished
    assert joined.startswith(content)
    assert len(content) > 5
    assert choice["diffusion"]["decode_s"] > 0


def test_settled_text_and_costs_are_the_same_with_and_without_a_trace(shared):
    def read(trace):
        response = shared.chat(stream=True, max_tokens=14, diffusion={"trace": trace})
        pieces = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert pieces.pop() == "[DONE]"
        return [json.loads(piece)["choices"][0] for piece in pieces]

    plain, traced = read(False), read(True)
    texts = [[c["delta"]["content"] for c in found if c["delta"].get("content")] for found in (plain, traced)]
    assert texts[0] == texts[1]
    assert [c["finish_reason"] for c in (plain[-1], traced[-1])] == ["length", "length"]
    assert set(traced[-1]["diffusion"]) - set(plain[-1]["diffusion"]) == {"prefill_s", "decode_s"}
    assert not [c for c in plain if "pass" in c.get("diffusion", {})]
    steps = [c["diffusion"]["pass"] for c in traced if "pass" in c.get("diffusion", {})]
    assert [c["delta"] for c in traced[1:-1]].count({}) == len(steps) - len(texts[1])
