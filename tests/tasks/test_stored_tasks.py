"""Claims about benchmarks whose problems lie in a published file."""

import gzip
import json
from pathlib import Path

import pytest

from ar2diff.errors import ConfigError
from ar2diff.tasks import math500
from ar2diff.tasks.gsm8k import read_number
from ar2diff.tasks.sandbox import check_sandbox
from ar2diff.tasks.table import TASKS

REPO = Path(__file__).resolve().parents[2]
ROWS = {
    "gsm8k": {"question": "How many?", "answer": "There are 3*4=<<3*4=12>>12 hens, -1.\n#### 1,012"},
    "math500": {
        "problem": r"Find $x$ with $2x = 1$.",
        "solution": r"Halve it: $\boxed{\frac{1}{2}}$.",
        "answer": r"\frac{1}{2}",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "humaneval": {
        "task_id": "HumanEval/7",
        "prompt": 'def add(a, b):\n    """Add."""\n',
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate): ...",
        "entry_point": "add",
    },
    "mbpp": {
        "task_id": 11,
        "text": "Write a function to add.",
        "code": "def add(a, b): return a + b",
        "test_list": ["assert add(1, 2) == 3"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "livecodebench": {
        "question_title": "A",
        "question_content": "Print the sum of the two numbers given.",
        "platform": "atcoder",
        "question_id": "abc301_a",
        "contest_id": "abc301",
        "contest_date": "2023-05-13T00:00:00",
        "starter_code": "class Solution: ...",
        "difficulty": "easy",
        "public_test_cases": "[]",
        "private_test_cases": "never opened",
        "metadata": "{}",
    },
    "medmcqa": {
        "id": "e9ad821a",
        "question": "Which of these is a bone?",
        "opa": "Femur",
        "opb": "Aorta",
        "opc": "Iris",
        "opd": "Dermis",
        "cop": 2,
        "choice_type": "single",
        "exp": None,
        "subject_name": "Anatomy",
        "topic_name": None,
    },
    "gpqa_diamond": {
        "Question": "Which particle is it?",
        "Correct Answer": "right",
        "Incorrect Answer 1": "wrong one",
        "Incorrect Answer 2": "wrong two",
        "Incorrect Answer 3": "wrong three",
        "Record ID": "rec06",
    },
}
ANSWERS = {
    "gsm8k": (["Answer: 1012", "So 3 and\nAnswer: $1,012.00", "It is 7. Then 1012"], ["Answer: 12", "1012 or 3", ""]),
    "math500": ([r"\boxed{1/2}", r"$\boxed{\dfrac12}$", "Answer: 0.5"], [r"\boxed{2}", "", r"\boxed{1/2"]),
    "medmcqa": (["Answer: C", "Since A is not,\nAnswer: (C) Iris", "C. Iris"], ["Answer: B", "Answer: Carotid", ""]),
}


def read(name, **changes):
    return TASKS[name].read_problem({**ROWS[name], **changes}, 4)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_with_the_published_columns_is_a_problem(name):
    problem = read(name)
    assert problem.task == name
    assert problem == read(name)
    assert problem.passage in problem.prompt_text
    assert read(name).id.startswith(name)
    question = (
        next(str(v) for k, v in ROWS[name].items() if k.lower() in ("question", "problem", "prompt", "text"))
        if name != "livecodebench"
        else ROWS[name]["question_content"]
    )
    assert question.strip() in problem.passage


@pytest.mark.parametrize("name", ROWS)
def test_a_row_without_its_columns_is_refused(name):
    with pytest.raises((KeyError, ValueError)):
        TASKS[name].read_problem({"id": 1, "task_id": "a/1", "question_id": 1}, 1)


@pytest.mark.parametrize("name", ANSWERS)
def test_right_answers_count_and_wrong_ones_do_not(name):
    problem, score = read(name), TASKS[name].score
    assert score(problem, problem.reference)
    right, wrong = ANSWERS[name]
    assert [score(problem, text) for text in right] == [True] * len(right)
    assert [score(problem, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_programs_are_run_in_a_sandbox_or_not_at_all(name, monkeypatch):
    check_sandbox.cache_clear()
    monkeypatch.setattr("ar2diff.tasks.sandbox.shutil.which", lambda _: None)
    with pytest.raises(ConfigError, match="sandbox"):
        TASKS[name].score(read(name), "def add(a, b): return a + b")
    check_sandbox.cache_clear()


def test_a_problem_without_public_tests_cannot_be_scored():
    with pytest.raises(ConfigError, match="no public tests"):
        TASKS["livecodebench"].score(read("livecodebench"), "print(1)")


def test_an_unpublished_answer_cannot_be_scored():
    problem = read("medmcqa", cop=-1)
    assert problem.reference == ""
    with pytest.raises(ConfigError, match="not published"):
        TASKS["medmcqa"].score(problem, "Answer: A")


def test_the_order_of_options_is_drawn_and_the_right_one_is_known():
    letters = set()
    for number in range(1, 30):
        problem = TASKS["gpqa_diamond"].read_problem(ROWS["gpqa_diamond"], number)
        letter = problem.reference[-1]
        letters.add(letter)
        assert f"{letter}. right" in problem.prompt_text
        assert TASKS["gpqa_diamond"].score(problem, f"Answer: {letter}")
    assert letters == set("ABCD")
    assert TASKS["gpqa_diamond"].hash_only


@pytest.mark.parametrize("name", ROWS)
def test_stored_problems_are_not_built_from_nothing(name):
    with pytest.raises(ConfigError, match="lie in a file"):
        TASKS[name].build_problems(split="eval", count=1)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"10,000", "10000", True),
        (r"\$32", "32", True),
        (r"90^\circ", "90", True),
        ("x^{2}", "x^2", True),
        (r"\frac{3}{6}", "0.5", True),
        ("1,2", "12", False),
        ("p - q", "q - p", False),
    ],
)
def test_final_answers_are_compared_as_mathematics_is_written(left, right, same):
    assert math500.is_same_answer(left, right) is same


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$1,234.50", "1234.50"),
        ("-3 cats", "-3"),
        ("a 5 then .5", "0.5"),
        ("none", "None"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        (r"\$1\,234", "1234"),
        ("1\u202f234", "1234"),
        ("\u22127", "-7"),
        ("10-12", "12"),
        ("3 or 1,2", "2"),
        ("12,5", "5"),
        ("1234,567", "567"),
        ("7.", "7"),
        ("٤٢", "42"),
        ("**1,012**.", "1012"),
    ],
)
def test_numbers_are_read_as_they_are_written_in_answers(text, value):
    assert str(read_number(text)) == value


@pytest.fixture(scope="module")
def shared_data():
    places = [folder / "shared" / "data" for folder in (REPO, REPO.parent, REPO.parent.parent)]
    found = [place for place in places if place.is_dir()]
    if not found:
        pytest.skip("the shared data folder is not beside the checkout")
    return found[0]


@pytest.mark.shared_data
def test_every_real_gsm8k_answer_scores_itself(shared_data):
    lines = (shared_data / "gsm8k" / "test_part1.jsonl").read_text().splitlines()
    problems = [TASKS["gsm8k"].read_problem(json.loads(line), n) for n, line in enumerate(lines, 1)]
    assert len({problem.id for problem in problems}) == len(problems)
    assert all(TASKS["gsm8k"].score(problem, problem.reference) for problem in problems)
    assert not any("<<" in problem.reference or "####" in problem.reference for problem in problems)


@pytest.mark.shared_data
def test_every_real_humaneval_row_is_a_problem(shared_data):
    with gzip.open(shared_data / "humaneval" / "HumanEval.jsonl.gz", "rt") as stream:
        problems = [TASKS["humaneval"].read_problem(json.loads(line), n) for n, line in enumerate(stream, 1)]
    assert [problem.id for problem in problems] == [f"humaneval/test/{n}" for n in range(164)]
