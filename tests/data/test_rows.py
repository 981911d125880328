"""Claims about reading data files: what is accepted, and how each broken file is named."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from ar2diff.data import rows
from ar2diff.data.locate import locate_files
from ar2diff.data.rows import read_rows
from ar2diff.errors import DataError

ROWS = [{"prompt": f"q{i}", "response": "é\u2028x"} for i in range(5)]


def complaint(path):
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    text = caught.value.one_line()
    assert path.name in text
    assert "\n" not in text
    assert caught.value.fix
    return text


def test_the_three_formats_give_equal_rows(tmp_path, write_jsonl):
    plain = write_jsonl("a.jsonl", ROWS)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    read = [list(read_rows(path)) for path in (plain, packed, table)]
    assert read[0] == read[1] == read[2]
    assert [row.content for row in read[0]] == ROWS
    assert [row.number for row in read[0]] == [1, 2, 3, 4, 5]


def test_a_byte_order_mark_crlf_and_empty_lines_are_accepted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert [(row.number, row.content["a"]) for row in read_rows(path)] == [(1, 1), (3, 2)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "no rows"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "row 1: a Git-LFS pointer"),
        (b'{"a": 1}\n{"a": "caf\xe9"}\n', "row 2: not UTF-8: byte 0xe9 at position 10"),
        (b'{"a": 1}\n{"a": "cut', "row 2: not a whole JSON object"),
        (b'{"a": 1}\n[1]\n', "row 2: a JSON list where an object is needed"),
        (b'{"a": "\\ud83d"}\n', "row 1: a lone surrogate"),
        (b'{"a": [{"\\udc00": 1}]}\n', "row 1: a lone surrogate"),
        (b'{"a": ' + b"[" * 100_000, "row 1: not a whole JSON object"),
    ],
)
def test_a_broken_text_file_is_named_with_its_row(tmp_path, content, words):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    assert words in complaint(path)


def test_a_pair_of_surrogate_escapes_is_one_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\\ud83d\\ude00"}\n')
    assert next(read_rows(path)).content == {"a": "\U0001f600"}


def test_a_row_of_ten_megabytes_is_refused_without_reading_it_all(tmp_path):
    path = tmp_path / "big.jsonl"
    path.write_text('{"a": 1}\n' + json.dumps({"a": "x" * 10_000_000}) + "\n")
    assert "row 2: the row is larger than 8 MB" in complaint(path)
    table = tmp_path / "big.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x", "y" * 10_000_000]}), table)
    assert "row 2: the row is larger than 8 MB" in complaint(table)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_parquet_or_gzip_file_is_named(tmp_path, kept):
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS * 100), table)
    table.write_bytes(table.read_bytes()[: int(kept * table.stat().st_size)])
    assert "not a readable parquet file" in complaint(table)
    packed = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(("\n".join(json.dumps({"a": i * 7919 % 1009}) for i in range(3000))).encode())
    packed.write_bytes(whole[: int(kept * len(whole))])
    assert "row " in complaint(packed)


def test_a_file_that_is_no_gzip_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b'{"a": 1}\n')
    assert "row 1: cannot be decompressed" in complaint(path)


def test_an_unknown_suffix_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "a.tsv").write_text("a\n1\n")
    assert "unknown kind of data file" in complaint(tmp_path / "a.tsv")
    assert "cannot be opened" in complaint(tmp_path / "none.jsonl")


def test_reading_does_not_wait_for_the_whole_file(tmp_path, write_jsonl, monkeypatch):
    path = write_jsonl("a.jsonl", ROWS)
    path.write_bytes(path.read_bytes() + b"broken")
    first = next(iter(read_rows(path)))
    assert first.content == ROWS[0]
    assert rows.MAX_ROW_BYTES < 10_000_000


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
def test_real_broken_files_are_named_with_their_row(shared_data, name, words):
    text = complaint(shared_data / "broken" / name)
    assert words in text
    assert len(text) < 400


@pytest.mark.shared_data
def test_a_real_file_with_byte_order_mark_and_crlf_is_read(shared_data):
    assert len(list(read_rows(shared_data / "broken" / "bom_crlf.jsonl"))) == 3


def write_csv(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    return path


def test_a_csv_file_gives_its_cells_as_text_under_its_columns(tmp_path):
    content = '\ufeffQuestion,Answer\r\n"two\nlines, ""quoted""",7\r\nŝ,\r\n'.encode()
    rows = list(read_rows(write_csv(tmp_path, content)))
    assert [(row.number, row.content) for row in rows] == [
        (1, {"Question": 'two\nlines, "quoted"', "Answer": "7"}),
        (2, {"Question": "ŝ", "Answer": ""}),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n3\n", "row 2: 1 cells under 2 columns"),
        (b'a,b\n1,"2\n', "row 1: not a row of csv"),
        (b"a,b,a\n1,2,3\n", "two columns have one name"),
        (b"a\n\xff\n", "not UTF-8"),
        (b"a,b\n", "the file has no rows"),
        (b'a\n"' + b"x" * 200_000 + b'"\n', "row 1: not a row of csv: field larger"),
    ],
)
def test_a_broken_csv_file_is_named_with_its_row(tmp_path, content, said):
    with pytest.raises(DataError, match=said):
        list(read_rows(write_csv(tmp_path, content)))


def test_a_table_beside_data_is_no_data_and_alone_it_is(tmp_path):
    write_csv(tmp_path, b"a\n1\n")
    assert [path.name for path in locate_files(f"local:{tmp_path}", {})] == ["rows.csv"]
    (tmp_path / "data.jsonl").write_text("{}\n")
    assert [path.name for path in locate_files(f"local:{tmp_path}", {})] == ["data.jsonl"]


def test_empty_lines_of_a_csv_file_are_no_rows(tmp_path):
    rows = read_rows(write_csv(tmp_path, b"\na,b\n1,2\n\n3,4\n\n"))
    assert [row.content for row in rows] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
