"""Claims about near-duplicate removal: what is alike goes, what is not stays, whatever the order of look-ups."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.data import near_duplicates
from ar2diff.data.config import DataConfig, SourceShare
from ar2diff.data.documents import Document
from ar2diff.data.gram_hashes import WordHashes
from ar2diff.data.key_index import MAX_PER_KEY, KeyIndex
from ar2diff.data.near_duplicates import MIN_JACCARD, NUM_BANDS, measure_jaccard, sign_texts
from ar2diff.data.normalize import iterate_grams, mask_text, normalize_text
from ar2diff.data.pipeline import prepare
from ar2diff.data.text_batch import TextBatch

words = st.lists(st.sampled_from(["a", "bb", "7", "88", "é", "c9d", "12x3"]), max_size=12).map(" ".join)


@given(st.lists(words, max_size=4), st.integers(1, 6), st.booleans())
def test_word_runs_have_equal_hashes_where_their_words_are_equal(texts, size, masked):
    hashes, offsets = WordHashes(texts, masked=masked).grams(size)
    shown = [mask_text(text) if masked else text for text in texts]
    grams = [list(iterate_grams(text.split(), size)) for text in shown]
    assert np.diff(offsets).tolist() == [len(each) for each in grams]
    by_gram = {}
    for value, gram in zip(hashes.tolist(), (gram for each in grams for gram in each), strict=True):
        assert by_gram.setdefault(gram, value) == value
    assert len(set(by_gram.values())) == len(by_gram)


def test_a_hash_depends_on_the_word_and_not_on_its_place():
    long = " ".join(f"word{n % 10}" for n in range(9000))
    hashes = WordHashes([long]).hashes
    assert len(set(hashes.tolist())) == 10
    assert hashes[:10].tolist() == hashes[8990:].tolist()
    assert WordHashes(["word1 é"]).hashes[0] == hashes[1]


def shingle_sets(left, right):
    sets = [set(iterate_grams(text.split(), 5)) for text in (left, right)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@given(st.integers(0, 60), st.integers(1, 12))
def test_similarity_is_that_of_the_sets_of_word_runs(start, length):
    left = " ".join(f"w{n}" for n in range(80))
    right = " ".join("x" if start <= n < start + length else f"w{n}" for n in range(80))
    signed = sign_texts([left, right])
    parts = [signed.shingles[signed.offsets[i] : signed.offsets[i + 1]] for i in (0, 1)]
    assert measure_jaccard(*parts) == pytest.approx(shingle_sets(left, right))


def test_a_signature_depends_on_its_own_text_alone():
    texts = [" ".join(f"w{n * k}" for n in range(30)) for k in range(1, 20)]
    together = sign_texts(texts)
    assert together.band_keys.shape == (19, NUM_BANDS)
    for index, text in enumerate(texts):
        assert np.array_equal(sign_texts([text]).band_keys[0], together.band_keys[index])


def test_signatures_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    texts = [" ".join(f"w{n * step}" for step in range(n % 9)) for n in range(40)]
    whole = sign_texts(texts)
    monkeypatch.setattr(near_duplicates, "_CHUNK", 7)
    assert all(np.array_equal(one, other) for one, other in zip(sign_texts(texts), whole, strict=True))


def test_similar_texts_share_a_band_and_others_do_not():
    base = [f"w{n}" for n in range(400)]
    texts = [" ".join(base)]
    for k in range(1, 60):  # five shingles of 396 differ: similarity 0.975
        texts.append(" ".join(f"x{k}" if n == 6 * k else word for n, word in enumerate(base)))
    keys = sign_texts([*texts, " ".join(f"y{n}" for n in range(400))]).band_keys
    assert all((keys[k] == keys[0]).any() for k in range(60))
    assert not (keys[60] == keys[0]).any()


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 5), max_size=20), max_size=12), st.integers(1, 30))
def test_the_index_finds_what_a_dictionary_finds(tmp_path_factory, batches, run_len):
    index, known, number = KeyIndex(tmp_path_factory.mktemp("runs"), run_len=run_len), {}, 0
    for batch in batches:
        keys = np.array(batch, np.uint64)
        index.add(keys, np.arange(number, number + len(batch)))
        for key in batch:
            known.setdefault(key, []).append(number)
            number += 1
    asked = [3, 0, 6, 1, 5, 2, 4, 3]
    places, found = index.find(np.array(asked, np.uint64))
    pairs = ((place, known.get(key, [])[:MAX_PER_KEY]) for place, key in enumerate(asked))
    expected = [(place, document) for place, documents in pairs for document in documents]
    assert list(zip(places.tolist(), found.tolist(), strict=True)) == expected


def test_of_a_common_key_the_oldest_documents_are_found(tmp_path):
    index = KeyIndex(tmp_path, run_len=50)
    for start in range(0, 200, 20):
        index.add(np.full(20, 9, np.uint64), np.arange(start, start + 20))
    assert index.find(np.array([9], np.uint64))[1].tolist() == list(range(MAX_PER_KEY))


TEXT = " ".join(f"word{n}" for n in range(60))


def remove(tmp_path, tokenizer, rows):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(sources=(SourceShare(source=f"local:{path}"),), max_document_len=5000)
    receipt = prepare(config, tokenizer, tmp_path / "data", ledger=None, progress=None)
    removed = [json.loads(line) for line in (tmp_path / "data" / "removed.jsonl").read_text().splitlines()]
    return receipt, {entry["id"]: entry for entry in removed}


def test_a_near_copy_is_kept_as_a_record_with_what_it_repeats(tmp_path, byte_tokenizer):
    near = TEXT.replace("word30", "other")
    rows = [{"id": "first", "prompt": TEXT, "response": "yes"}, {"id": "copy", "prompt": near, "response": "yes"}]
    receipt, removed = remove(tmp_path, byte_tokenizer, rows)
    assert receipt.num_documents == 1
    expected = shingle_sets(normalize_text(TEXT + " yes"), normalize_text(near + " yes"))
    assert expected >= MIN_JACCARD
    entry = removed["copy"]
    assert (entry["reason"], entry["earlier"], entry["similarity"]) == (
        "near duplicate",
        "first",
        round(expected, 3),
    )


def test_a_removed_document_removes_nothing_itself(tmp_path, byte_tokenizer):
    """`c` is like `b` but not like `a`; `b` is gone, so `c` stays."""
    b = TEXT.replace("word10 ", "x10 ")
    c = b.replace("word30 ", "x30 ").replace("word50 ", "x50 ")
    rows = [{"id": name, "prompt": text, "response": "y"} for name, text in (("a", TEXT), ("b", b), ("c", c))]
    assert shingle_sets(b, c) < MIN_JACCARD or shingle_sets(TEXT, c) < MIN_JACCARD
    _, removed = remove(tmp_path, byte_tokenizer, rows)
    assert set(removed) == {"b"}


def test_other_answers_and_a_common_instruction_make_no_repeat(tmp_path, byte_tokenizer):
    rows = [
        {"prompt": TEXT, "response": "one answer " * 3},
        {"prompt": TEXT.replace("word3", "other"), "response": " ".join(f"new{n}" for n in range(40))},
    ]
    system = {"role": "system", "content": " ".join(f"rule{n}" for n in range(300))}
    for n in range(3):
        turns = [{"role": "user", "content": f"What is {n} and one more?"}, {"role": "assistant", "content": str(n)}]
        rows.append({"messages": [system, *turns]})
    receipt, removed = remove(tmp_path, byte_tokenizer, rows)
    assert (receipt.num_documents, removed) == (5, {})


def test_generated_documents_are_compared_by_prompt_alone():
    prompt = ({"role": "user", "content": TEXT},)
    generated = Document(id="a", prompt=prompt, response="x", source="s", task="structured")
    assert TextBatch([generated]).read_compared() == [""]
    assert len(sign_texts([""]).shingles) == 0
