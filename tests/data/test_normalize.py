"""Claims about the words that texts are compared by."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.data.normalize import iterate_grams, mask_numbers, normalize_text, split_words
from ar2diff.data.text_batch import TextBatch


def test_case_width_ligatures_spacing_and_punctuation_make_no_difference():
    plain = "The file ﬁnder costs 12 Straße"
    assert normalize_text("THE  FILE\tFINDER\n-- costs: １２ STRASSE!") == normalize_text(plain)
    assert normalize_text("snake_case") == "snake case"


@settings(max_examples=40)
@given(st.text(max_size=20))
def test_normalising_twice_is_normalising_once(text):
    assert normalize_text(normalize_text(text)) == normalize_text(text)


@given(st.text(alphabet=st.characters(codec="ascii")))
def test_the_short_way_for_ascii_text_agrees_with_the_long_one(text):
    assert split_words(text) == split_words(text + " é")[:-1]


def test_numbers_of_any_length_are_masked_alike():
    assert mask_numbers(split_words("12 apples, 3 x2 and 4567")) == ["0", "apples", "0", "x0", "and", "0"]
    assert mask_numbers([]) == []


@given(st.lists(st.sampled_from("abc")), st.integers(1, 5))
def test_grams_are_all_runs_of_that_size(words, size):
    expected = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    assert list(iterate_grams(words, size)) == expected


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("What is 3 + 4?", "what is 3+4", True),
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("Is 2 < 3?", "Is 2 > 3?", False),
        ("3 \N{MINUS SIGN} 4", "3-4", True),
        ("\N{FULLWIDTH PLUS SIGN}3", "+3", True),
        ("Thanks \N{THUMBS UP SIGN}", "Thanks \N{THUMBS DOWN SIGN}", False),
        ("\N{LEFT DOUBLE QUOTATION MARK}Hi\N{RIGHT DOUBLE QUOTATION MARK}", '"Hi!"', True),
    ],
)
def test_prompts_are_the_same_where_words_and_signs_are(make_document, one, other, alike):
    batch = TextBatch([make_document(one), make_document(other)])
    assert (batch.read_asked(0) == batch.read_asked(1)) is alike
