"""Answers are counted as the table says: intervals, agreement, truncation, speed."""

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ar2diff.errors import ConfigError
from ar2diff.evals.modes import build_modes
from ar2diff.evals.report import EvalReport
from ar2diff.evals.scores import Answer, score_answers, wilson_interval


def answer(
    mode="ar", problem="p1", *, domain="structured", ids=(1, 2), correct=True, seconds=1.0, passes=2, end="stop"
):
    return Answer(
        mode=mode,
        problem_id=problem,
        domain=domain,
        text="text",
        token_ids=tuple(ids),
        finish_reason=end,
        correct=correct,
        num_forward_passes=passes,
        seconds=seconds,
    )


ANSWERS = (
    answer(seconds=2.0),
    answer(problem="p2", domain="math", ids=(3,), correct=False, seconds=1.0),
    answer("fast", seconds=0.5, passes=1),
    answer("fast", "p2", domain="math", ids=(4, 5, 6, 7), correct=False, seconds=0.5, end="length"),
)


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    # Newcombe, 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_wilson_interval_has_its_published_values(right, trials, low, high):
    assert wilson_interval(right, trials) == pytest.approx((low, high), abs=2e-4)


@given(trials=st.integers(1, 500), data=st.data())
def test_the_interval_holds_its_share_lies_in_0_to_1_and_mirrors(trials, data):
    right = data.draw(st.integers(0, trials))
    low, high = wilson_interval(right, trials)
    assert 0.0 <= low <= right / trials + 1e-12
    assert right / trials - 1e-12 <= high <= 1.0
    assert wilson_interval(trials - right, trials) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_without_trials_nothing_is_known():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_each_mode_has_a_score_by_domain_and_one_of_all():
    scores = {(score.mode, score.domain): score for score in score_answers(ANSWERS)}
    assert list(scores) == [
        ("ar", "structured"),
        ("ar", "math"),
        ("ar", "all"),
        ("fast", "structured"),
        ("fast", "math"),
        ("fast", "all"),
    ]
    overall = scores["fast", "all"]
    assert (overall.num_problems, overall.num_correct, overall.num_truncated, overall.accuracy) == (2, 1, 1, 1.0)
    assert overall.equal_share == 0.5
    assert overall.tokens_per_s == 6 / 1.0
    assert overall.tokens_per_forward == 6 / 3
    assert scores["ar", "all"].equal_share == 1.0


def test_without_an_ar_mode_nothing_is_equal_to_it():
    (score, _) = score_answers([answer("fast")])
    assert score.equal_share is None


def test_answers_without_time_or_passes_have_no_speed():
    score = score_answers([answer(seconds=0.0, passes=0)])[-1]
    assert (score.tokens_per_s, score.tokens_per_forward) == (0.0, 0.0)


@pytest.fixture
def report():
    return EvalReport(answers=ANSWERS, bits_per_token={"ar": 1.25}, about={"settings": {"steps": [1]}})


def show(report, *, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(report.table())
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_the_table_has_one_row_a_mode_and_every_column(report):
    title, *headings, first, second = show(report)
    assert title == ["Converted", "model", "beside", "its", "AR", "parent"]
    assert headings == [
        ["structured", "math", "same", "cut", "bits/", "tokens", "tokens"],
        ["mode", "right", "right", "as", "AR", "off", "token", "per", "s", "x", "AR", "/", "pass"],
    ]
    assert first == ["ar", "1/1", "0/1", "100%", "0", "1.250", "1.0", "1.00", "0.75"]
    assert second == ["fast", "1/1", "0/0", "50%", "1", "-", "6.0", "6.00", "2.00"]


def test_a_table_of_two_domains_fits_eighty_columns_without_a_cut_word():
    names = [mode.name for mode in build_modes("parent,ar,verified,diffusion", (1, 16), (0.95,))]
    domains = ("structured", "reasoning")
    answers = tuple(
        answer(name, f"{domain}{idx}", domain=domain, ids=range(100), seconds=0.1)
        for name in names
        for domain in domains
        for idx in range(12)
    )
    bits = dict.fromkeys(names, 1.123)
    lines = show(EvalReport(answers=answers, bits_per_token=bits, about={}))
    assert lines == show(EvalReport(answers=answers, bits_per_token=bits, about={}), width=200)
    assert "…" not in str(lines)
    assert lines[-1][-6:] == ["100%", "0", "1.123", "1000.0", "1.00", "50.00"]


def test_a_report_without_an_ar_mode_leaves_its_columns_empty():
    report = EvalReport(answers=(answer("fast"), answer("other", domain="math")), bits_per_token={}, about={})
    assert ["fast", "1/1", "-", "-", "0", "-", "2.0", "-", "1.00"] in show(report)


def test_a_report_survives_json(report):
    stored = json.loads(json.dumps(report.as_json()))
    samples = [json.loads(json.dumps(one.as_json())) for one in report.answers]
    assert EvalReport.from_json(stored, samples) == report
    assert stored["speedup_over_ar"] == {"ar": 1.0, "fast": 6.0}
    assert stored["scores"][0]["interval"] == list(report.scores[0].interval)


def test_modes_are_read_in_order_and_diffusion_stands_for_all_its_settings():
    modes = build_modes("verified, parent,diffusion", (1, 4), (0.9,))
    assert [mode.name for mode in modes] == [
        "verified",
        "parent",
        "diffusion, steps=1",
        "diffusion, steps=4",
        "diffusion, threshold=0.9",
    ]
    assert [mode.parent for mode in modes] == [False, True, False, False, False]
    assert modes[3].denoising_steps == 4
    assert modes[4].confidence_threshold == 0.9


def test_a_mode_that_is_named_twice_is_asked_once():
    assert len(build_modes("ar,ar,diffusion", (2, 2), (0.9, 0.9))) == 3


@pytest.mark.parametrize(
    ("names", "steps", "thresholds"),
    [("fast", (), ()), ("", (), ()), ("diffusion", (), ()), ("diffusion", (0,), ()), ("diffusion", (), (0.0,))],
)
def test_modes_that_cannot_be_are_refused(names, steps, thresholds):
    with pytest.raises(ConfigError):
        build_modes(names, steps, thresholds)


def test_a_truncated_answer_knows_it():
    assert replace(ANSWERS[0], finish_reason="length").is_truncated
    assert not ANSWERS[0].is_truncated
