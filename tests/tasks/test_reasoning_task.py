"""Claims about the reasoning task on top of the reasoning-gym library."""

import re
import subprocess
import sys

import pytest

from ar2diff.errors import ConfigError
from ar2diff.tasks import reasoning
from ar2diff.tasks.reasoning import GYM_TASKS, build_problems, score
from ar2diff.tasks.table import TASKS, find_task


def test_references_are_right_and_answers_of_others_are_wrong():
    problems = build_problems(split="eval", count=50)
    for problem in problems:
        assert score(problem, problem.reference), problem
        assert not score(problem, "Answer: no such answer")
        assert not score(problem, problem.reference.rpartition("Answer:")[2])


def test_the_last_answer_line_counts():
    problem = build_problems(split="train", count=1)[0]
    right = problem.reference.rpartition("Answer: ")[2]
    assert score(problem, f"Answer: 12345\nNo.\nAnswer: {right}")
    assert not score(problem, f"Answer: {right}\nNo.\nAnswer: 12345")


def test_worked_sums_are_correct_line_by_line():
    for problem in build_problems(split="train", count=100)[:: len(GYM_TASKS)]:
        steps = problem.reference.splitlines()[:-1]
        for step in steps:
            left, right = step.split(" = ")
            assert re.fullmatch(r"-?\d+ [+-] \d+", left)
            first, sign, second = left.split()
            assert int(first) + int(sign + second) == int(right)
        assert problem.reference.endswith(f"Answer: {steps[-1].split(' = ')[1]}")


def test_splits_and_ranges_are_reproducible_and_apart():
    train = build_problems(split="train", count=20)
    assert build_problems(split="train", count=5, start=10) == train[10:15]
    held_out = build_problems(split="eval", count=20)
    assert not {p.id for p in train} & {p.id for p in held_out}
    assert [p.messages for p in train] != [p.messages for p in held_out]


def test_prompts_are_short():
    assert max(len(p.prompt_text.split()) for p in build_problems(split="train", count=100)) < 60


def test_a_range_outside_the_splits_seeds_is_refused():
    with pytest.raises(ConfigError, match="out of range"):
        build_problems(split="train", count=1, start=reasoning.MAX_INDEX)


def test_texts_made_from_a_benchmarks_test_questions_are_not_used():
    assert "gsm_symbolic" not in {gym.name for gym in GYM_TASKS}


def test_a_missing_library_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning._load_dataset.cache_clear()
    reasoning._load_entry.cache_clear()
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        build_problems(split="train", count=1)


def test_the_table_does_not_load_the_library_or_torch():
    code = "import sys, ar2diff.tasks.table as t; assert not {'reasoning_gym', 'torch'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_task_is_found_by_its_own_name():
    assert all(find_task(name).name == name for name in TASKS)
    with pytest.raises(ConfigError, match="structured, reasoning"):
        find_task("nothing")


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.procedural])
def test_every_task_scores_its_references_and_names_itself(name):
    task = TASKS[name]
    for problem in task.build_problems(split="eval", count=8):
        assert (problem.task, problem.domain) == (name, task.domain)
        assert task.score(problem, problem.reference)
    assert task.template_texts()
