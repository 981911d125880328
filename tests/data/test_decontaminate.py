"""Claims about keeping written evaluation items out: planted copies are found, other text is left alone."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ar2diff.data import similar
from ar2diff.data.blocklist import BlocklistItem
from ar2diff.data.decontaminate import GRAM_LEN, STRICT_POLICY, Decontaminator, StrictPolicy
from ar2diff.data.documents import Document
from ar2diff.data.normalize import mask_numbers, split_words
from ar2diff.data.recipes.chat_jsonl import read_documents
from ar2diff.data.text_batch import TextBatch

QUESTION = (
    "Every Tuesday Marta carries 14 crates of plums across the frozen canal, sells 5 of them to the baker, "
    "and trades the remaining crates for 3 sacks of barley each. How many sacks does she bring home?"
)
SHORT = "Name the largest moon."


def item(prompt, **fields):
    return BlocklistItem(id=fields.pop("id", "i1"), benchmark="b", prompt=prompt, **fields)


def document(prompt, response="fine"):
    return Document(id="d", prompt=({"role": "user", "content": prompt},), response=response, source="s")


ITEMS = [item(QUESTION, is_math=True, reference="27"), item(SHORT, id="i2")]


def replace_words(text, every, offset):
    return " ".join("qux" if n % every == offset else word for n, word in enumerate(text.split()))


def renumber(text, seed):
    draw = random.Random(seed)
    return re.sub(r"\d+", lambda _: str(draw.randint(1, 9999)), text)


def widen(text):
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


COPIES = {
    "verbatim": lambda text: text,
    "renumbered": lambda text: renumber(text, 1),
    "respaced": lambda text: "  \n".join(text.split()),
    "upper case": str.upper,
    "full width": widen,
    "other punctuation": lambda text: re.sub(r"[,.?]", " --", text),
    "one word in eight replaced": lambda text: replace_words(text, 8, 3),
    "inside other text": lambda text: "Solve this. " * 30 + text + " Show all steps." * 30,
}


@pytest.mark.parametrize("form", COPIES)
@pytest.mark.parametrize("place", ["prompt", "response"])
def test_planted_copies_are_found_in_prompt_and_response(form, place):
    copy = COPIES[form](QUESTION)
    planted = document(copy) if place == "prompt" else document("Anything?", copy)
    match = Decontaminator(ITEMS).find(planted)
    if place == "response" and form == "one word in eight replaced":
        return  # seven words in a row remain: only the prompt is compared by similarity
    assert match is not None
    assert (match.item_id, match.policy) == ("i1", STRICT_POLICY)
    assert match.gram


def test_unrelated_text_is_kept():
    policy = Decontaminator(ITEMS)
    assert policy.find(document("How do I prune a plum tree in the winter?", "Cut the dead branches first.")) is None
    assert Decontaminator([]).find(document(QUESTION)) is None


def test_a_short_item_is_found_by_containment_of_the_whole():
    policy = Decontaminator(ITEMS)
    match = policy.find(document("Please NAME the largest  moon of Saturn"))
    assert (match.item_id, match.rule, match.gram) == ("i2", "short-item", "name the largest moon")
    assert policy.find(document("Name the largest planet and its moon")) is None


def test_numbers_are_masked_for_mathematics_alone():
    text = "On day 1 we saw 2 cats and 3 dogs eat 4 pies"
    assert (
        Decontaminator([item(text, is_math=True)]).find(document(renumber(text, 3))).rule == "8-gram-numbers-masked"
    )
    assert Decontaminator([item(text + " and other words" * 9)]).find(document(renumber(text, 3), "")) is None


def test_a_run_of_numbers_alone_belongs_to_no_question():
    policy = Decontaminator([item("Add 1 2 3 4 5 6 7 8 9 and 10 to it", is_math=True)])
    assert policy.find(document("Sort", "11 12 13 14 15 16 17 18 19 20")) is None
    assert policy.find(document("Sort", "1 2 3 4 5 6 7 8")).rule == "8-gram"


def test_reference_answers_count_unless_they_are_worked_mathematics():
    answer = "the treaty was signed in the old mill by seven tired envoys"
    assert Decontaminator([item("Who?", reference=answer)]).find(document("x", answer)).rule == "8-gram"
    assert Decontaminator([item("Who was it?", reference=answer, is_math=True)]).find(document("x", answer)) is None


def test_a_similar_prompt_is_found_where_no_eight_words_are_the_same():
    near = replace_words(QUESTION, 7, 6)
    match = Decontaminator(ITEMS).find(document(near))
    assert match.rule == "fuzzy"
    far = replace_words(QUESTION, 6, 5) + " and a second question follows here that is longer than the first" * 3
    assert Decontaminator(ITEMS).find(document(far)) is None


words = st.lists(st.sampled_from(["a", "b", "7", "88", "c"]), max_size=30).map(" ".join)


@given(st.lists(words, min_size=1, max_size=3), words, words)
def test_the_screened_search_agrees_with_comparing_every_gram(prompts, prompt, response):
    items = [item(text, id=str(n), is_math=True) for n, text in enumerate(prompts)]
    match = StrictPolicy(items).find(document(prompt, response))
    found = match is not None and match.rule != "fuzzy"
    assert found == any(shares_gram(split_words(p), split_words(t)) for p in prompts for t in (prompt, response))


def shares_gram(item_words, text_words):
    """The rules on grams in the plainest form."""
    size = min(GRAM_LEN, len(item_words))
    plain = runs(item_words, size) & runs(text_words, size)
    masked = runs(mask_numbers(item_words), GRAM_LEN) & runs(mask_numbers(text_words), GRAM_LEN)
    return bool(plain) or any(sum(word != "0" for word in gram) >= 4 for gram in masked)


def runs(words_, size):
    return {tuple(words_[i : i + size]) for i in range(len(words_) - size + 1)} if size else set()


RECALL = {
    "verbatim": 1,
    "renumbered": 0.98,
    "respaced": 1,
    "upper case": 1,
    "full width": 1,
    "other punctuation": 1,
    "numbers in LaTeX": 1,
    "one word in eight replaced": 0.99,
    "one word in five replaced": 0.92,
    "every fifth word replaced": 0.99,
}
REAL_COPIES = {
    **COPIES,
    "numbers in LaTeX": lambda text: re.sub(r"\d+", r"$\\text{ \g<0> }$", text),
    "one word in five replaced": lambda text: replace_at_random(text, 5),
    "every fifth word replaced": lambda text: replace_words(text, 5, 4),
    "one word in eight replaced": lambda text: replace_at_random(text, 8),
}


def replace_at_random(text, one_in):
    draw = random.Random(text)
    return " ".join("qux" if draw.random() < 1 / one_in else word for word in text.split())


@pytest.mark.shared_data
@pytest.mark.parametrize("form", RECALL)
def test_planted_copies_of_real_questions_are_found(shared_data, form):
    rows = list(read_documents(shared_data / "gsm8k" / "test_part1.jsonl", "test"))
    policy = Decontaminator([BlocklistItem.from_document(row, "gsm8k") for row in rows])
    copies = TextBatch([document(REAL_COPIES[form](row.prompt_text)) for row in rows])
    found = sum(match is not None for match in policy.find_all(copies))
    print(f"{form}: {found / len(rows):.4f}")
    assert found / len(rows) >= RECALL[form]


FORMULA = (
    r"Let $f(x) = \frac{x^2 + 3}{\sqrt{x}}$ be defined for all positive x and let \(g\) be its inverse; "
    r"find the sum of all real t with $f(t) = \text{max}(g(t), 7)$ and $t < \frac{5}{2}$."
)
LATEX_FORMS = {
    "display fractions": lambda text: text.replace(r"\frac", r"\dfrac"),
    "sized brackets": lambda text: text.replace("(", r"\left(").replace(")", r"\right)"),
    "other delimiters": lambda text: text.replace("$", "$$").replace(r"\(", "$").replace(r"\)", "$"),
    "spacing and fonts": lambda text: text.replace("=", r"\quad = \displaystyle ").replace(r"\text", r"\mathrm"),
    "braces and indices": lambda text: text.replace("x^2", "x^{2}").replace("t", "{t}"),
}


@pytest.mark.parametrize("form", LATEX_FORMS)
def test_latex_for_looks_alone_hides_no_copy(form):
    policy = Decontaminator([item(FORMULA, is_math=True)])
    assert policy.find(document(renumber(LATEX_FORMS[form](FORMULA), 5))) is not None
    if form != "braces and indices":
        assert split_words(LATEX_FORMS[form](FORMULA)) == split_words(FORMULA)
    assert split_words(r"\alpha \beta \leftarrow \textile") == ["alpha", "beta", "leftarrow", "textile"]


@pytest.mark.shared_data
def test_few_real_training_rows_are_removed(shared_data):
    train = list(read_documents(shared_data / "gsm8k" / "train.jsonl", "train"))
    rows = read_documents(shared_data / "gsm8k" / "test_part1.jsonl", "test")
    policy = Decontaminator([BlocklistItem.from_document(row, "gsm8k") for row in rows])
    matches = policy.find_all(TextBatch(train))
    share = sum(match is not None for match in matches) / len(train)
    print(f"removed: {share:.4f}")
    assert 0.002 < share <= 0.03


@pytest.mark.parametrize("offset", range(7))
def test_eight_shared_words_are_found_wherever_they_begin(offset):
    policy = Decontaminator([item("one long blue rope hangs over dry sand and more")])
    filler = " ".join(f"w{n}" for n in range(offset))
    assert policy.find(document("x", f"{filler} long blue rope hangs over dry sand and")).rule == "8-gram"
    assert policy.find(document("x", f"{filler} long blue rope hangs over dry sand")) is None


@pytest.mark.parametrize(("text", "is_found"), [("buy 3 red 4 or 5 hats 6", True), ("buy 3 red 4 5 6 hats 7", False)])
def test_half_of_a_renumbered_gram_must_be_plain_words(text, is_found):
    match = Decontaminator([item(text, is_math=True)]).find(document("x", renumber(text, 4)))
    assert (match is not None) is is_found


@given(st.lists(words, min_size=1, max_size=3), st.lists(st.tuples(words, words), max_size=5))
def test_a_batch_has_the_matches_of_its_documents_one_by_one(prompts, texts):
    items = [
        item(text, id=str(n), is_math=n % 2 == 0, reference="a b c 7 a b c 88") for n, text in enumerate(prompts)
    ]
    documents = [document(prompt, response) for prompt, response in texts]
    policy = StrictPolicy(items)
    assert policy.find_all(TextBatch(documents)) == [policy.find(each) for each in documents]


def test_two_shared_runs_of_four_words_make_a_candidate_and_one_does_not():
    policy = Decontaminator([item("one long blue rope hangs over dry sand")])
    assert policy.find(document("one long blue rope xxxxx over dry sand")) is None
    match = policy.find(document("one long blue rope hangs over d sand"))
    assert (match.rule, match.gram) == ("fuzzy", "one long blue rope")


def test_wording_that_very_many_items_have_makes_no_candidate(monkeypatch):
    items = [item(f"{name} one long blue rope hangs", id=name) for name in ("tar", "oil", "mud")]
    near = document("sap one long blue rope hangs")
    assert Decontaminator(items).find(near).rule == "fuzzy"
    monkeypatch.setattr(similar, "MAX_ITEMS_PER_RUN", 2)
    assert Decontaminator(items).find(near) is None
    assert Decontaminator(items).find(document("tar one long blue boat hangs")) is None


@pytest.mark.parametrize(("extra", "found"), [(10, True), (11, False)])
def test_a_similarity_of_75_is_enough_and_less_is_not(extra, found):
    # 30 of 40 characters agree: 2 * 30 / (40 + 40); with one more that does not, 2 * 30 / (40 + 41).
    shared = "alpha bravo delta hotel india "
    match = Decontaminator([item(shared + "x" * 10)]).find(document(shared + "y" * extra))
    assert (match is not None) is found
