"""The length of a draft follows what passes cost and what was accepted, and never changes an answer."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ar2diff.engine import speculate
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.draft_plan import PassCosts, choose_draft_len
from ar2diff.engine.request import Request
from ar2diff.engine.verify import AcceptanceLog
from ar2diff.errors import ConfigError

FLAT = ((1, 1.0), (8, 1.0))
STEEP = ((1, 1.0), (8, 8.0))
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "verified.py"


def test_costs_lie_on_lines_between_and_beyond_the_measured_counts():
    costs = PassCosts({8: 11.0, 2: 2.0, 4: 3.0})
    assert [costs.of(rows) for rows in (1, 2, 3, 4, 6, 8, 9)] == [1.5, 2.0, 2.5, 3.0, 7.0, 11.0, 13.0]


@pytest.mark.parametrize(
    ("costs", "chances", "num_passes", "wanted"),
    [
        (FLAT, [0.9] * 7, 1, 7),
        (FLAT, [0.9] * 7, 7, 0),  # a pass a token: the draft costs what it saves
        (STEEP, [1.0] * 7, 1, 0),
        (FLAT, [0.5] * 7, 1, 0),  # two passes for less than two tokens
        (FLAT, [1.0, 0.9, 0.0, 1.0], 1, 2),  # nothing is kept behind a place that is never right
        (FLAT, [], 1, 0),
        (((1, 3.0), (2, 1.0), (8, 1.0)), [1.0], 7, 1),  # one token takes one pass, however many are allowed
        (((1, 1.0), (2, 0.1)), [0.9] * 7, 1, 1),  # the line falls below zero behind the second row
        (((1, 0.0), (8, 0.0)), [0.9] * 7, 1, 0),  # a clock that sees no pass
        (((1, 1.0), (2, 1.0), (8, 2.2)), [0.9] * 7, 1, 6),  # 4.69 / 1.8, 5.22 / 2.0 and 5.70 / 2.2
    ],
)
def test_the_length_with_the_most_tokens_a_second_is_chosen(costs, chances, num_passes, wanted):
    assert choose_draft_len(PassCosts(dict(costs)), chances, num_passes) == wanted


def test_chances_start_at_the_prior_follow_the_evidence_and_fade_back():
    log = AcceptanceLog()
    assert log.chances(2) == [pytest.approx(0.8)] * 2
    for _ in range(60):
        log.add(3, 1)
    first, second, third = log.chances(3)
    assert first > 0.97
    assert second < 0.1
    assert third == pytest.approx(0.8)  # never reached: no evidence
    for _ in range(300):
        log.add(0, 0)
    assert log.chances(3) == [pytest.approx(0.8, abs=0.01)] * 3


def ask(**settings):
    return Request(prompt_ids=(10, 11, 12, 13, 14), max_tokens=30, **settings)


@pytest.mark.parametrize("pass_seconds", [FLAT, STEEP, None])
@pytest.mark.parametrize("steps", [None, 3])
def test_greedy_answers_are_the_ar_answers_whatever_passes_cost(kit, pass_seconds, steps):
    for seed in range(3):
        engine = kit.engine(kit.loaded(seed=seed, block_size=8), pass_seconds=pass_seconds)
        ar = engine.generate(ask(mode="ar"))
        auto = engine.generate(ask(mode="verified", draft_len="auto", denoising_steps=steps))
        assert (auto.token_ids, auto.text, auto.finish_reason) == (ar.token_ids, ar.text, ar.finish_reason)
        if pass_seconds == STEEP:
            assert auto.num_forward_passes == ar.num_forward_passes


def test_greedy_answers_are_the_ar_answers_at_lengths_drawn_by_chance(kit, monkeypatch):
    draw, seen = random.Random(1), set()

    def choose(costs, chances, num_passes):
        seen.add(length := draw.randint(0, len(chances)))
        return length

    monkeypatch.setattr(speculate, "choose_draft_len", choose)
    for seed in range(6):
        engine = kit.engine(kit.loaded(seed=seed, block_size=8), pass_seconds=FLAT)
        requests = [ask(mode="verified", draft_len="auto", stop=stop) for stop in ((), ("e", "\x02"))]
        answers = [engine.generate(request) for request in requests] + engine.generate_many(requests)
        ar = [engine.generate(ask(mode="ar", stop=request.stop)).token_ids for request in requests]
        assert [answer.token_ids for answer in answers] == ar * 2
    assert seen == set(range(8))


def test_the_clock_has_no_part_in_sampled_answers(kit):
    loaded = kit.loaded(block_size=8)
    for seed in range(4):
        sampled = {"mode": "verified", "temperature": 1.0, "seed": seed, "draft_lanes": seed % 2}
        fixed = kit.engine(loaded).generate(ask(**sampled))
        for costs in (FLAT, STEEP):
            auto = kit.engine(loaded, pass_seconds=costs).generate(ask(draft_len="auto", **sampled))
            assert (auto.token_ids, auto.num_forward_passes) == (fixed.token_ids, fixed.num_forward_passes)


class Ticks:
    """A clock on which each forward takes as many seconds as it has rows, and the first of all 100 more."""

    def __init__(self):
        self.now, self.is_warm = 0.0, False

    def seconds(self):
        return self.now

    def watch(self, engine):
        def count(_, arguments, __):
            self.now += len(arguments[0]) + 100 * (not self.is_warm)
            self.is_warm = True

        engine.runner.register_forward_hook(count)
        engine._clock = self
        return engine


def test_costs_are_measured_once_as_the_least_of_several_passes(kit):
    clock = Ticks()
    engine = clock.watch(kit.engine(kit.loaded(block_size=8), row_multiple=1))
    costs = engine.pass_costs()
    assert [costs.of(rows) for rows in (1, 2, 4, 5, 8)] == [1.0, 2.0, 4.0, 5.0, 8.0]
    with torch.inference_mode():
        assert engine.pass_costs() is costs


def test_what_cannot_be_is_refused():
    for given in (((1, 1.0),), ((2, 1.0), (1, 1.0))):
        with pytest.raises(ConfigError, match="pass_seconds"):
            EngineConfig(pass_seconds=given)


def test_the_quick_benchmark_prints_its_document_last_and_equal_answers(tmp_path, library_dir):
    out = tmp_path / "verified.json"
    line = [sys.executable, str(SCRIPT), "--quick", "--library-dir", str(library_dir), "--out", str(out)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert set(document["ways"]) == {"ar", "draft of 7", "draft of 4, adaptive", "auto", "4, copies", "auto, copies"}
    if document["precision"].startswith("int8"):
        assert document["bars"][-1]["holds"]
