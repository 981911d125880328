"""Sampled verified answers have the AR distribution, exact on both sides, whatever changes it.

The verified side is enumerated: every draw and every acceptance is taken each way that it can go, and the chances of
all ways to an answer are summed. Answers under real seeds then show that the draws have these chances.
"""

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
NUM_ANSWERS = 300
PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": -1.0, "repetition_penalty": 1.4}


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


class Way:
    """The random decisions of one answer: those asked for, then always the first that is possible."""

    def __init__(self, asked):
        self.asked, self.taken, self.chance = asked, [], 1.0
        self.others = []  # ways that part from this one behind what was asked for

    def decide(self, shares):
        possible = [idx for idx, share in enumerate(shares) if share > 0]
        if len(self.taken) < len(self.asked):
            choice = self.asked[len(self.taken)]
        else:
            choice = possible[0]
            self.others += [Way([*self.taken, other]) for other in possible[1:]]
        self.taken.append(choice)
        self.chance *= shares[choice] / sum(shares)
        return choice


class Mark:
    """A number drawn from [0, 1), known only by how it compares: times `factor`, with a number."""

    def __init__(self, way, factor=1.0):
        self.way, self.factor = way, factor

    def __mul__(self, factor):
        return Mark(self.way, self.factor * factor)

    def __ge__(self, bound):
        below = min(1.0, bound / self.factor)
        return bool(self.way.decide([below, 1.0 - below]))


def enumerate_answers(engine, monkeypatch, **asked):
    """The probability of every answer of an engine; a request's seed is the number of its way."""
    ways = [Way([])]

    def draw(sampler, weights_NV, purpose, places):
        return torch.tensor([ways[sampler._request.seed].decide(row) for row in weights_NV.tolist()])

    def uniform(sampler, purpose, place):
        return Mark(ways[sampler._request.seed])

    monkeypatch.setattr(Sampler, "draw", draw)
    monkeypatch.setattr(Sampler, "uniform", uniform)
    found, done = Counter(), 0
    while done < len(ways):
        batch = range(done, len(ways))
        answers = engine.generate_many([Request(seed=idx, **asked) for idx in batch])
        for idx, answer in zip(batch, answers, strict=True):
            found[answer.token_ids] += ways[idx].chance
            ways += ways[idx].others
        done = batch.stop
    return found


def check_equal(exact, found):
    assert sum(exact.values()) == pytest.approx(1.0)
    assert sum(found.values()) == pytest.approx(1.0)
    for answer in exact.keys() | found.keys():
        assert found[answer] == pytest.approx(exact.get(answer, 0.0), abs=1e-5)


@pytest.mark.parametrize(
    ("asked", "drafting"),
    [
        ({}, {}),
        ({"temperature": 0.6}, {"draft_len": 1}),
        ({"top_k": 1}, {}),
        ({"top_p": 0.6}, {"draft_lanes": 1}),
        ({"min_p": 0.7}, {}),
        ({"frequency_penalty": 1.5}, {}),
        ({"presence_penalty": -1.0}, {"adaptive_draft": True}),
        ({"repetition_penalty": 1.4}, {}),
        ({"logit_bias": {ord("a"): 0.8}}, {"denoising_steps": 2}),
        (PENALTIES, {"draft_lanes": 3}),
        ({"min_p": 0.4} | PENALTIES, {}),
        ({"prompt_ids": (97, 98, 97, 97)}, {"copy_drafts": True}),
        ({"prompt_ids": (97, 98, 98, 97), "top_p": 0.9} | PENALTIES, {"copy_drafts": True, "draft_len": 1}),
        ({"top_p": 0.7, "top_k": 2, "logit_bias": {ord("b"): -0.5}} | PENALTIES, {"denoising_steps": 3}),
    ],
)
def test_verified_answers_over_a_few_letters_have_the_exact_ar_distribution(kit, monkeypatch, asked, drafting):
    loaded = kit.loaded()
    request = {"prompt_ids": PROMPT, "max_tokens": LEN, "constraint": Constraint.regex("[ab]{4}"), "temperature": 1.2}
    request |= asked
    exact = ar_distribution(loaded, Request(mode="ar", **request), (ord("a"), ord("b")))
    found = enumerate_answers(kit.engine(loaded), monkeypatch, mode="verified", **drafting, **request)
    check_equal(exact, found)


def test_a_vocabulary_narrowed_by_bias_has_the_exact_distribution_too(kit, monkeypatch):
    loaded = kit.loaded()
    letters = (ord("x"), ord("y"), ord("z"))
    request = {"prompt_ids": PROMPT, "max_tokens": LEN, "temperature": 1.0, "frequency_penalty": 0.8}
    request |= {"logit_bias": dict.fromkeys(letters, 60.0), "min_p": 0.1}
    exact = ar_distribution(loaded, Request(mode="ar", **request), letters)
    found = enumerate_answers(kit.engine(loaded), monkeypatch, mode="verified", draft_lanes=1, **request)
    check_equal(exact, found)


def chi_square(counts, expected):
    """The statistic and its degrees of freedom; rare answers count as one."""
    rare = [answer for answer, value in expected.items() if value < 5]
    cells = [(counts[answer], value) for answer, value in expected.items() if value >= 5]
    rest = (sum(counts[answer] for answer in rare), sum(expected[answer] for answer in rare))
    cells += [rest] if rest[1] > 1e-9 else []
    return sum((seen - value) ** 2 / value for seen, value in cells), len(cells) - 1


@pytest.mark.parametrize(("steps", "lanes"), [(None, 0), (None, 3), (3, 0)])
def test_real_seeds_draw_answers_with_their_exact_chances(kit, steps, lanes):
    loaded = kit.loaded()
    engine = kit.engine(loaded)
    request = {"prompt_ids": PROMPT, "max_tokens": LEN, "constraint": Constraint.regex("[ab]{4}"), "temperature": 1.2}
    exact = ar_distribution(loaded, Request(mode="ar", **request), (ord("a"), ord("b")))
    drafting = {"denoising_steps": steps, "draft_lanes": lanes, "block_size": 4}
    requests = [Request(mode="verified", seed=seed, **drafting, **request) for seed in range(NUM_ANSWERS)]
    counts = Counter(answer.token_ids for answer in engine.generate_many(requests))
    assert all(exact[answer] > 0 for answer in counts)
    statistic, freedom = chi_square(counts, {answer: NUM_ANSWERS * chance for answer, chance in exact.items()})
    # Five standard deviations above the mean of the chi-square distribution.
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize(
    ("mode", "drafting"),
    [
        ("ar", {}),
        ("diffusion", {}),
        ("diffusion", {"fused_commit": True}),
        ("verified", {}),
        ("verified", {"draft_lanes": 3}),
        ("verified", {"denoising_steps": 2}),
        ("verified", {"copy_drafts": True}),
    ],
)
def test_no_random_number_serves_twice_in_an_answer(kit, monkeypatch, mode, drafting):
    seen, healthy = [], Sampler.uniform

    def uniform(sampler, purpose, place):
        seen.append((purpose, *place, healthy(sampler, purpose, place)))
        return seen[-1][-1]

    monkeypatch.setattr(Sampler, "uniform", uniform)
    engine = kit.engine(kit.loaded(block_size=8, sharp=0.3))
    asked = {"prompt_ids": PROMPT, "max_tokens": 24, "temperature": 1.0, "logit_bias": {kit.END: -100.0}}
    engine.generate(Request(mode=mode, **drafting, **asked))
    assert len(seen) >= 24
    assert len(set(seen)) == len(seen)
    assert len({number for *_, number in seen}) == len(seen)
