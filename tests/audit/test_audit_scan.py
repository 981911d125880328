"""Looking for evaluation items in text, and counting sampled steps: no false alarm on the embedded mixture."""

from ar2diff.audit.claims.blocklist import SharedGrams, WholeItems, find_hits
from ar2diff.audit.claims.training import NUM_SAMPLED, choose_sample
from ar2diff.tasks.table import TASKS


def test_an_item_is_found_whole_whatever_stands_around_it():
    items = WholeItems(
        [("a", "The quick brown fox jumps over the lazy dog again"), ("b", "one two three")], min_words=4
    )
    assert items.find("He said: THE QUICK, brown fox jumps over the lazy dog again!") == "a"
    assert items.find("The quick brown fox jumps over the lazy dog once") is None
    assert items.find("one two three") is None


def test_where_symbols_count_other_signs_make_another_item():
    wording = "State the final answer to the following arithmetic problem:"
    items = WholeItems([("a", f"{wording} 5 - 1 =")], min_words=8, with_symbols=True)
    assert items.find(f"{wording} 5 + 1 - 2 =\n5 + 1 = 6") is None
    assert items.find(f"{wording} 5 - 1 - 2 =") is None
    assert items.find(f"Now {wording.upper()}  5-1 =\n4") == "a"


def test_another_problem_of_the_same_words_is_no_hit_in_a_generators_text():
    wording = "State the final answer to the following arithmetic problem:"
    texts = [f"{wording} 5 + 1 - 2 =", f"{wording} 5 - 1 ="]
    hits = find_hits([("a", f"{wording} 5 - 1 =", True)], [(text, "procedural:reasoning#1") for text in texts])
    assert list(hits) == ["document 1 (procedural:reasoning#1) holds a"]


def test_prompts_of_a_generator_that_the_parent_answered_are_a_generators():
    wording = "How many times does this letter appear in the text:"
    items = [("a", f'{wording} "of interest"?', True)]
    texts = [f'{wording} "hypertext"?', f'{wording} "of interest"?']
    generated = ["procedural:reasoning#1", "parent:procedural:reasoning/answers-000000.jsonl#1"]
    for source in generated:
        assert list(find_hits(items, [(text, source) for text in texts])) == [f"document 1 ({source}) holds a"]
    (first, second) = find_hits(items, [(text, "parent:self/answers-000000.jsonl#1") for text in texts])
    assert first.startswith("document 0")
    assert second.startswith("document 1")


def test_eight_words_in_a_row_are_shared_and_seven_are_not():
    grams = SharedGrams([("a", "w1 w2 w3 w4 w5 w6 w7 w8 w9")])
    assert grams.find("x w2 w3 w4 w5 w6 w7 w8 w9 y") == "a"
    assert grams.find("x w2 w3 w4 w5 w6 w7 w8 y") is None


def test_no_generated_training_text_holds_an_evaluation_item_whole():
    for task in (task for task in TASKS.values() if task.procedural):
        evaluation = task.build_problems(split="eval", count=100)
        items = WholeItems([(p.id, p.passage or p.prompt_text) for p in evaluation], min_words=8)
        for problem in task.build_problems(split="train", count=150):
            text = f"{problem.prompt_text}\n{problem.reference}"
            assert items.find(text) is None, problem.id


def test_sampled_steps_have_both_ends_and_depend_on_the_ledger():
    assert list(choose_sample("x", NUM_SAMPLED)) == list(range(NUM_SAMPLED))
    one, other = choose_sample("a" * 64, 1000), choose_sample("b" * 64, 1000)
    assert one[0] == 0
    assert one[-1] == 999
    assert one != other
    assert one == choose_sample("a" * 64, 1000)
