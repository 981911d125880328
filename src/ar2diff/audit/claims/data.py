"""A5, A6, A8: rows, filters and decontamination, by doing the data stage again and comparing."""

from pathlib import Path
from typing import Any

from ar2diff.audit.claims.answers import check_answers
from ar2diff.audit.claims.told import check_recipe
from ar2diff.audit.data_rerun import DataRecords, Rerun, find_first_difference, read_config, read_records
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import DATA_DIR, RunFiles, line_of, read_object_lines
from ar2diff.data.config import SourceShare
from ar2diff.data.locate import describe_files, locate_files
from ar2diff.data.rows import read_rows
from ar2diff.data.shards import ARRAYS, COMPLETE_NAME, IDS_NAME, RECEIPT_NAME, REMOVED_NAME
from ar2diff.hashing import sha256_file, sha256_json

# Filters that are declared in so many words, on the raw row: recounted without the recipe's own code.
DECLARED_FILTERS = {"openr1_math": ("source is math", "source", "math")}
SHARD_FILES = (*(f"{name}.npy" for name in ARRAYS), IDS_NAME)
COUNTS = ("rows", "documents", "tokens", "dropped")
EVALUATION_REASON = "evaluation item"


def check_rows(run: RunFiles, result: ClaimResult, rerun: Rerun) -> None:
    """A5: the shard is byte for byte what the declared sources give."""
    records = read_records(run, result)
    if records is None:
        return
    _check_digests(run, records, result)
    check_recipe(run, "data", records.event, records.event.data.get("config"), result)
    for source in records.event.data.get("sources", []):
        _check_source_files(run, source, records, result)
        if str(source.get("source")).startswith("parent:"):
            check_answers(run, str(source["source"]), result)
    if rerun.folder is None or rerun.receipt is None:
        result.missing("the sources to make the rows again", found=rerun.obstacle or "", found_in=DATA_DIR)
        return
    both = (records.event.data["sources"], rerun.receipt["sources"])
    named, again = ([_name(entry) for entry in entries] for entries in both)
    where = line_of(records.event)
    result.equal("names of the sources", named, again, claimed_in=where, found_in="rows made again")
    here = {"claimed_in": f"{DATA_DIR}/", "found_in": "rows made again"}
    for name in SHARD_FILES:
        mine, theirs = records.folder / name, rerun.receipt["files"][name]
        if not mine.is_file():
            result.missing("a file of the shard", found_in=f"{DATA_DIR}/{name}")
        elif not result.equal(f"sha256 of {name}", sha256_file(mine), theirs, **here):
            found = find_first_difference(records.folder, rerun.folder)
            result.fail("every row follows from its source", found, found_in=f"{DATA_DIR}/{name}")


def _name(entry: dict[str, Any]) -> dict[str, Any]:
    """What a source is, without its counts (A6) and files."""
    return {name: value for name, value in entry.items() if name not in (*COUNTS, "files")}


def check_filters(run: RunFiles, result: ClaimResult, rerun: Rerun) -> None:
    """A6: rows dropped by declared filters, recounted on the sources, are as many as were logged."""
    records = read_records(run, result)
    if records is None:
        return
    for share, entry in zip(read_config(records.event.data).sources, records.event.data["sources"], strict=True):
        _recount(run, share, entry, records, result)
    if rerun.receipt is None:
        result.missing("the sources to apply the filters again", found=rerun.obstacle or "", found_in=DATA_DIR)
        return
    for claimed, found in zip(records.event.data["sources"], rerun.receipt["sources"], strict=True):
        for name in COUNTS:
            _equal(f"{name} of {claimed['source']}", claimed.get(name), found[name], records, result)
    for place, claimed in ((RECEIPT_NAME, records.receipt.get("sources")),):
        same = claimed == records.event.data["sources"]
        result.holds(
            "counts beside the shard",
            same,
            claimed="as logged",
            claimed_in=line_of(records.event),
            found="as logged" if same else "others",
            found_in=f"{DATA_DIR}/{place}",
        )


def check_decontamination(run: RunFiles, result: ClaimResult, rerun: Rerun) -> None:
    """A8: the declared rule, applied again, removes exactly the rows that were removed."""
    records = read_records(run, result)
    if records is None:
        return
    if rerun.folder is None or rerun.receipt is None:
        result.missing("the sources to decontaminate again", found=rerun.obstacle or "", found_in=DATA_DIR)
        return
    logged, again = records.event.data.get("decontamination", {}), rerun.receipt["decontamination"]
    for name in ("policies", "num_items", "evaluation", "removed"):
        _equal(f"decontamination: {name}", logged.get(name), again[name], records, result)
    if not (records.folder / REMOVED_NAME).is_file():
        result.missing("the list of removed rows", found_in=f"{DATA_DIR}/{REMOVED_NAME}")
        return
    mine = _removed(records.folder / REMOVED_NAME)
    theirs = _removed(rerun.folder / REMOVED_NAME)
    here = {"claimed_in": f"{DATA_DIR}/{REMOVED_NAME}", "found_in": "rule applied again"}
    result.equal("rows removed as evaluation items", len(mine), len(theirs), **here)
    result.equal("the removed rows, with item, rule and text", sha256_json(mine), sha256_json(theirs), **here)
    result.equal(
        "sha256 of the list of all removed rows",
        sha256_file(records.folder / REMOVED_NAME),
        rerun.receipt["files"][REMOVED_NAME],
        **here,
    )


def _removed(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_object_lines(path) if line.get("reason") == EVALUATION_REASON]


def _equal(what: str, claimed: object, found: object, records: DataRecords, result: ClaimResult) -> None:
    result.equal(what, claimed, found, claimed_in=line_of(records.event), found_in="sources read again")


def _check_digests(run: RunFiles, records: DataRecords, result: ClaimResult) -> None:
    here = {"claimed_in": line_of(records.event), "found_in": f"{DATA_DIR}/{RECEIPT_NAME}"}
    result.equal(
        "the receipt is the logged one", sha256_json(records.event.data), sha256_json(records.receipt), **here
    )
    files = records.event.data.get("files", {})
    result.equal(
        "digest over the shard's files",
        records.event.data.get("digest"),
        sha256_json(files),
        claimed_in=here["claimed_in"],
        found_in="its files",
    )
    for name, digest in files.items():
        path = records.folder / Path(name).name
        if path.is_file():
            result.equal(
                f"sha256 of {name}", digest, sha256_file(path), claimed_in=here["claimed_in"], found_in=run.name(path)
            )
        else:
            result.missing("a file of the shard", found_in=run.name(path))
    mark = records.folder / COMPLETE_NAME
    found = mark.read_text(encoding="utf-8").strip() if mark.is_file() else None
    result.equal(
        "the mark of a finished shard",
        found,
        sha256_file(records.folder / RECEIPT_NAME),
        claimed_in=run.name(mark),
        found_in=here["found_in"],
    )


def _check_source_files(run: RunFiles, entry: dict[str, Any], records: DataRecords, result: ClaimResult) -> None:
    """The files that the data stage read are those that were fetched."""
    source = str(entry.get("source"))
    folder = run.fetched_folders().get(source)
    if "files" not in entry or folder is None:
        return
    found = describe_files(locate_files(source, {source: folder}))
    result.equal(
        f"files read of {source}", entry["files"], found, claimed_in=line_of(records.event), found_in=run.name(folder)
    )


def _recount(
    run: RunFiles, share: SourceShare, entry: dict[str, Any], records: DataRecords, result: ClaimResult
) -> None:
    """Count a declared filter's rows on the raw source, and look for them among the kept ones."""
    if share.is_procedural or share.is_parent or share.recipe not in DECLARED_FILTERS:
        return
    reason, field, value = DECLARED_FILTERS[share.recipe]
    try:
        files = locate_files(share.source, run.fetched_folders())
    except Exception as error:  # whatever is wrong with a source, it cannot be recounted
        result.missing(f"the rows of {share.source}", found=str(error), found_in=DATA_DIR)
        return
    matching, left = set[str](), int(entry.get("rows", 0))
    for path in files:
        prefix = share.source if len(files) == 1 else f"{share.source}/{path.name}"
        for row in read_rows(path):
            left -= 1
            if left >= 0 and row.content.get(field) == value:
                matching.add(f"{prefix}#{row.number}")
    logged = entry.get("dropped", {}).get(reason, 0)
    result.equal(
        f"rows of {share.source} with {field} == {value!r}",
        logged,
        len(matching),
        claimed_in=line_of(records.event),
        found_in="raw rows",
    )
    kept = {str(line.get("source")) for line in read_object_lines(records.folder / IDS_NAME)}
    result.equal(
        f"kept rows with {field} == {value!r}",
        [],
        sorted(matching & kept)[:5],
        claimed_in="declared filter",
        found_in=f"{DATA_DIR}/{IDS_NAME}",
    )
