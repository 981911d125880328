"""Mathematical answers are compared by value, in a process that can be killed."""

import pytest

from ar2diff.errors import ConfigError
from ar2diff.tasks.math_check import MathChecker
from ar2diff.tasks.table import TASKS

pytest.importorskip("math_verify", reason="math-verify is not installed")
ROW = {"problem": "What?", "solution": "So.", "unique_id": "a/1"}


@pytest.fixture(scope="module")
def checker():
    checker = MathChecker()
    yield checker
    checker.close()


@pytest.mark.parametrize(
    ("right", "given", "equal"),
    [
        (r"$\frac{1}{2}$", "$0.5$", True),
        (r"$\frac{\sqrt{2}}{2}$", r"$\frac{1}{\sqrt{2}}$", True),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", True),
        ("$(1, 2)$", "$(2, 1)$", False),
        ("$3$", "$4$", False),
        ("$3$", "", False),
        ("$3$", r"$\frac{", False),
    ],
)
def test_values_are_compared_not_letters(checker, right, given, equal):
    assert checker.is_equal(right, given) is equal


def test_a_formula_that_takes_too_long_is_wrong_and_the_next_one_is_answered():
    checker = MathChecker(seconds=0.0)
    try:
        assert checker.is_equal("$9^{9^{9^{9}}}$", "$9^{9^{9^{8}}}$") is False
    finally:
        checker.close()
    again = MathChecker()
    try:
        assert again.is_equal("$1$", "$1$") is True
    finally:
        again.close()


def test_a_killed_worker_is_replaced(checker):
    assert checker.is_equal("$1$", "$1$")
    checker._process.kill()
    checker.is_equal("$1$", "$1$")
    assert checker.is_equal("$1$", "$1$")


def test_math_500_answers_may_be_written_in_another_form():
    problem = TASKS["math500"].read_problem({**ROW, "answer": r"\frac{\sqrt{3}}{3}"}, 1)
    assert TASKS["math500"].score(problem, r"So \boxed{\frac{1}{\sqrt{3}}}.")
    assert not TASKS["math500"].score(problem, r"So \boxed{\sqrt{3}}.")


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="ar2diff\\[eval\\]"):
        MathChecker().is_equal("$1$", "$2$")
