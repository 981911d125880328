"""Prompts without a right answer: two forms of rows, one problem each, and every fault of a row is named."""

import json
from pathlib import Path

import pytest

from ar2diff.data.config import EvaluationShare
from ar2diff.data.evaluation_items import load_problems
from ar2diff.errors import DataError
from ar2diff.tasks.table import TASKS

REPO = Path(__file__).resolve().parents[2]
QUESTION = {"question_id": 81, "category": "writing", "turns": ["First,\n\nof two parts.", "Then this."]}


def load(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_problems(EvaluationShare(task="prompts", count=1000, source=f"local:{path}"), {})


def test_a_question_asks_its_first_turn_in_the_domain_of_its_category(tmp_path):
    (problem,) = load(tmp_path, QUESTION)
    assert problem.messages == ({"role": "user", "content": "First,\n\nof two parts."},)
    assert (problem.domain, problem.task, problem.id) == ("writing", "prompts", "prompts/question/81")
    assert (problem.passage, problem.reference, problem.tests) == (problem.prompt_text, "", "")


def test_plain_prompts_have_the_domain_that_they_name_or_the_tasks(tmp_path):
    problems = load(
        tmp_path, {"prompt": "One?", "domain": "maths"}, {"prompt": "Two?"}, {"prompt": "3?", "domain": None}
    )
    assert [problem.domain for problem in problems] == ["maths", "prompts", "prompts"]
    assert [problem.prompt_text for problem in problems] == ["One?", "Two?", "3?"]


def test_ids_follow_the_content_not_the_place_in_a_file(tmp_path):
    one, two = load(tmp_path, {"prompt": "One?"}, {"prompt": "Two?"})
    assert one.id != two.id
    assert load(tmp_path, {"prompt": "Two?"}) == [two]


def test_nothing_is_right_or_wrong():
    assert TASKS["prompts"].score is None
    assert [name for name, task in TASKS.items() if task.score is None] == ["prompts"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "neither `turns`"),
        ({"prompt": " \n"}, "'prompt' holds no text"),
        ({"prompt": ["x"]}, "'prompt' holds no text"),
        ({"prompt": "x", "domain": ""}, "'domain' holds no text"),
        ({"prompt": "x", "domain": "all"}, "cannot name a domain"),
        ({"prompt": "x", "domain": "two\nlines"}, "cannot name a domain"),
        ({**QUESTION, "turns": []}, "no list of texts"),
        ({**QUESTION, "turns": "First"}, "no list of texts"),
        ({**QUESTION, "turns": None}, "no list of texts"),
        ({**QUESTION, "turns": ["First", ""]}, "turn 2 "),
        ({**QUESTION, "turns": [7]}, "turn 1 "),
        ({**QUESTION, "category": 3}, "'category' holds no text"),
        ({**QUESTION, "question_id": True}, "'question_id'"),
        ({**QUESTION, "question_id": ""}, "'question_id'"),
        ({"turns": ["x"], "category": "writing"}, "no column 'question_id'"),
        ({"turns": ["x"], "question_id": 1}, "no column 'category'"),
        ({**QUESTION, "category": "maths"}, "a second problem prompts/question/81"),
    ],
)
def test_a_faulty_row_is_named_with_its_fault(tmp_path, row, said):
    with pytest.raises(DataError) as caught:
        load(tmp_path, QUESTION, row)
    assert caught.value.problem.startswith("rows.jsonl, row 2: ")
    assert said in caught.value.problem


def test_the_same_prompt_twice_is_refused(tmp_path):
    with pytest.raises(DataError, match="row 2: a second problem prompts/sha256/"):
        load(tmp_path, {"prompt": "One?"}, {"prompt": "One? ", "domain": "other"})


@pytest.fixture(scope="module")
def questions():
    places = [folder / "shared" / "data" / "prompts" for folder in (REPO, REPO.parent, REPO.parent.parent)]
    found = [place / "mt_bench_questions.jsonl" for place in places if place.is_dir()]
    if not found:
        pytest.skip("the shared data folder is not beside the checkout")
    return found[0]


@pytest.mark.shared_data
def test_every_real_question_is_a_problem_of_eight_domains(questions):
    problems = load_problems(EvaluationShare(task="prompts", count=1000, source=f"local:{questions}"), {})
    assert len(problems) == 80
    assert {sum(p.domain == domain for p in problems) for domain in {p.domain for p in problems}} == {10}
    assert len({problem.domain for problem in problems}) == 8
