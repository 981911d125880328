"""Claims about broken files and odd documents at the command line: one line, file and row, nothing left behind."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from ar2diff.cli import run
from ar2diff.data.shards import TokenShard

GOOD = {"prompt": "What is blue?", "response": "The sky."}


@pytest.fixture
def prepare(tmp_path, byte_tokenizer, capsys):
    (tmp_path / "base").mkdir()
    byte_tokenizer.save(tmp_path / "base")

    def prepare_file(path, *options):
        command = ["prepare", str(tmp_path / "data"), "--tokenizer", str(tmp_path / "base")]
        code = run([*command, "--source", f"local:{path}", "--evaluation", "structured?count=1", *options])
        return code, capsys.readouterr().err

    return prepare_file


def line(row):
    return json.dumps(row).encode() + b"\n"


BROKEN = {
    "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n", "row 1: a Git-LFS"),
    "cut.jsonl": (line(GOOD) + line(GOOD)[:-9], "row 2: not a whole JSON object"),
    "latin1.jsonl": (line(GOOD) + '{"prompt": "é"}\n'.encode("latin1"), "row 2: not UTF-8: byte 0xe9"),
    "surrogate.jsonl": (line(GOOD) + line({"prompt": "\ud83d", "response": "x"}), "row 2: a lone surrogate"),
    "empty.jsonl": (b"", "the file is empty"),
    "blank.jsonl": (b"\r\n\n", "no rows"),
    "schema.jsonl": (line(GOOD) + line({"text": "x"}), "row 2: neither messages nor a prompt"),
    "kind.jsonl": (line(GOOD) + b"[1]\n", "row 2: a JSON list"),
    "large.jsonl": (line(GOOD) + line({"prompt": "x" * 10_000_000, "response": "y"}), "row 2: the row is larger"),
    "twice.jsonl": (line(GOOD | {"id": "a"}) * 2, "row 2: the id 'a' is also that of row 1"),
    "cut.jsonl.gz": (gzip.compress(line(GOOD) * 9)[:-12], "cannot be decompressed"),
    "cut.parquet": (b"PAR1 and then nothing", "not a readable parquet file"),
    "table.tsv": (b"a\tb\n", "unknown kind of data file"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("place", ["source", "blocklist"])
def test_a_broken_file_is_one_line_and_leaves_nothing(tmp_path, prepare, name, place):
    content, words = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content)
    good = tmp_path / "good-rows.jsonl"
    good.write_bytes(line(GOOD))
    code, said = prepare(path) if place == "source" else prepare(good, "--blocklist", str(path))
    lines = said.splitlines()
    assert code != 0
    assert len(lines) == 1
    assert words in lines[0]
    assert name in lines[0]
    assert len(lines[0]) < 500
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("data")]


def test_a_parquet_file_cut_anywhere_is_named(tmp_path, prepare):
    whole = tmp_path / "whole.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD] * 500), whole)
    for kept in (8, 200, whole.stat().st_size - 4):
        path = tmp_path / "rows.parquet"
        path.write_bytes(whole.read_bytes()[:kept])
        code, said = prepare(path)
        assert code != 0
        assert "rows.parquet, row 1: not a readable parquet file" in said


@pytest.mark.parametrize("rest", [b"\r\n", b"\n", b""])
def test_a_byte_order_mark_and_crlf_are_accepted(tmp_path, prepare, rest):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + line(GOOD).strip() + b"\r\n" + line(GOOD | {"prompt": "Other?"}).strip() + rest
    )
    assert prepare(path)[0] == 0
    assert len(TokenShard(tmp_path / "data")) == 2


ODD = {
    "empty response": {"prompt": "q1", "response": " \n\u3000"},
    "empty prompt": {"prompt": "\u200b".strip("\u200b") + " ", "response": "a"},
    "longer than max_document_len": {"prompt": "long " * 9000, "response": "a"},
}


def test_odd_documents_are_kept_or_dropped_with_a_reason(tmp_path, prepare):
    texts = ["\u202eright to left", "e\u0301\u0327", "\U0001f468\u200d\U0001f469", "\ufdfa" * 30, "ﬁ①²"]
    rows = [{"prompt": f"odd {text}", "response": text} for text in texts]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(line(row) for row in [*rows, *ODD.values()]))
    code, said = prepare(path, "--max-document-len", "800")
    assert code == 0, said
    shard = TokenShard(tmp_path / "data")
    assert shard.receipt["sources"][0]["dropped"] == dict.fromkeys(sorted(ODD), 1)
    assert len(shard) == len(texts)


def test_thousands_of_tiny_documents_and_a_giant_one_are_prepared_together(tmp_path, prepare):
    path = tmp_path / "a.jsonl"
    giant = {"prompt": "giant", "response": "word " * 300_000}
    path.write_bytes(b"".join(line({"prompt": str(n), "response": "."}) for n in range(6000)) + line(giant))
    assert prepare(path, "--max-document-len", "2000000")[0] == 0
    shard = TokenShard(tmp_path / "data")
    assert len(shard) == 6001
    assert int(shard.document_lens.max()) > 1_500_000


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lfs_pointer_math_test.jsonl", "row 1: a Git-LFS pointer"),
        ("empty.jsonl", "the file is empty"),
        ("latin1.jsonl", "row 2: not UTF-8"),
        ("lone_surrogate.jsonl", "row 2: a lone surrogate"),
        ("truncated_row.jsonl", "not a whole JSON object"),
    ],
)
def test_real_broken_files_are_one_line(tmp_path, prepare, shared_data, name, words):
    code, said = prepare(shared_data / "broken" / name)
    assert code != 0
    assert words in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "data").exists()
