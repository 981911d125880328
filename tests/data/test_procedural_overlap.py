"""Claims about keeping generated evaluation problems out of generated training text."""

from dataclasses import replace

import pytest

from ar2diff.data.blocklist import BlocklistItem
from ar2diff.data.decontaminate import Decontaminator
from ar2diff.data.documents import Document
from ar2diff.data.procedural_overlap import PROCEDURAL_POLICY
from ar2diff.tasks import structured

HELD_OUT = structured.build_problems(split="eval", count=120)
ITEMS = [BlocklistItem.from_problem(problem, procedural=True) for problem in HELD_OUT]
POLICY = Decontaminator(ITEMS, template_texts=structured.template_texts())


def as_document(problem, **changes):
    fields = {"id": "d", "prompt": problem.messages, "response": problem.reference, "source": "s"}
    return Document(**(fields | {"task": problem.task, "passage": problem.passage} | changes))


def rules_found(change):
    matches = [POLICY.find(change(problem)) for problem in HELD_OUT]
    assert all(match is not None and match.policy == PROCEDURAL_POLICY for match in matches)
    return {match.rule for match in matches}


def test_a_planted_problem_is_found():
    assert rules_found(as_document) == {"same-passage"}


def test_a_planted_problem_with_another_instruction_or_spacing_is_found():
    other = ({"role": "user", "content": "Do something else with it"},)
    assert rules_found(lambda p: as_document(p, prompt=other, passage="  ".join(p.passage.split()))) == {
        "same-passage"
    }


def test_the_same_facts_in_other_words_are_found_by_their_content():
    rules = rules_found(lambda p: as_document(p, passage="With platform, " + p.passage))
    assert "same-content" in rules
    assert "same-passage" not in rules


def test_a_problem_with_one_fact_changed_is_found():
    def change(problem):
        *kept, _ = problem.passage.split()
        return as_document(problem, passage=" ".join([*kept, "Zanzibar"]))

    assert rules_found(change) <= {"content-6-gram", "fuzzy-content", "same-content"}


def test_other_training_problems_stay_although_they_share_the_wording():
    train = structured.build_problems(split="train", count=1500)
    removed = [match for problem in train if (match := POLICY.find(as_document(problem)))]
    assert len(removed) <= 8
    strict = Decontaminator([replace(item, procedural=False) for item in ITEMS])
    assert sum(strict.find(as_document(problem)) is not None for problem in train) > 1000


def test_written_documents_meet_generated_items_under_the_strict_policy():
    match = POLICY.find(as_document(HELD_OUT[0], task="", passage=""))
    assert match.policy == "sft-strict-v1"


def test_generated_documents_meet_written_items_under_the_strict_policy():
    written = BlocklistItem(id="w", benchmark="b", prompt=HELD_OUT[3].prompt_text)
    match = Decontaminator([written]).find(as_document(HELD_OUT[3]))
    assert (match.item_id, match.policy) == ("w", "sft-strict-v1")


def test_without_a_passage_the_whole_prompt_counts():
    problem = replace(HELD_OUT[0], passage="")
    policy = Decontaminator([BlocklistItem.from_problem(problem, procedural=True)])
    assert policy.find(as_document(problem)).rule == "same-passage"


@pytest.mark.parametrize("index", range(4))
def test_content_leaves_the_wording_out(index):
    content = POLICY._procedural._texts[index].split()
    assert not {"json", "null", "and", "the"} & set(content)
    assert len(content) >= 3
