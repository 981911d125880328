"""Claims about the text-to-structured-output task."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ar2diff.data.normalize import split_words
from ar2diff.hashing import sha256_json
from ar2diff.tasks import structured, words
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.structured import build_problems, is_same_json, parse_table, score

PROBLEMS = build_problems(split="train", count=400)


def make_problem(reference: str) -> Problem:
    return Problem(id="x", task="structured", domain="structured", messages=(), reference=reference)


def test_every_reference_scores_as_right_and_another_problems_does_not():
    for problem, other in zip(PROBLEMS, PROBLEMS[4:], strict=False):
        assert score(problem, problem.reference)
        assert score(problem, f"\n {problem.reference} \n")
        assert not score(problem, other.reference)
        assert not score(problem, problem.reference + " ok")
        assert not score(problem, problem.reference[:-1])


def test_a_problem_depends_on_its_split_and_index_alone():
    assert build_problems(split="train", count=5, start=100) == PROBLEMS[100:105]


def test_ids_are_unique_and_name_split_and_kind():
    assert len({p.id for p in PROBLEMS}) == len(PROBLEMS)
    assert [p.id for p in PROBLEMS[:2]] == ["structured/train/people-0", "structured/train/order-1"]


def test_train_and_eval_share_no_prompt_passage_or_reference():
    train, held_out = build_problems(split="train", count=3000), build_problems(split="eval", count=300)
    for read in (lambda p: p.prompt_text, lambda p: p.passage, lambda p: p.reference):
        assert not {read(p) for p in train} & {read(p) for p in held_out}


def test_every_value_of_an_answer_is_written_in_the_text_so_the_answer_is_determined():
    numbers = {str(n): word for n, word in enumerate(structured.passages.words.NUMBER_WORDS)}
    for problem in PROBLEMS:
        if not problem.reference.startswith("|"):
            for value in leaves(json.loads(problem.reference)):
                shown = "" if value is None else str(value)
                assert shown in problem.passage or numbers.get(shown, "?") in problem.passage
        else:
            header, *rows = parse_table(problem.reference)
            assert all(cell in problem.passage for row in rows for cell in row)
            assert all(name in problem.prompt_text for name in header)


def leaves(value):
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def test_the_prompt_names_the_keys_in_the_order_of_the_answer():
    for problem in PROBLEMS:
        if not problem.reference.startswith("|"):
            content = json.loads(problem.reference)
            keys = list(content[0] if isinstance(content, list) else content)
        else:
            keys = parse_table(problem.reference)[0]
        assert ", ".join(keys[:-1]) + " and " + keys[-1] in problem.prompt_text


def test_references_are_json_on_one_line_as_json_dumps_writes_it():
    for problem in PROBLEMS:
        if not problem.reference.startswith("|"):
            assert json.dumps(json.loads(problem.reference), ensure_ascii=False) == problem.reference


def test_notes_leave_facts_out_and_nulls_stand_for_them():
    notes = [p for p in PROBLEMS if "/note-" in p.id]
    assert 0.7 < sum("null" in p.reference for p in notes) / len(notes) <= 1


def test_wording_varies_so_that_no_template_covers_the_task():
    shapes = {tuple(json.loads(p.reference)[0]) for p in PROBLEMS if "/people-" in p.id}
    openings = {p.prompt_text[:12] for p in PROBLEMS}
    assert len(shapes) > 40
    assert len(openings) > 150


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ('{"a": 1, "b": null}', True),
        ('{"b":null,"a":1}', True),
        ('{"a": 1.0, "b": null}', False),
        ('{"a": true, "b": null}', False),
        ('{"a": "1", "b": null}', False),
        ('{"a": 1}', False),
        ('{"a": 1, "b": null, "c": 2}', False),
        ('{"a": 1, "a": 1, "b": null}', False),
        ('{"a": NaN, "b": null}', False),
        ('```json\n{"a": 1, "b": null}\n```', False),
        ('[{"a": 1, "b": null}]', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_is_right_when_values_and_types_are_equal(answer, is_right):
    assert score(make_problem('{"a": 1, "b": null}'), answer) is is_right


def test_lists_count_by_order():
    assert score(make_problem("[1, 2]"), "[1,2]")
    assert not score(make_problem("[1, 2]"), "[2, 1]")
    assert not score(make_problem("[1, 2]"), "[1, 2, 3]")


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("| A | B |\n| --- | --- |\n| x y | 2 |", True),
        ("|A|B|\n|:-----|---:|\n|x  y|2|", True),
        ("| A | B |\n| x y | 2 |", False),
        ("| B | A |\n| --- | --- |\n| 2 | x y |", False),
        ("| A | B |\n| --- | --- |\n| x y | 2 | 3 |", False),
        ("Here it is:\n| A | B |\n| --- | --- |\n| x y | 2 |", False),
        ("| A | B |\n| --- | --- |", False),
        ("|", False),
        ("", False),
    ],
)
def test_a_table_is_right_when_its_cells_are_equal(answer, is_right):
    assert score(make_problem("| A | B |\n| --- | --- |\n| x y | 2 |"), answer) is is_right


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_equality_with_types_agrees_with_the_canonical_text(left, right):
    texts = [json.dumps(value, sort_keys=True) for value in (left, right)]
    # 0.0 and -0.0 have two texts and are one number.
    assert is_same_json(left, right) == (texts[0] == texts[1]) or "-0.0" in "".join(texts)


def test_template_texts_hold_the_wording_and_no_slots():
    texts = structured.template_texts()
    assert not any("{" in text for text in texts)
    words = {word for text in texts for word in split_words(text)}
    assert {"markdown", "null", "orders", "platform", "unit"} <= words
    assert not {"tanaka", "lyon"} & words


def test_held_out_problems_change_only_with_the_version():
    texts = [[p.id, p.prompt_text, p.reference] for p in build_problems(split="eval", count=200)]
    assert (structured.VERSION, sha256_json(texts)[:16]) == ("1", "0ef6d11cbcb975b5")


def test_word_lists_have_no_repeated_or_broken_entries():
    lists = [value for value in vars(words).values() if isinstance(value, tuple)]
    assert len(lists) >= 9
    for entries in lists:
        assert len(set(entries)) == len(entries)
        assert all(entry == " ".join(entry.split()) and "|" not in entry and '"' not in entry for entry in entries)
