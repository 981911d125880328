"""Which drafts are kept, and that sampled verification keeps the AR distribution."""

from collections import Counter

import pytest
import torch

from ar2diff.engine.request import Request
from ar2diff.engine.sampling import Sampler
from ar2diff.engine.verify import AcceptanceLog, accept_greedy, accept_sampled


def test_greedy_acceptance_stops_at_the_first_difference():
    assert accept_greedy([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accept_greedy([1, 2, 3], [1, 9, 3, 4]) == 1
    assert accept_greedy([], [7]) == 0


def normal(weights):
    return weights / weights.sum()


@pytest.mark.parametrize("is_drawn", [True, False])
def test_one_sampled_position_has_exactly_the_ar_distribution(is_drawn):
    generator = torch.Generator().manual_seed(4)
    draft, ar = (normal(torch.rand(5, generator=generator, dtype=torch.float64) ** 3) for _ in range(2))
    grid = [(idx + 0.5) / 4000 for idx in range(4000)]
    mass = torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        chance = float(draft[token]) if is_drawn else float(token == 2)
        probs = draft[None] if is_drawn else None
        outcomes = [accept_sampled([token], probs, torch.stack((ar, ar)), [mark]) for mark in grid]
        kept = sum(count for count, _ in outcomes) / len(grid)
        mass[token] += chance * kept
        rest = next((weights for count, weights in outcomes if count == 0), None)
        if rest is not None:
            mass += chance * (1 - kept) * normal(rest)
    torch.testing.assert_close(mass, ar, atol=1e-3, rtol=0)


def test_a_draft_from_the_ar_distribution_itself_is_always_kept():
    probs = normal(torch.rand(3, 5, dtype=torch.float64).T).T
    probs = probs / probs.sum(1, keepdim=True)
    count, _ = accept_sampled([0, 1], probs[:2], probs, [0.999, 0.999])
    assert count == 2


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("lanes", [0, 2])
def test_sampled_verified_answers_have_the_distribution_of_ar_answers(kit, steps, lanes):
    loaded = kit.loaded(sharp=1.5)
    engine = kit.engine(loaded)
    asked = {"prompt_ids": (10, 11, 12), "max_tokens": 5, "temperature": 1.5, "top_k": 2}
    drafting = {"denoising_steps": steps, "draft_lanes": lanes}
    num = 100
    ar = Counter(engine.generate(Request(mode="ar", seed=seed, **asked)).token_ids for seed in range(num))
    verified = Counter(
        engine.generate(Request(mode="verified", seed=seed + 5000, **drafting, **asked)).token_ids
        for seed in range(num)
    )
    # At every depth the share of each prefix agrees within four standard errors.
    for depth in (1, 2, 3):
        a, v = Counter(), Counter()
        for counts, short in ((ar, a), (verified, v)):
            for ids, seen in counts.items():
                short[ids[:depth]] += seen
        for prefix in a | v:
            assert abs(a[prefix] - v[prefix]) <= 4 * (a[prefix] + v[prefix]) ** 0.5


def test_the_log_counts_by_offset_and_steers_the_draft():
    log = AcceptanceLog()
    assert log.suggest_len(7) == 7
    assert log.likely_lens(3, 2) == [0, 3]
    log.add(3, 1)
    log.add(3, 1)
    log.add(0, 0)
    assert (log.drafted_by_offset, log.accepted_by_offset) == ([2, 2, 2], [2, 0, 0])
    assert log.reached_by_offset == [2, 2, 0]
    assert log.suggest_len(7) == 3
    assert log.likely_lens(3, 1) == [1]
    assert log.likely_lens(3, 0) == []
    log.add(1, 1)  # all of a short draft: the second place was not tried
    assert (log.accepted_by_offset, log.reached_by_offset) == ([3, 0, 0], [3, 2, 0])


def sampler(**asked):
    return Sampler(Request(prompt_ids=(1,), max_tokens=1, **asked), [3], device=torch.device("cpu"))


def test_confidence_is_the_raw_probability_whatever_the_temperature():
    logits = torch.tensor([[1.0, 2.0, 0.5, 9.0]])
    wanted = float(logits[0, :3].log_softmax(0)[1])
    for temperature in (0.0, 0.01):
        picks = sampler(temperature=temperature).choose(sampler().prepare(logits.clone(), []), [(0, 0)])
        assert [pick.token_id for pick in picks] == [1]
        assert picks[0].logprob == pytest.approx(wanted)


def test_ties_go_to_the_lowest_id_and_entropy_is_in_nats():
    [pick] = sampler().choose(sampler().prepare(torch.zeros(1, 4), []), [(0, 0)], entropy=True)
    assert pick.token_id == 0
    assert pick.entropy == pytest.approx(torch.tensor(3.0).log().item())


def test_top_k_then_top_p_limit_the_distribution():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs = sampler(temperature=1.0, top_k=3).probabilities(logits)[0]
    torch.testing.assert_close(probs, torch.tensor([4.0, 3.0, 2.0, 0.0]).double() / 9)
    # 4/9 < 0.5 keeps the second; 7/9 does not reach the third.
    probs = sampler(temperature=1.0, top_k=3, top_p=0.5).probabilities(logits)[0]
    torch.testing.assert_close(probs, torch.tensor([4.0, 3.0, 0.0, 0.0]).double() / 7)
    # The limit counts what top_k has left: 0.4 of all is 4/9 of it.
    probs = sampler(temperature=1.0, top_k=3, top_p=0.42).probabilities(logits)[0]
    assert probs.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_nucleus_that_is_reached_exactly_takes_no_more():
    for top_p, wanted in ((0.5, [1.0, 0.0, 0.0]), (0.75, [2 / 3, 1 / 3, 0.0]), (0.76, [0.5, 0.25, 0.25])):
        probs = sampler(temperature=1.0, top_p=top_p)._limit(torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64))
        assert probs[0].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("mark", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 5e-324])
def test_the_outermost_numbers_draw_what_has_weight_too(monkeypatch, mark, scale):
    monkeypatch.setattr(Sampler, "uniform", lambda *_: mark)
    weights = scale * torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    first, second = sampler().draw(weights, "token", [(0, 0)] * 2).tolist()
    assert first == (1 if mark == 0.0 else 3)
    assert second == 2


def test_draws_follow_the_weights_and_never_pick_weight_zero():
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]], dtype=torch.float64)
    ids = [int(sampler(seed=seed).draw(weights, "token", [(0, 0)])) for seed in range(800)]
    assert set(ids) == {1, 3}
    assert ids.count(3) == pytest.approx(600, abs=50)
