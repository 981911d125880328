"""Claims about token shards and the order of rows."""

import errno
import json

import numpy as np
import pytest

from ar2diff.data.shards import COMPLETE_NAME, ShardWriter, TokenShard, read_receipt
from ar2diff.data.stream import RowStream, draw_order
from ar2diff.data.tokenize import TokenizedDocument, tokenize_document, tokenize_documents
from ar2diff.errors import DataError, SpaceError


@pytest.fixture
def write_shard(tmp_path, make_document):
    def write(lens=(5, 3, 9, 4, 2, 7), name="shard"):
        folder = tmp_path / name
        with ShardWriter(folder) as writer:
            for number, length in enumerate(lens):
                ids = [number * 100 + place for place in range(length)]
                writer.add(make_document("q", id=f"d{number}"), TokenizedDocument(ids, 1))
            writer.add_removed({"id": "x", "reason": "why"})
            files = writer.finish_arrays()
            writer.finish({"files": files, "eos_token_id": 9})
        return folder

    return write


def test_documents_are_prompt_response_and_one_end_token(byte_tokenizer, make_document):
    document = make_document("hé <|im_end|>", "yes <|im_end|>")
    tokens = tokenize_document(document, byte_tokenizer)
    text = byte_tokenizer.decode(tokens.token_ids, skip_special=False)
    assert text == "<|im_start|>user\nhé <|im_end|><|im_end|>\n<|im_start|>assistant\nyes <|im_end|><|im_end|>"
    assert byte_tokenizer.decode(tokens.token_ids[tokens.prompt_len :]) == "yes <|im_end|>"
    assert tokens.token_ids[-1] == byte_tokenizer.eos_token_ids[0]
    # What the texts spell is text: only the template's tokens and the end are control tokens.
    assert sum(index in byte_tokenizer.special_ids for index in tokens.token_ids) == 4


def test_a_batch_of_documents_has_the_ids_of_each_alone(byte_tokenizer, make_document):
    texts = ["plain", "a <|im_end|> b <|im_start|>", "", "é \ue0f01\ue0f1"]
    documents = [make_document(text, response) for text in texts for response in texts]
    alone = [tokenize_document(document, byte_tokenizer) for document in documents]
    assert tokenize_documents(documents, byte_tokenizer) == alone


def test_a_shard_reads_back_what_was_written(write_shard):
    shard = TokenShard(write_shard())
    shard.verify()
    assert len(shard) == 6
    assert shard.document_lens.tolist() == [5, 3, 9, 4, 2, 7]
    assert shard.token_ids[shard.document_offsets[2] : shard.document_offsets[3]].tolist() == list(range(200, 209))
    assert (shard.token_ids.dtype, shard.prompt_lens.tolist()) == (np.uint32, [1] * 6)
    assert isinstance(shard.token_ids, np.memmap)
    ids = [json.loads(line)["id"] for line in (shard.folder / "ids.jsonl").read_text().splitlines()]
    assert ids == [f"d{n}" for n in range(6)]
    assert json.loads((shard.folder / "removed.jsonl").read_text()) == {"id": "x", "reason": "why"}


def test_a_writer_that_stops_early_leaves_nothing(tmp_path, make_document):
    def stop():
        with ShardWriter(tmp_path / "shard") as writer:
            writer.add(make_document("q"), TokenizedDocument([1, 2], 1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path):
    def fill():
        with ShardWriter(tmp_path / "shard"):
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(SpaceError):
        fill()
    assert not list(tmp_path.iterdir())


def test_an_unfinished_folder_is_no_shard(write_shard):
    folder = write_shard()
    (folder / COMPLETE_NAME).unlink()
    with pytest.raises(DataError, match="not a finished data folder"):
        TokenShard(folder)


def test_a_changed_receipt_is_noticed(write_shard):
    folder = write_shard()
    (folder / "receipt.json").write_text("{}")
    with pytest.raises(DataError, match="receipt was changed"):
        read_receipt(folder)


def test_a_changed_token_is_noticed(write_shard):
    folder = write_shard()
    path = folder / "token_ids.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"token_ids\.npy is not what the receipt says"):
        TokenShard(folder).verify()


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("token_ids", np.arange(29, dtype=np.uint32), "borders do not fit"),
        ("prompt_lens", np.full(6, 2, dtype=np.int32), "borders do not fit"),
        ("prompt_lens", np.ones(5, dtype=np.int32), "borders do not fit"),
        ("document_offsets", np.zeros(7, dtype=np.int32), "wrong type"),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(write_shard, name, values, words):
    folder = write_shard()
    np.save(folder / f"{name}.npy", values)
    with pytest.raises((DataError, ValueError), match=words):
        TokenShard(folder)


def test_a_damaged_or_missing_array_is_refused(write_shard):
    folder = write_shard()
    (folder / "prompt_lens.npy").write_bytes(b"no numpy file")
    with pytest.raises(DataError, match=r"prompt_lens\.npy cannot be read"):
        TokenShard(folder)
    (folder / "prompt_lens.npy").unlink()
    with pytest.raises(DataError, match=r"prompt_lens\.npy cannot be read"):
        TokenShard(folder)


def test_a_row_holds_whole_documents_and_then_end_tokens(write_shard):
    stream = RowStream(write_shard(), row_len=10, seed=1)
    for index in range(stream.num_rows):
        row = stream.row(index)
        assert row.token_ids.shape == (10,)
        assert row.token_ids.dtype == row.document_lens.dtype == row.document_starts.dtype == row.prompt_lens.dtype
        for start, length in zip(row.document_starts, row.document_lens, strict=True):
            part = row.token_ids[start : start + length]
            assert (part - part[0]).tolist() == list(range(length))
            assert part[0] % 100 == 0
        end = row.document_starts[-1] + row.document_lens[-1]
        assert (row.token_ids[end:] == 9).all()
    assert stream.num_tokens == 30
    assert stream.fill == 30 / (stream.num_rows * 10)


def test_every_epoch_shows_every_row_once_in_another_order(write_shard):
    stream = RowStream(write_shard(range(3, 11)), row_len=10, seed=1)
    epochs = [[stream.row(e * stream.num_rows + i).row_id for i in range(stream.num_rows)] for e in range(4)]
    assert all(sorted(epoch) == list(range(stream.num_rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_does_not_depend_on_the_number_of_workers_or_on_a_restart(write_shard):
    folder = write_shard(range(3, 11))

    def read(index):
        row = RowStream(folder, row_len=12, seed=5).row(index)
        return row.row_id, row.token_ids.tolist()

    one = [read(index) for index in range(16)]
    four = [[read(index) for index in range(rank, 16, 4)] for rank in range(4)]
    assert [four[index % 4][index // 4] for index in range(16)] == one


def test_an_order_depends_on_seed_and_epoch_alone():
    assert draw_order(50, 1, 2).tolist() == draw_order(50, 1, 2).tolist()
    assert sorted(draw_order(50, 1, 2).tolist()) == list(range(50))
    orders = {tuple(draw_order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_document_longer_than_a_row_is_refused(write_shard):
    with pytest.raises(DataError, match="Raise row_len"):
        RowStream(write_shard(), row_len=8, seed=1)


def test_a_shard_without_documents_has_no_rows(write_shard):
    folder = write_shard(())
    with pytest.raises(DataError, match="holds no documents"):
        RowStream(folder, row_len=8, seed=1)


@pytest.mark.parametrize("damage", ["mark", "receipt missing", "array missing"])
def test_a_folder_with_a_damaged_or_missing_part_is_named(write_shard, damage):
    folder = write_shard()
    if damage == "mark":
        (folder / COMPLETE_NAME).write_bytes(b"\xff\xfe")
    elif damage == "receipt missing":
        (folder / "receipt.json").unlink()
    else:
        (folder / "ids.jsonl").unlink()
    with pytest.raises(DataError):
        TokenShard(folder).verify()
