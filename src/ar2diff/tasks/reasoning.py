"""Short reasoning problems from the reasoning-gym library, with worked answers, as a second domain.

An answer ends with `Answer: X`; X goes to the library's own scorer. Items come from the library's generator
under pinned seeds, train and eval apart. Its GSM-symbolic task is left out: its texts are made from GSM8K's
test questions, and training on them would spoil that benchmark. The library is imported on first use, since
that takes seconds; its version is part of a data receipt, since its word lists decide the items.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

from ar2diff.errors import ConfigError
from ar2diff.tasks.problem import Problem, Split

NAME = "reasoning"
DOMAIN = "reasoning"
VERSION = "1"
LIBRARY = "reasoning_gym"

# The library draws item i from seed + i, so splits are apart as long as indices stay below the distance.
SPLIT_SEEDS: dict[Split, int] = {"train": 1_000_000_000, "eval": 2_000_000_000}
MAX_INDEX = 1_000_000_000
ASK = "Finish with a line `Answer:` and the result."
ANSWER_MARK = "Answer:"


class GymTask(NamedTuple):
    """One of the library's tasks: its settings, the steps shown before the answer, and how it is asked."""

    name: str
    settings: Mapping[str, Any]
    work: Callable[[Mapping[str, Any]], list[str]]
    ask: Callable[[Mapping[str, Any]], str]


def _library_question(entry: Mapping[str, Any]) -> str:
    return " ".join(entry["question"].split())


def _sorting_question(entry: Mapping[str, Any]) -> str:
    """The library's own question is 80 tokens of rules around four words."""
    words = ", ".join(entry["metadata"]["transformed_words"])
    return f"Sort these words in {entry['metadata']['direction']} ASCII order, separated by commas: {words}"


def _sum_steps(entry: Mapping[str, Any]) -> list[str]:
    """`4 + 3 - 2` as one line for each operation, left to right."""
    first, *rest = re.findall(r"[+-]|\d+", entry["metadata"]["expression"])
    total, steps = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        following = total + int(number) if sign == "+" else total - int(number)
        steps.append(f"{total} {sign} {number} = {following}")
        total = following
    return steps


def _letter_steps(entry: Mapping[str, Any]) -> list[str]:
    letter = entry["metadata"]["target_letter"]
    return [", ".join(f"{word} {word.lower().count(letter)}" for word in entry["metadata"]["span"])]


def _spelling_steps(entry: Mapping[str, Any]) -> list[str]:
    word = entry["metadata"]["word"]
    return [" ".join(word), " ".join(reversed(word))]


def _no_steps(entry: Mapping[str, Any]) -> list[str]:  # noqa: ARG001
    return []


GYM_TASKS = (
    GymTask(
        "chain_sum", {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2}, _sum_steps, _library_question
    ),
    GymTask("letter_counting", {"min_words": 2, "max_words": 5}, _letter_steps, _library_question),
    GymTask("spell_backward", {"min_word_len": 3, "max_word_len": 7}, _spelling_steps, _library_question),
    GymTask("word_sorting", {"min_words": 2, "max_words": 4, "max_word_length": 8}, _no_steps, _sorting_question),
    GymTask("family_relationships", {"min_family_size": 4, "max_family_size": 4}, _no_steps, _library_question),
)


def build_problems(*, split: Split, count: int, start: int = 0) -> list[Problem]:
    """Problems `start` to `start + count - 1` of `split`, the library's tasks in turn.

    Raises:
        ConfigError: the range leaves the split's seeds, or the library is not installed.
    """
    if start < 0 or start + count > MAX_INDEX:
        raise ConfigError("reasoning problems out of range", given=[start, count], fix=f"Stay below {MAX_INDEX}")
    return [_build_problem(split, index) for index in range(start, start + count)]


def _build_problem(split: Split, index: int) -> Problem:
    gym = GYM_TASKS[index % len(GYM_TASKS)]
    entry = _load_entry(split, index)
    question = gym.ask(entry)
    return Problem(
        id=f"{NAME}/{split}/{gym.name}-{index}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": f"{question}\n{ASK}"},),
        reference="\n".join([*gym.work(entry), f"{ANSWER_MARK} {entry['answer']}"]),
        passage=question,
    )


def score(problem: Problem, answer_text: str) -> bool:
    """True where the library's scorer gives the text after the last `Answer:` full marks."""
    _, found, final = answer_text.rpartition(ANSWER_MARK)
    split, index = _read_id(problem.id)
    entry = _load_entry(split, index)
    if not found:
        return False
    return bool(_load_dataset(GYM_TASKS[index % len(GYM_TASKS)].name, split).score_answer(final.strip(), entry) >= 1)


def _read_id(problem_id: str) -> tuple[Split, int]:
    _, split, numbered = problem_id.split("/")
    return ("train" if split == "train" else "eval"), int(numbered.rpartition("-")[2])


@lru_cache(maxsize=4096)
def _load_entry(split: Split, index: int) -> Mapping[str, Any]:
    gym = GYM_TASKS[index % len(GYM_TASKS)]
    entry: Mapping[str, Any] = _load_dataset(gym.name, split)[index]
    return entry


@cache
def _load_dataset(name: str, split: Split) -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError("the library reasoning-gym is not installed", fix="pip install reasoning-gym") from None
    settings = next(gym.settings for gym in GYM_TASKS if gym.name == name)
    return reasoning_gym.create_dataset(name, seed=SPLIT_SEEDS[split], size=MAX_INDEX, **settings)


def template_texts() -> tuple[str, ...]:
    """The words that the library's questions share whatever the item, and the answer's mark."""
    return (
        ASK,
        ANSWER_MARK,
        "State the final answer to the following arithmetic problem",
        "How many times does the letter appear in the text",
        "Spell this word backward example sun nus",
        "Sort these words in ascending descending ASCII order separated by commas",
        "is married to They have a child called What is to Respond only with the word that describes their",
        "relationship",
        "How is related to Provide the relationship in one word What relation is to Answer with a single word",
    )
