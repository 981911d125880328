"""Rows of `.jsonl`, `.jsonl.gz`, `.parquet` and `.csv` files, one at a time; a broken file is named with its row.

A byte-order mark and CRLF are accepted. What is refused: a Git-LFS pointer in place of data, a truncated file,
bytes that are not UTF-8, a lone surrogate, a file without rows, and a row above `MAX_ROW_BYTES`. A `.csv` file
(RFC 4180) begins with its columns' names, and every cell is text.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple

from ar2diff.errors import DataError

MAX_ROW_BYTES = 8_000_000
LFS_MARK = b"version https://git-lfs.github.com/spec/"
BOM = b"\xef\xbb\xbf"
SURROGATE = re.compile("[\ud800-\udfff]")


class Row(NamedTuple):
    """One record and its number, from 1: the line of a text file, the record of a parquet or csv file."""

    number: int
    content: dict[str, Any]


def row_error(path: Path, number: int | None, problem: str, fix: str) -> DataError:
    """The one form of all complaints about a data file."""
    where = f"{path.name}, row {number}: " if number is not None else f"{path.name}: "
    return DataError(where + problem, given=str(path), fix=fix)


def read_rows(path: Path, *, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row]:
    """Yield every row of `path`; memory does not grow with the file.

    Args:
        max_row_bytes: a larger row is taken for a fault.

    Raises:
        DataError: the file or a row cannot be read as what the name says; names file and row.
    """
    _check_file(path)
    read = READERS.get(path.suffix, _read_lines)
    rows = read(path, max_row_bytes)
    found = False
    for row in rows:
        found = True
        yield row
    if not found:
        raise row_error(path, None, "the file has no rows", "Fetch or make the file again")


def _check_file(path: Path) -> None:
    if not path.name.endswith((".jsonl", ".jsonl.gz", ".parquet", ".csv")):
        raise row_error(path, None, "unknown kind of data file", "Give a .jsonl, .jsonl.gz, .parquet or .csv file")
    try:
        with path.open("rb") as stream:
            head = stream.read(len(LFS_MARK))
    except OSError as error:
        raise row_error(path, None, f"cannot be opened: {error.strerror}", "Check the path") from None
    if not head:
        raise row_error(path, None, "the file is empty", "Fetch or make the file again")
    if head == LFS_MARK:
        problem = "a Git-LFS pointer, not the data it stands for"
        raise row_error(path, 1, problem, "Run `git lfs pull`, or fetch the file from its hub")


def _read_lines(path: Path, max_row_bytes: int) -> Iterator[Row]:
    with closing(gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as stream:
        number = 0
        while line := _read_line(stream, path, number + 1, max_row_bytes):
            number += 1
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                yield Row(number, _parse_line(line, path, number))


def _read_csv(path: Path, max_row_bytes: int) -> Iterator[Row]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            # An empty line is no row.
            for number, cells in enumerate(filter(None, csv.reader(stream, strict=True))):
                if number == 0:
                    names = _check_columns(cells, path)
                elif len(cells) != len(names):
                    problem = f"{len(cells)} cells under {len(names)} columns"
                    raise row_error(path, number, problem, "The file may be cut: fetch it again")
                else:
                    _check_size(sum(map(len, cells)), path, number, max_row_bytes)
                    yield Row(number, dict(zip(names, cells, strict=True)))
    except UnicodeDecodeError:
        raise row_error(path, number + 1, "not UTF-8", "Convert the file to UTF-8") from None
    except csv.Error as error:
        raise row_error(path, number + 1, f"not a row of csv: {error}", "Fetch or make the file again") from None


def _check_columns(names: list[str], path: Path) -> list[str]:
    if len(set(names)) < len(names):
        raise row_error(path, None, "two columns have one name", "Give each column a name of its own")
    return names


def _read_line(stream: "IO[bytes] | gzip.GzipFile", path: Path, number: int, max_row_bytes: int) -> bytes:
    try:
        line = stream.readline(max_row_bytes + 1)
    except (EOFError, OSError, zlib.error) as error:
        fix = "The file was cut or damaged on its way: fetch it again"
        raise row_error(path, number, f"cannot be decompressed: {error}", fix) from None
    _check_size(len(line), path, number, max_row_bytes)
    return line


def _check_size(size: int, path: Path, number: int, max_row_bytes: int) -> None:
    if size > max_row_bytes:
        problem = f"the row is larger than {max_row_bytes / 1e6:.0f} MB"
        raise row_error(path, number, problem, "Remove the row, or check that lines end where rows end")


def _parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}"
        raise row_error(path, number, problem, "Convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        problem = f"not a whole JSON object: {error}"
        raise row_error(path, number, problem, "The row may be cut: fetch or write the file again") from None
    if not isinstance(content, dict):
        fix = 'Write one object such as {"prompt": ..., "response": ...} a line'
        raise row_error(path, number, f"a JSON {type(content).__name__} where an object is needed", fix)
    # Only an escape can bring a lone surrogate into decoded text.
    if b"\\u" in line and _has_surrogate(content):
        raise row_error(path, number, "a lone surrogate, which is no character", "Replace the half pair in the text")
    return content


def _has_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(_has_surrogate(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(_has_surrogate, value))


def _read_parquet(path: Path, max_row_bytes: int) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for content in batch.to_pylist():
                    number += 1
                    size = sum(len(value) for value in content.values() if isinstance(value, str | bytes | list))
                    _check_size(size, path, number, max_row_bytes)
                    yield Row(number, content)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "The file was cut or damaged on its way: fetch it again"
        raise row_error(path, number + 1, f"not a readable parquet file: {first_line}", fix) from None


READERS = {".parquet": _read_parquet, ".csv": _read_csv}
