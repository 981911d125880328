"""Claims about packing documents into rows."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ar2diff.data import packing
from ar2diff.data.packing import pack_documents
from ar2diff.errors import DataError


def check_rows(rows, lens, row_len):
    assert sorted(index for row in rows for index in row) == list(range(len(lens)))
    assert all(sum(lens[index] for index in row) <= row_len for row in rows)


@given(st.lists(st.integers(1, 40), max_size=60))
def test_every_document_is_whole_in_exactly_one_row(lens):
    rows = pack_documents(lens, 40)
    check_rows(rows, lens, 40)
    assert rows == pack_documents(lens, 40)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=40))
def test_at_most_one_row_is_half_empty(lens):
    rows = pack_documents(lens, 40)
    assert sum(sum(lens[i] for i in row) <= 20 for row in rows) <= 1


@pytest.mark.parametrize("row_len", [2048, 4096])
def test_realistic_lengths_fill_more_than_98_percent(row_len):
    draw = random.Random(5)
    lens = [max(20, min(row_len, int(draw.lognormvariate(5.8, 0.8)))) for _ in range(4000)]
    rows = pack_documents(lens, row_len)
    check_rows(rows, lens, row_len)
    assert sum(lens) / (len(rows) * row_len) > 0.98


def test_short_problems_fill_rows_of_1024_by_more_than_98_percent():
    draw = random.Random(6)
    lens = [draw.choice([max(70, int(draw.gauss(131, 22))), max(50, int(draw.gauss(80, 15)))]) for _ in range(480)]
    rows = pack_documents(lens, 1024)
    check_rows(rows, lens, 1024)
    assert sum(lens) / (len(rows) * 1024) > 0.98


def test_a_better_fill_than_longest_first_is_found():
    lens = [6, 5, 5, 4, 4, 3, 3]
    assert len(pack_documents(lens, 10)) == 3
    assert len(pack_documents([8, 7, 6, 5, 4, 3, 3], 12)) == 3


def test_no_row_is_filled_by_the_rarer_of_two_sources_alone():
    draw = random.Random(7)
    lens = [draw.randint(100, 180) for _ in range(900)] + [draw.randint(50, 90) for _ in range(100)]
    rows = pack_documents(lens, 512)
    check_rows(rows, lens, 512)
    assert sum(lens) / (len(rows) * 512) > 0.98
    rare = [sum(index >= 900 for index in row) / len(row) for row in rows]
    # A tenth of the documents; best fit alone makes a dozen rows of nothing else.
    assert max(rare) <= 0.75
    assert sum(share > 0.5 for share in rare) <= len(rows) // 50


def test_sources_of_equal_lengths_are_spread_over_the_rows():
    rows = pack_documents([100] * 400 + [100] * 40, 1000)
    assert max(sum(index >= 400 for index in row) for row in rows) <= 3


def test_documents_that_hardly_fit_together_are_packed_as_densely_as_ever():
    # Pairs of 60 and 40 fill a row; neighbours would not find each other within a window.
    lens = [60] * 300 + [40] * 300
    rows = pack_documents(lens, 100)
    check_rows(rows, lens, 100)
    assert len(rows) == 300
    lens = [51 + index % 49 for index in range(400)]
    assert len(pack_documents(lens, 100)) == 400


def test_mixing_is_given_up_where_it_would_cost_rows():
    draw = random.Random(9)
    lens = [draw.randint(200, 300) for _ in range(600)] + [draw.randint(20, 60) for _ in range(200)]
    rows = pack_documents(lens, 512)
    check_rows(rows, lens, 512)
    assert sum(lens) / (len(rows) * 512) > 0.99


def test_many_documents_are_packed_without_the_exact_search(monkeypatch):
    monkeypatch.setattr(packing, "MAX_DOCUMENTS_EXACT", 100)
    draw = random.Random(8)
    lens = [draw.randint(20, 200) for _ in range(2000)]
    rows = pack_documents(lens, 1024)
    check_rows(rows, lens, 1024)
    assert sum(lens) / (len(rows) * 1024) > 0.98


@pytest.mark.parametrize("length", [0, 11])
def test_a_document_that_fits_no_row_is_refused(length):
    with pytest.raises(DataError, match=f"document 1 has {length} tokens and a row 10"):
        pack_documents([5, length], 10)


def test_no_documents_make_no_rows():
    assert pack_documents([], 10) == []
