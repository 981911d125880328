"""Bits per token of reference answers are those of a plain forward; answers are graded and timed as asked."""

import dataclasses
import math

import pytest
import torch

from ar2diff.attention.ops import causal_attend
from ar2diff.engine.engine import Engine
from ar2diff.evals.likelihood import build_row, measure_bits, measure_parent_bits
from ar2diff.evals.modes import AR_MODE, PARENT_MODE, VERIFIED_MODE, build_modes
from ar2diff.evals.run import Contestants, answer_problems, build_request
from ar2diff.models.mask_token import grow_vocabulary
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.table import TASKS
from ar2diff.testing.models import END_ID, MASK_ID, always_model, tiny_diffusion, tiny_model

PROBLEMS = [
    Problem(
        id=f"structured/eval/{idx}",
        task="structured",
        domain="structured",
        messages=({"role": "user", "content": f"Write {text} as JSON."},),
        reference=f'["{text}"]',
    )
    for idx, text in enumerate(("one", "three", "eleven"))
]


def plain_causal_bits(model, *, hidden_id=None):
    """By the book: log softmax of a causal forward, over answer tokens and the end of turn."""
    nats, count = 0.0, 0
    for problem in PROBLEMS:
        prompt = model.tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True)
        ids = torch.tensor([*prompt, *model.tokenizer.encode(problem.reference), END_ID])
        with torch.no_grad():
            hidden = model.decoder(ids[None], torch.arange(len(ids))[None], causal_attend(model.config.softmax_scale))
            logits = model.decoder.logits(hidden[0]).double()
        if hidden_id is not None:
            logits[:, hidden_id] = -torch.inf
        losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        nats += float(losses[len(prompt) - 1 :].sum())
        count += len(ids) - len(prompt)
    return nats / count / math.log(2.0)


def test_the_ar_bits_are_those_of_a_plain_causal_forward():
    model = tiny_model(2)
    measured = measure_bits(model, tiny_diffusion(), PROBLEMS, seed=0)
    assert measured.ar_bits == pytest.approx(plain_causal_bits(model, hidden_id=MASK_ID), rel=1e-5)


def test_at_block_size_one_the_bound_is_the_ar_likelihood():
    measured = measure_bits(tiny_model(2), tiny_diffusion(block_size=1), PROBLEMS, seed=0)
    assert measured.bound_bits == pytest.approx(measured.ar_bits, rel=1e-6)


def test_at_larger_blocks_the_bound_is_another_number_and_depends_on_the_seed_alone():
    first, again, other = (measure_bits(tiny_model(2), tiny_diffusion(), PROBLEMS, seed=s) for s in (0, 0, 1))
    assert first == again
    assert first.bound_bits != other.bound_bits
    assert first.bound_bits != pytest.approx(first.ar_bits, rel=1e-3)


def test_a_parent_is_measured_causally_whatever_its_child_does():
    parent = tiny_model(2)
    blockwise = tiny_diffusion(shift_logits=False, clean_attention="block")
    expected = plain_causal_bits(parent, hidden_id=MASK_ID)
    assert measure_parent_bits(parent, blockwise, PROBLEMS) == pytest.approx(expected, rel=1e-5)


def test_a_parent_without_a_row_for_the_mask_is_measured_over_its_own_words():
    expected = plain_causal_bits(tiny_model(2))
    beyond = tiny_diffusion(mask_token_id=tiny_model(2).config.vocab_size)
    assert measure_parent_bits(tiny_model(2), beyond, PROBLEMS) == pytest.approx(expected, rel=1e-5)
    child = tiny_model(2)
    grow_vocabulary(child.decoder, dataclasses.replace(child.config, vocab_size=child.config.vocab_size + 1))
    assert measure_bits(child, beyond, PROBLEMS, seed=0).ar_bits == pytest.approx(expected, rel=1e-5)


def test_a_row_is_the_prompt_then_the_answer_then_the_end_of_turn():
    tokenizer = tiny_model(0).tokenizer
    row = build_row(PROBLEMS[0], tokenizer, row_id=7)
    prompt_len = int(row.prompt_lens[0])
    assert row.row_id == 7
    assert tokenizer.decode(row.token_ids[prompt_len:-1].tolist()) == '["one"]'
    assert row.token_ids[-1] == END_ID
    assert row.document_lens.tolist() == [len(row.token_ids)]


class CountingClock:
    def __init__(self):
        self.now = 0.0

    def seconds(self):
        self.now += 1.0
        return self.now


def contestants(*, ends=END_ID):
    # The parent always says one thing and the child another, so that it shows who was asked.
    return Contestants(
        parent=Engine(always_model(ord("p")), clock=CountingClock()),
        converted=Engine(always_model(ends, diffusion=tiny_diffusion()), clock=CountingClock()),
        tokenizer=tiny_model(0).tokenizer,
    )


def ask(mode, both, **options):
    (answer,) = answer_problems(both, PROBLEMS[:1], mode, **{"max_tokens": 4, "clock": CountingClock(), **options})
    return answer


def test_parent_and_child_are_asked_by_mode():
    assert ask(PARENT_MODE, contestants()).text == "pppp"
    assert ask(AR_MODE, contestants()).text == ""
    assert ask(VERIFIED_MODE, contestants(ends=ord("c"))).text == "cccc"


def test_an_answer_is_timed_by_the_clock_around_it():
    assert ask(AR_MODE, contestants()).seconds == 1.0


def test_a_truncated_answer_is_never_right(monkeypatch):
    always = dataclasses.replace(TASKS["structured"], score=lambda problem, text: True)
    monkeypatch.setitem(TASKS, "structured", always)
    cut, ended = ask(PARENT_MODE, contestants()), ask(AR_MODE, contestants())
    assert (cut.finish_reason, cut.is_truncated, cut.correct) == ("length", True, False)
    assert (ended.finish_reason, ended.is_truncated, ended.correct) == ("stop", False, True)


def test_the_modes_settings_reach_the_request():
    steps, threshold = build_modes("diffusion", (3,), (0.7,))
    first, second = (build_request(mode, (1, 2), 9) for mode in (steps, threshold))
    assert (first.mode, first.policy, first.denoising_steps, first.max_tokens) == ("diffusion", "top_k", 3, 9)
    assert (second.policy, second.policy_parameter, second.denoising_steps) == ("threshold", 0.7, None)
    assert first.temperature == second.temperature == 0.0


def test_a_batch_shares_its_time_and_keeps_the_order_of_its_problems():
    both = contestants(ends=ord("c"))
    answers = answer_problems(both, PROBLEMS, VERIFIED_MODE, max_tokens=4, clock=CountingClock())
    assert [answer.problem_id for answer in answers] == [problem.id for problem in PROBLEMS]
    assert [answer.seconds for answer in answers] == [pytest.approx(1 / 3)] * 3


def test_every_mode_takes_its_prompt_in_itself():
    both = contestants(ends=ord("c"))
    first, again = (ask(AR_MODE, both) for _ in range(2))
    assert both.converted.pages.num_kept > 0
    long = dataclasses.replace(PROBLEMS[0], messages=({"role": "user", "content": "x" * 100},))
    (one,), (other,) = (
        answer_problems(both, [long], mode, max_tokens=4, clock=CountingClock()) for mode in (AR_MODE, VERIFIED_MODE)
    )
    assert one.token_ids == other.token_ids
    assert first.token_ids == again.token_ids


def test_of_a_benchmark_whose_text_stays_unpublished_only_the_letter_is_kept(monkeypatch):
    monkeypatch.setitem(TASKS, "structured", dataclasses.replace(TASKS["structured"], hash_only=True))
    cut, same, other = ask(PARENT_MODE, contestants()), ask(PARENT_MODE, contestants()), ask(AR_MODE, contestants())
    assert (cut.text, cut.token_ids, cut.num_withheld, cut.num_tokens) == ("", (), 4, 4)
    assert cut.is_same(same)
    assert not cut.is_same(other)
    assert "pppp" not in str(cut.as_json())
