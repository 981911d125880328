"""Claims about recipes: which rows become which documents, and why others do not."""

import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest

from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes.procedural import generate_documents
from ar2diff.data.recipes.table import RECIPES
from ar2diff.errors import ConfigError, DataError
from ar2diff.tasks import table as task_table


@pytest.fixture
def read(write_jsonl):
    def read_as(recipe, *contents):
        path = write_jsonl("data.jsonl", contents)
        return list(RECIPES[recipe](path, "local:data.jsonl"))

    return read_as


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_messages_and_pairs_become_the_same_document(read):
    documents = read(
        "chat_jsonl",
        {"messages": [user("q"), assistant("a")]},
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "completion": "a"},
        {"question": "q", "answer": "a"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, assistant("a")]},
    )
    assert {(d.prompt[0]["content"], d.response) for d in documents} == {("q", "a")}
    assert [d.source for d in documents][:2] == ["local:data.jsonl#1", "local:data.jsonl#2"]
    assert len({d.id for d in documents}) == 5


def test_only_the_last_turn_is_learnt(read):
    turns = [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c"), assistant("d")]
    (document,) = read("chat_jsonl", {"id": 7, "messages": turns})
    assert document == Document(id="7", prompt=tuple(turns[:4]), response="d", source="local:data.jsonl#1")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "response": "  "}, "empty response"),
        ({"prompt": " ", "response": "a"}, "empty prompt"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}]), assistant("a")]}, "a turn is not text"),
        ({"messages": [user("q"), assistant(None)]}, "a turn is not text"),
        ({"messages": [user([]), assistant("a")]}, "a turn is not text"),
    ],
)
def test_chats_without_text_to_learn_are_dropped_with_a_reason(read, row, reason):
    (dropped,) = read("chat_jsonl", row)
    assert dropped == DroppedRow(id="row-1", source="local:data.jsonl#1", reason=reason)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "hello"}, "neither messages nor a prompt with a response; its fields: text"),
        ({}, "its fields: none"),
        ({"prompt": "q", "response": 3}, "no str field 'response'"),
        ({"messages": "q"}, "no list field 'messages'"),
        ({"messages": [{"role": "robot", "content": "q"}]}, "a message without role"),
        ({"messages": [user("q")]}, "do not end with an answer"),
        ({"messages": [user("q"), assistant("a"), user("q")]}, "do not end with an answer"),
    ],
)
def test_a_wrong_schema_is_one_clear_line_with_file_and_row(read, row, words):
    with pytest.raises(DataError) as caught:
        read("chat_jsonl", {"prompt": "q", "response": "a"}, row)
    assert f"data.jsonl, row 2: {words}" in caught.value.one_line() or words in caught.value.one_line()
    assert "data.jsonl, row 2" in caught.value.one_line()


def test_an_id_that_comes_twice_is_refused(read):
    row = {"id": "x", "prompt": "q", "response": "a"}
    with pytest.raises(DataError, match="row 3: the id 'x' is also that of row 1"):
        read("chat_jsonl", row, row | {"id": "y"}, row)


OPENR1 = {
    "problem": "p",
    "solution": "s",
    "answer": "1",
    "source": "olympiads",
    "uuid": "u",
    "is_reasoning_complete": [True, True, True, False],
    "generations": ["long and right", "right!", "bad", "x"],
    "correctness_math_verify": [True, True, False, True],
}


def test_openr1_takes_the_shortest_complete_verified_generation(read):
    (document,) = read("openr1_math", OPENR1)
    assert (document.id, document.prompt[0]["content"], document.response) == ("u", "p", "right!")


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"source": "math"}, "source is math"),
        ({"is_reasoning_complete": [False] * 4}, "no complete generation"),
        ({"generations": []}, "no complete generation"),
        ({"correctness_math_verify": [False] * 4}, "no verified generation"),
        ({"problem": " "}, "empty prompt"),
        (
            {"correctness_math_verify": [False] * 4, "correctness_llama": [True, False, False, False]},
            "long and right",
        ),
        ({"correctness_math_verify": None, "uuid": None}, "bad"),
        ({"is_reasoning_complete": None, "correctness_math_verify": None}, "x"),
    ],
)
def test_openr1_rows_are_kept_or_dropped_by_their_flags(read, change, outcome):
    (row,) = read("openr1_math", OPENR1 | change)
    assert outcome == (row.reason if isinstance(row, DroppedRow) else row.response)


def test_openr1_reads_the_parquet_files_of_the_data_set(tmp_path):
    path = tmp_path / "train-00000.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([OPENR1, OPENR1 | {"source": "math"}]), path)
    document, dropped = RECIPES["openr1_math"](path, "hub:x")
    assert document.response == "right!"
    assert dropped.reason == "source is math"


def test_taco_takes_the_shortest_solution_without_harness_code(read):
    solutions = ["print(1) # long", "print(1)", "#{ \n # Driver Code Starts\nx"]
    row = {"question": "q", "solutions": json.dumps(solutions), "starter_code": "def f():\n"}
    (document,) = read("taco", row)
    assert document.response == "```python\nprint(1)\n```"
    assert document.prompt[0]["content"] == "q\n\nStart from:\ndef f():"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "solutions": "[]"}, "no solution"),
        ({"question": "q", "solutions": ""}, "no solution"),
        ({"question": "q", "solutions": '["# Driver Code Ends"]'}, "only solutions with harness code"),
        ({"question": " ", "solutions": '["print(1)"]'}, "empty prompt"),
    ],
)
def test_taco_rows_without_a_usable_solution_are_dropped(read, row, reason):
    assert read("taco", row)[0].reason == reason


@pytest.mark.parametrize("solutions", ["[", '{"a": 1}'])
def test_taco_solutions_that_are_no_list_are_refused(read, solutions):
    with pytest.raises(DataError, match=r"data\.jsonl, row 1: solutions is not"):
        read("taco", {"question": "q", "solutions": solutions})


MEDMCQA = {"id": "m", "question": "q?", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": 2, "exp": "because"}


def test_medmcqa_answers_with_the_letter_after_the_explanation(read):
    first, second = read("medmcqa", MEDMCQA, MEDMCQA | {"exp": None})
    assert first.prompt[0]["content"] == "q?\nA. w\nB. x\nC. y\nD. z"
    assert (first.response, second.response) == ("because\nAnswer: C", "Answer: C")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cop": -1}, "no answer (held-out row)"),
        ({"opb": ""}, "empty question or option"),
        ({"choice_type": "multi"}, "several options are right"),
    ],
)
def test_medmcqa_rows_without_one_answer_are_dropped(read, change, reason):
    assert read("medmcqa", MEDMCQA | change)[0].reason == reason


def test_medmcqa_mirrors_that_count_options_from_one_give_the_same_letters(read):
    from_zero = read("medmcqa", *(MEDMCQA | {"cop": n, "id": str(n)} for n in (0, 1, 2, 3)))
    from_one = read("medmcqa", *(MEDMCQA | {"cop": n + 1, "id": str(n)} for n in (0, 1, 2, 3)))
    assert [d.response[-1] for d in from_one] == ["A", "B", "C", "D"]
    assert from_one == from_zero
    with pytest.raises(DataError, match=r"data\.jsonl, row 2: cop counts from 1 here, and from 0 in row 1"):
        read("medmcqa", MEDMCQA | {"cop": 0}, MEDMCQA | {"cop": 4})


@pytest.mark.parametrize("recipe", ["openr1_math", "taco", "medmcqa"])
def test_a_file_of_another_data_set_is_refused_with_its_fields(read, recipe):
    with pytest.raises(DataError, match=r"row 1: no str field .*text"):
        read(recipe, {"text": "x"})
    with pytest.raises(DataError, match="no fields"):
        read(recipe, {})


def test_procedural_documents_are_the_training_problems_in_order():
    problems = task_table.TASKS["structured"].build_problems(split="train", count=600)
    documents = list(itertools.islice(generate_documents("structured", "procedural:structured"), 600))
    assert [(d.id, d.response) for d in documents] == [(p.id, p.reference) for p in problems]
    later = next(generate_documents("structured", "procedural:structured", start=7))
    assert later == documents[7]


def test_a_benchmark_without_a_generator_is_no_source(monkeypatch):
    task = task_table.TASKS["structured"]
    fields = {name: getattr(task, name) for name in ("version", "domain", "build_problems", "score")}
    written = type(task)(name="written", procedural=False, **fields)
    monkeypatch.setitem(task_table.TASKS, "written", written)
    with pytest.raises(ConfigError, match="no training problems"):
        next(generate_documents("written", "procedural:written"))


GSM8K = {"question": "How many clips?", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\n#### 24"}


def test_gsm8k_is_asked_and_ended_as_its_test_split_and_its_marks_are_dropped_or_kept(read):
    (document,) = read("gsm8k", GSM8K)
    problem = task_table.find_task("gsm8k").read_problem(GSM8K, 1)
    assert (document.prompt, document.response) == (problem.messages, problem.reference)
    assert document.response == "She sold 48/2 = 24 clips.\nAnswer: 24"
    (marked,) = read("gsm8k_marks", GSM8K)
    assert marked.response == "She sold 48/2 = <<48/2=24>>24 clips.\nAnswer: 24"
    assert task_table.find_task("gsm8k").score(problem, marked.response)


@pytest.mark.parametrize(
    ("final", "written"), [("1,250,000", "1250000"), ("-5", "-5"), ("2.50", "2.50"), ("$7", "7"), (" 24 ", "24")]
)
def test_final_numbers_lose_their_thousands_separators_and_nothing_else(read, final, written):
    (document,) = read("gsm8k", GSM8K | {"answer": f"So <<10*2=20 dollars>>20 dollars.\n#### {final}"})
    assert document.response == f"So 20 dollars.\nAnswer: {written}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": " "}, "empty prompt"),
        ({"answer": "no mark, 3"}, "no worked answer"),
        ({"answer": "it depends\n#### none"}, "no final number"),
        ({"answer": "#### 3"}, "no worked answer"),
        ({"answer": "<<1+2=3>>\n#### 3"}, "no worked answer"),
    ],
)
def test_gsm8k_rows_without_a_question_steps_or_number_are_dropped(read, change, reason):
    (dropped,) = read("gsm8k", GSM8K | change)
    assert isinstance(dropped, DroppedRow)
    assert dropped.reason == reason


@pytest.mark.shared_data
def test_every_row_of_the_real_gsm8k_train_split_becomes_a_document_that_scores(shared_data):
    path = shared_data / "gsm8k" / "train.jsonl"
    documents = list(RECIPES["gsm8k"](path, "s"))
    assert len(documents) == 7473
    assert all(isinstance(document, Document) and "<<" not in document.response for document in documents)
    task = task_table.find_task("gsm8k")
    with path.open() as stream:
        problems = [task.read_problem(json.loads(line), number) for number, line in enumerate(stream, 1)]
    assert all(task.score(p, d.response) for p, d in zip(problems, documents, strict=True))
    finals = [document.response.rpartition("Answer: ")[2] for document in documents]
    assert not any("," in final for final in finals)
    assert len({document.prompt_text for document in documents}) < len(documents) + 1
