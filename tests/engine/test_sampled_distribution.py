"""Sampled verified answers follow the AR distribution, computed exactly, whatever changes it."""

import itertools
import math
from collections import Counter

import pytest
import torch

from ar2diff.engine.constraint import Constraint
from ar2diff.engine.reference import whole_logits
from ar2diff.engine.request import Request
from ar2diff.engine.sampling import Sampler

PROMPT, LEN = (10, 11, 12), 4
NUM_ANSWERS = 150


@torch.inference_mode()
def ar_distribution(loaded, request, alphabet):
    """The probability of every answer over `alphabet`, by the chain rule over whole causal forwards."""
    sampler = Sampler(request, [257, 260, 261], device=torch.device("cpu"))
    found, allowed = {}, torch.zeros(262, dtype=torch.bool)
    allowed[list(alphabet)] = True
    for answer in itertools.product(alphabet, repeat=LEN):
        chance = 1.0
        for idx, token_id in enumerate(answer):
            before = list(answer[:idx])
            logits = sampler.prepare(whole_logits(loaded, request, before, [], 1)[-1:], [before])
            if request.constraint is not None:
                sampler.restrict(logits, [allowed])
            chance *= float(sampler.probabilities(logits)[0, token_id])
        found[answer] = chance
    return found


def chi_square(counts, expected):
    """The statistic and its degrees of freedom; rare answers count as one."""
    rare = [answer for answer, value in expected.items() if value < 5]
    cells = [(counts[answer], value) for answer, value in expected.items() if value >= 5]
    rest = (sum(counts[answer] for answer in rare), sum(expected[answer] for answer in rare))
    cells += [rest] if rest[1] > 1e-9 else []
    return sum((seen - value) ** 2 / value for seen, value in cells), len(cells) - 1


PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": -1.0, "repetition_penalty": 1.4}


@pytest.mark.parametrize(
    ("asked", "steps", "lanes"),
    [
        ({}, None, 0),
        ({"temperature": 0.6}, None, 0),
        ({"top_k": 1}, None, 0),
        ({"top_p": 0.6}, None, 0),
        ({"min_p": 0.7}, None, 0),
        ({"frequency_penalty": 1.5}, None, 0),
        ({"presence_penalty": -1.0}, None, 0),
        ({"repetition_penalty": 1.4}, None, 0),
        ({"logit_bias": {ord("a"): 0.8}}, None, 0),
        (PENALTIES, None, 3),
        ({"min_p": 0.4} | PENALTIES, None, 0),
        ({"top_p": 0.7, "top_k": 2, "logit_bias": {ord("b"): -0.5}} | PENALTIES, 3, 0),
    ],
)
def test_verified_answers_over_a_few_letters_have_the_exact_ar_distribution(kit, asked, steps, lanes):
    loaded = kit.loaded()
    engine = kit.engine(loaded)
    constraint = Constraint.regex("[ab]{4}")
    request = {"prompt_ids": PROMPT, "max_tokens": LEN, "constraint": constraint, "temperature": 1.2}
    request |= asked
    exact = ar_distribution(loaded, Request(mode="ar", **request), (ord("a"), ord("b")))
    assert sum(exact.values()) == pytest.approx(1.0)
    drafting = {"denoising_steps": steps, "draft_lanes": lanes, "block_size": 4}
    requests = [Request(mode="verified", seed=seed, **drafting, **request) for seed in range(NUM_ANSWERS)]
    counts = Counter(answer.token_ids for answer in engine.generate_many(requests))
    assert all(exact[answer] > 0 for answer in counts)
    statistic, freedom = chi_square(counts, {answer: NUM_ANSWERS * chance for answer, chance in exact.items()})
    # Five standard deviations above the mean of the chi-square distribution.
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1))


def test_a_vocabulary_narrowed_by_bias_has_the_exact_distribution_too(kit):
    loaded = kit.loaded()
    engine = kit.engine(loaded)
    letters = (ord("x"), ord("y"), ord("z"))
    request = {"prompt_ids": PROMPT, "max_tokens": LEN, "temperature": 1.0, "frequency_penalty": 0.8}
    request |= {"logit_bias": dict.fromkeys(letters, 60.0), "min_p": 0.1}
    exact = ar_distribution(loaded, Request(mode="ar", **request), letters)
    counts = Counter(
        engine.generate(Request(mode="verified", seed=seed, draft_lanes=1, **request)).token_ids
        for seed in range(NUM_ANSWERS)
    )
    statistic, freedom = chi_square(counts, {answer: NUM_ANSWERS * chance for answer, chance in exact.items()})
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1))
