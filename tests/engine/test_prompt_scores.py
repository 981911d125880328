"""Log probabilities of a prompt: those of the AR path, in small pieces, with or without an answer."""

import math

import pytest
import torch

from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request
from ar2diff.engine.scores import ROWS_AT_ONCE
from ar2diff.errors import ContextOverflowError, GenerationError, RequestError

MODES = ["diffusion", "verified", "ar"]


def prompt(length, seed=0):
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 5, 40, 64])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_prompt_is_scored_by_the_ar_path_whatever_the_chunks(kit, mode, length, chunk):
    loaded = kit.loaded()
    request = Request(prompt_ids=prompt(length), max_tokens=0, mode=mode, prompt_logprobs=2, logit_bias={7: 50.0})
    got, want = kit.engine(loaded, prefill_chunk=chunk).generate(request), generate_reference(loaded, request)
    assert (got.token_ids, got.text, got.finish_reason, got.tokens_per_forward) == ((), "", "length", 0.0)
    assert got.prompt_logprobs[0] is None
    assert len(got.prompt_logprobs) == len(got.prompt_top_logprobs) == length
    assert got.prompt_logprobs[1:] == pytest.approx(want.prompt_logprobs[1:], abs=1e-4)
    for value, top in zip(got.prompt_logprobs[1:], got.prompt_top_logprobs[1:], strict=True):
        assert len(top) == 2
        assert top[0][1] >= top[1][1]
        assert value <= top[0][1] + 1e-5


def test_an_answer_scored_as_a_prompt_has_the_logprobs_it_was_generated_with(kit):
    engine = kit.engine(kit.loaded())
    first = engine.generate(Request(prompt_ids=prompt(6), max_tokens=12, mode="ar"))
    again = Request(prompt_ids=(*prompt(6), *first.token_ids), max_tokens=0, prompt_logprobs=1)
    got = engine.generate(again)
    assert got.prompt_logprobs[6:] == pytest.approx(first.logprobs, abs=1e-4)
    # Greedy: each token is the likeliest in its place.
    assert [top[0][0] for top in got.prompt_top_logprobs[6:]] == list(first.token_ids)


@pytest.mark.parametrize("mode", MODES)
def test_a_scored_prompt_has_the_same_answer(kit, mode):
    engine = kit.engine(kit.loaded(), prefill_chunk=4)
    asked = {"prompt_ids": prompt(11), "max_tokens": 9, "mode": mode}
    plain, scored = engine.generate(Request(**asked)), engine.generate(Request(prompt_logprobs=0, **asked))
    assert (scored.token_ids, scored.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert plain.prompt_logprobs == ()
    assert len(scored.prompt_logprobs) == 11
    assert set(scored.prompt_top_logprobs) == {()}


def test_logits_of_a_prompt_are_never_held_at_once(kit):
    engine = kit.engine(kit.loaded(max_seq_len=256))
    healthy, rows = engine.runner.logits, []

    def counted(hidden):
        rows.append(len(hidden))
        return healthy(hidden)

    engine.runner.logits = counted
    engine.generate(Request(prompt_ids=prompt(200), max_tokens=0, prompt_logprobs=0))
    assert sum(rows) == 199
    assert max(rows) == ROWS_AT_ONCE


def test_a_mask_in_the_prompt_has_probability_zero(kit):
    engine = kit.engine(kit.loaded())
    got = engine.generate(Request(prompt_ids=(5, kit.MASK, 6), max_tokens=0, prompt_logprobs=20))
    assert got.prompt_logprobs[1] == -math.inf
    assert math.isfinite(got.prompt_logprobs[2])
    assert kit.MASK not in dict(got.prompt_top_logprobs[1])


def test_a_prompt_that_fills_the_context_can_be_scored_but_not_answered(kit):
    engine = kit.engine(kit.loaded(max_seq_len=16))
    assert len(engine.generate(Request(prompt_ids=prompt(16), max_tokens=0, prompt_logprobs=0)).prompt_logprobs) == 16
    with pytest.raises(ContextOverflowError):
        engine.generate(Request(prompt_ids=prompt(16), max_tokens=1, prompt_logprobs=0))
    with pytest.raises(ContextOverflowError):
        engine.generate(Request(prompt_ids=prompt(17), max_tokens=0, prompt_logprobs=0))


def test_scoring_is_refused_where_it_means_nothing(kit):
    with pytest.raises(RequestError, match="max_tokens"):
        Request(prompt_ids=(1,), max_tokens=0)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        Request(prompt_ids=(1,), max_tokens=1, prompt_logprobs=21)
    for form in ({"shift": False}, {"clean": "block"}):
        with pytest.raises(RequestError, match="prompt_logprobs"):
            kit.engine(kit.loaded(**form)).generate(Request(prompt_ids=(1, 2), max_tokens=1, prompt_logprobs=0))
    scored = kit.engine(kit.loaded(converted=False)).generate(
        Request(prompt_ids=(1, 2), max_tokens=0, mode="ar", prompt_logprobs=0)
    )
    assert len(scored.prompt_logprobs) == 2


def test_logits_that_are_not_finite_fail_a_score(kit):
    engine = kit.engine(kit.loaded())
    engine.runner.logits = lambda hidden: torch.full((len(hidden), 262), math.nan)
    with pytest.raises(GenerationError, match="finite"):
        engine.generate(Request(prompt_ids=(1, 2, 3), max_tokens=0, prompt_logprobs=0))
