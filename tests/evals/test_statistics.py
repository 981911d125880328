"""Differences between modes are paired problem by problem, and their intervals are the bootstrap's."""

import dataclasses
import random

import numpy as np
import pytest
from test_scores_and_modes import answer

from ar2diff.evals.statistics import compare_answers


def build(pairs):
    answers = []
    for number, (left, right) in enumerate(pairs):
        for mode, grade in (("fast", left), ("ar", right)):
            cut = grade is None
            answers.append(
                dataclasses.replace(
                    answer(mode),
                    problem_id=f"p/{number}",
                    correct=bool(grade),
                    finish_reason="length" if cut else "stop",
                )
            )
    return answers


def test_a_difference_counts_only_problems_that_both_answered_to_the_end():
    found = compare_answers(build([(True, False), (True, True), (None, True), (False, None)]), "fast", "ar", "all")
    assert (found.difference, found.num_pairs, found.num_left_out) == (0.5, 2, 2)
    assert (found.only_mode, found.only_baseline) == (1, 0)


def test_equal_answers_differ_by_nothing_at_all():
    found = compare_answers(build([(True, True), (False, False)] * 10), "fast", "ar", "all")
    assert (found.difference, found.interval) == (0.0, (0.0, 0.0))


def test_without_pairs_nothing_is_known():
    assert compare_answers(build([(None, True)]), "fast", "ar", "all").interval == (-1.0, 1.0)


def test_the_interval_is_that_of_resampling_the_problems():
    chosen = random.Random(4)
    pairs = [(chosen.random() < 0.7, chosen.random() < 0.5) for _ in range(60)]
    found = compare_answers(build(pairs), "fast", "ar", "all")
    differences = np.array([int(left) - int(right) for left, right in pairs])
    generator = np.random.default_rng(0)
    means = [generator.choice(differences, len(differences)).mean() for _ in range(20_000)]
    assert found.interval == pytest.approx(tuple(np.percentile(means, (2.5, 97.5))), abs=0.02)
    assert found == compare_answers(build(pairs), "fast", "ar", "all")
