"""The forgeries that the audit must catch, each a function of the copied run and the key that signed it."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tampering import (
    checkpoint,
    cover_up,
    edit_array,
    edit_json,
    edit_lines,
    edit_weights,
    forge,
    of_type,
    plant_document,
    put,
    read_events,
    write_events,
)

from ar2diff.hashing import sha256_file, sha256_json
from ar2diff.provenance.git_objects import digest_file, object_id
from ar2diff.provenance.ledger import LEDGER_NAME
from ar2diff.provenance.signing import HEADS_NAME, HeadSigner
from ar2diff.sources.git_fetch import OBJECTS_NAME, read_git_objects, write_git_objects
from ar2diff.tasks.table import find_task

PICKLE = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94."
OTHER = "0" * 64


class Tamper(NamedTuple):
    """One forgery: what it attacks, what it does to the run, and how the claim must come out."""

    claim: str
    name: str
    act: Callable[[Path, HeadSigner], object]
    verdict: str = "fail"


def ledger(claim, name, edit, verdict="fail"):
    """A forgery of the ledger by the holder of the key."""
    return Tamper(claim, name, lambda run, signer: forge(run, signer, edit), verdict)


def data_of(kind, **changes):
    """An edit of the data of the last event of a type."""
    return lambda events: of_type(events, kind)[-1]["data"].update(changes)


def first_fetch(edit):
    """An edit of the base's fetch."""
    return lambda events: edit(of_type(events, "fetch")[0]["data"])


def all_fetches(edit):
    """An edit of all files of all fetches."""
    return lambda events: [edit(file) for e in of_type(events, "fetch") for file in e["data"]["files"]]


def replace_fetched(run, signer, folder, name, content):
    """Swap a fetched file, and make receipt and ledger say that it came like that."""
    put(run / folder / name, content)
    facts = {"sha256": sha256_file(run / folder / name), "size_bytes": len(content)}

    def fit(files):
        next(file for file in files if file["path"] == name).update(facts)

    edit_json(run / folder / "receipt.json", lambda receipt: fit(receipt["files"]))
    source = json.loads((run / folder / "receipt.json").read_text())["source"]

    def rewrite(events):
        for event in of_type(events, "fetch"):
            if event["data"]["source"] == source:
                fit(event["data"]["files"])

    forge(run, signer, rewrite)


def edit_listing(run, signer):
    """A file's id in the listing is changed, together with what the ledger says of the listing."""
    (run / "base" / OBJECTS_NAME).unlink()
    edit_json(run / "base/receipt.json", lambda receipt: receipt["tree"][0].update(oid="1" * 40))
    tree = json.loads((run / "base/receipt.json").read_text())["tree"]
    listing = {"entries": len(tree), "sha256": sha256_json(tree)}

    def rewrite(events):
        for event in of_type(events, "fetch"):
            if event["data"]["folder"] == "base":
                event["data"]["tree"] = listing

    forge(run, signer, rewrite)


def spoil_git_objects(run, signer):
    """A readme, its fetch records and the blob in the tree are changed; the commit is not."""
    objects = read_git_objects(run / "base")
    old, new = digest_file(run / "base/README.md").blob_id, object_id("blob", b"A good model.\n")
    replace_fetched(run, signer, "base", "README.md", b"A good model.\n")
    trees = [oid for oid, content in objects.items() if object_id("tree", content) == oid]
    for oid in trees:
        forged = objects.pop(oid).replace(bytes.fromhex(old), bytes.fromhex(new))
        objects[object_id("tree", forged)] = forged
    write_git_objects(run / "base", objects)


def drop_git_tree(run, signer):
    """A tree is gone."""
    objects = read_git_objects(run / "base")
    write_git_objects(run / "base", {k: v for k, v in objects.items() if object_id("tree", v) != k})


def move_base_fetch(events):
    """The base is fetched after it was trained from."""
    fetches = [e for e in of_type(events, "fetch") if e["data"]["folder"] == "base"]
    for event in fetches:
        events.remove(event)
    events.append(fetches[0])


def drop_base_fetch(events):
    """The base was declared, and no log of its download is kept."""
    events[:] = [e for e in events if not (e["type"] == "fetch" and e["data"]["folder"] == "base")]


def mark_all_cached(events):
    """Nothing was ever downloaded: it was there."""
    for event in of_type(events, "fetch"):
        event["data"]["cached"] = True


def write_archive(run, signer):
    """A torch archive, which is a zip that holds a pickle."""
    with zipfile.ZipFile(checkpoint(run) / "old_weights.bin", "w") as archive:
        archive.writestr("archive/data.pkl", PICKLE)


def plant_item(run, signer):
    """An evaluation item among the training documents, everything else made to fit."""
    problem = find_task("structured").build_problems(split="eval", count=4)[2]
    plant_document(run, f"{problem.passage or problem.prompt_text}\n{problem.reference}")
    cover_up(run, signer)


def plant_blocked_row(run, signer):
    """A row of the blocklist file, reworded around the edges."""
    plant_document(run, "Please say: what is the capital of the island where the blue lighthouse stands now? Port.")
    cover_up(run, signer)


def swap_sample(run, signer):
    """An answer to a problem that was never kept out."""
    edit_lines(run / "eval_samples.jsonl", lambda lines: lines[0].update(problem_id="structured/eval/table-9999"))


def count_in_receipt(edit):
    """Change the counts that the data stage reports, beside the shard and in the ledger."""
    return lambda run, signer: cover_up(run, signer, edit)


def edit_source(index, **changes):
    """An edit of a source's counts."""
    return lambda content: content["sources"][index].update(changes)


def relabel_kept_row(run, signer):
    """A kept document claims to be a row that the declared filter excludes."""

    def relabel(lines):
        line = next(line for line in lines if "datasets/maker/math" in line["source"])
        line["source"] = line["source"].rpartition("#")[0] + "#2"

    edit_lines(run / "data/ids.jsonl", relabel)
    cover_up(run, signer)


def removed(edit):
    """Change the list of removed rows, everything else made to fit."""

    def act(run, signer):
        edit_lines(run / "data/removed.jsonl", edit)
        cover_up(run, signer)

    return act


def drop_evaluation_row(lines):
    """Forget that a row was removed."""
    lines[:] = [line for line in lines if line["reason"] != "evaluation item"]


def rename_rule(lines):
    """Another rule for the same row."""
    next(line for line in lines if line["reason"] == "evaluation item")["rule"] = "fuzzy"


def steps(edit):
    """Change the step log, and the digest of it that the ledger holds."""

    def act(run, signer):
        edit_lines(run / "metrics.jsonl", edit)
        forge(run, signer, data_of("train_finished", metrics_sha256=sha256_file(run / "metrics.jsonl")))

    return act


def shard(name, edit, *, covered=True):
    """Change an array of the training shard."""

    def act(run, signer):
        edit_array(run / "data" / f"{name}.npy", edit)
        if covered:
            cover_up(run, signer)

    return act


def set_at(values, at, value):
    """Assign one element."""
    values[at] = value


def downloads(old, new):
    """Edit DOWNLOADS.md by hand."""

    def act(run, signer):
        path = run / "DOWNLOADS.md"
        text = path.read_text()
        assert old in text
        put(path, text.replace(old, new, 1))

    return act


def wrong_byte_count(run, signer):
    """The byte count of the weights is one that no file has."""
    path = run / "DOWNLOADS.md"
    size = f"{(run / 'base/model.safetensors').stat().st_size:,}"
    put(path, path.read_text().replace(size, "5,033,635,288"))


def declared_download(run, signer):
    """A download that somebody wrote down, and that nothing logged."""
    path = run / "DOWNLOADS.md"
    put(path, path.read_text() + "\n## hub:maker/other@main\n\nFetched with the hub's own client.\n")


def copy_checkpoint(run, signer):
    """A checkpoint that no training saved."""
    shutil.copytree(checkpoint(run), run / "checkpoints/step-000009")


def weights(edit):
    """Change the shipped tensors."""
    return lambda run, signer: edit_weights(run, edit)


def config(edit):
    """Change the shipped config.json."""
    return lambda run, signer: edit_json(checkpoint(run) / "config.json", edit)


def silence_attention(tensors):
    """No position hears another."""
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] = tensors[name] * 0


def rename(tensors):
    """A tensor under another name."""
    tensors["model.norm2.weight"] = tensors.pop("model.norm.weight")


def samples(edit):
    """Change the kept answers, and the digest of them that the ledger holds."""

    def act(run, signer):
        edit_lines(run / "eval_samples.jsonl", edit)
        entry = {"path": "eval_samples.jsonl", "sha256": sha256_file(run / "eval_samples.jsonl")}
        forge(run, signer, data_of("evaluate", samples=entry))

    return act


def report(edit):
    """Change the report, and the digest of it that the ledger holds."""

    def act(run, signer):
        edit_json(run / "eval.json", edit)
        entry = {"path": "eval.json", "sha256": sha256_file(run / "eval.json")}
        forge(run, signer, data_of("evaluate", report=entry))

    return act


def code(edit):
    """Change what the ledger says of the code that trained."""
    return lambda events: [edit(event["data"]) for event in of_type(events, "code")]


def rechain(edit):
    """Edit the ledger without the key."""

    def act(run, signer):
        events = read_events(run)
        edit(events)
        write_events(run, events)

    return act


def cut_lines(name, count):
    """Take lines off a file's end."""

    def act(run, signer):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        put(run / name, b"".join(lines[:-count]))

    return act


def swap_lines(run, signer):
    """Two lines of the ledger change places."""
    lines = (run / LEDGER_NAME).read_bytes().splitlines(keepends=True)
    lines[4], lines[5] = lines[5], lines[4]
    put(run / LEDGER_NAME, b"".join(lines))


def sign_with_other_key(run, signer):
    """The heads are signed anew by somebody else."""
    forge(run, HeadSigner.generate(), lambda events: None)


def spoil_signature(run, signer):
    """One signature is of something else."""
    lines = [json.loads(line) for line in (run / HEADS_NAME).read_text().splitlines()]
    lines[1]["payload"] = lines[0]["payload"]
    put(run / HEADS_NAME, "".join(json.dumps(line) + "\n" for line in lines))
