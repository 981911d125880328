"""Claims about the order of rows: seed and epoch decide it, never who reads, how many they are, or a restart."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.data.shards import ShardWriter
from ar2diff.data.stream import RowStream, draw_order
from ar2diff.data.tokenize import TokenizedDocument

SEEDS = st.integers(0, 2**53)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from ar2diff.data.documents import Document

    folder = tmp_path_factory.mktemp("order") / "shard"
    with ShardWriter(folder) as writer:
        for number in range(97):
            prompt = ({"role": "user", "content": "q"},)
            document = Document(id=str(number), prompt=prompt, response="a", source="s")
            writer.add(document, TokenizedDocument([number] * (3 + number * 7 % 11), 1))
        writer.finish({"files": writer.finish_arrays(), "eos_token_id": 9})
    return folder


@given(st.integers(1, 300), SEEDS, st.integers(0, 1000))
def test_every_epoch_is_a_permutation_that_seed_and_epoch_alone_decide(num_rows, seed, epoch):
    order = draw_order(num_rows, seed, epoch).tolist()
    assert sorted(order) == list(range(num_rows))
    assert order == draw_order(num_rows, seed, epoch).tolist()


@given(SEEDS, SEEDS, st.integers(0, 50), st.integers(0, 50))
def test_another_seed_or_epoch_is_another_order(seed, other, epoch, later):
    same = (seed, epoch) == (other, later)
    assert (draw_order(200, seed, epoch).tolist() == draw_order(200, other, later).tolist()) is same


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 8), st.integers(0, 60), st.integers(1, 60))
def test_ranks_share_the_rows_and_a_restart_anywhere_goes_on_with_the_same(folder, seed, num_ranks, start, count):
    stream = RowStream(folder, row_len=40, seed=seed)
    whole = [stream.row_id(index) for index in range(start, start + count)]
    shares = [
        [RowStream(folder, row_len=40, seed=seed).row_id(i) for i in range(start + rank, start + count, num_ranks)]
        for rank in range(num_ranks)
    ]
    turns = (shares[index % num_ranks][index // num_ranks] for index in range(count))
    assert list(islice(turns, count)) == whole


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 5))
def test_each_document_comes_once_an_epoch(folder, seed, num_epochs):
    stream = RowStream(folder, row_len=40, seed=seed)
    for epoch in range(num_epochs):
        indices = range(epoch * stream.num_rows, (epoch + 1) * stream.num_rows)
        seen = [document for index in indices for document in stream.documents_of(stream.row_id(index))]
        assert sorted(seen) == list(range(97))


def test_the_order_is_the_one_that_was_stored_with_earlier_runs():
    assert draw_order(12, 7, 3).tolist() == EXPECTED


EXPECTED = [5, 11, 7, 10, 2, 4, 8, 3, 0, 6, 9, 1]
