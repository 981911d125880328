"""Every way of falsifying a run that is tried here is caught by the claim that it attacks."""

import pytest
from forgeries import (
    OTHER,
    PICKLE,
    Tamper,
    all_fetches,
    code,
    config,
    copy_checkpoint,
    count_in_receipt,
    cut_lines,
    data_of,
    declared_download,
    downloads,
    drop_base_fetch,
    drop_evaluation_row,
    drop_git_tree,
    edit_listing,
    edit_source,
    first_fetch,
    ledger,
    mark_all_cached,
    move_base_fetch,
    plant_blocked_row,
    plant_item,
    rechain,
    relabel_kept_row,
    removed,
    rename,
    rename_rule,
    replace_fetched,
    report,
    samples,
    set_at,
    shard,
    sign_with_other_key,
    silence_attention,
    spoil_git_objects,
    spoil_signature,
    steps,
    swap_lines,
    swap_sample,
    weights,
    write_archive,
    wrong_byte_count,
)
from tampering import checkpoint, edit_json, edit_lines, flip, of_type, put

from ar2diff.audit.verify import audit_run
from ar2diff.provenance.ledger import LEDGER_NAME
from ar2diff.provenance.signing import HEADS_NAME

TAMPERS = [
    Tamper("A1", "a bit of the weights", lambda run, _: flip(run / "base/model.safetensors")),
    Tamper(
        "A1",
        "other weights with fitting records",
        lambda run, s: replace_fetched(
            run, s, "base", "model.safetensors", (run / "base/model.safetensors").read_bytes()[:-1] + b"\1"
        ),
    ),
    Tamper(
        "A1",
        "another readme with fitting records",
        lambda run, s: replace_fetched(run, s, "base", "README.md", b"A good model.\n"),
    ),
    Tamper("A1", "a file more", lambda run, _: put(run / "base/extra.json", "{}")),
    Tamper("A1", "a file less", lambda run, _: (run / "base/config.json").unlink(), "evidence missing"),
    Tamper("A1", "a bit of the data set", lambda run, _: flip(run / "sources/0/data/train-0.parquet", 200)),
    Tamper("A1", "git objects of other files", spoil_git_objects),
    Tamper("A1", "git objects that lack a tree", drop_git_tree, "evidence missing"),
    Tamper("A1", "another listing, without git objects", edit_listing),
    ledger("A1", "a branch for a pin", first_fetch(lambda data: data.update(source="hub:maker/tiny@main"))),
    ledger("A1", "another revision", first_fetch(lambda data: data.update(revision="2" * 40))),
    ledger("A2", "the past run: a download declared without a log", drop_base_fetch),
    ledger("A2", "a download after its use", move_base_fetch),
    ledger("A2", "an answer that failed", all_fetches(lambda file: file.update(status=404, url="http://hub/x"))),
    ledger("A2", "no answer kept", all_fetches(lambda file: file.update(status=None)), "evidence missing"),
    ledger("A2", "everything there already", mark_all_cached, "evidence missing"),
    Tamper("A2", "a source that nobody fetched", lambda run, _: put(run / "sources/7/more.jsonl", "{}\n")),
    ledger("A3", "another base root", data_of("train_started", base_tensor_root=OTHER)),
    ledger("A3", "another live root", data_of("train_started", live_tensor_root=OTHER)),
    ledger("A3", "a tensor that was missing", data_of("train_started", missing=["model.norm.weight"])),
    ledger("A3", "another parent evaluated", data_of("evaluate", roots={"parent": OTHER, "converted": OTHER})),
    Tamper(
        "A3",
        "another run.json",
        lambda run, _: edit_json(run / "run.json", lambda c: c.update(base_tensor_root=OTHER)),
    ),
    Tamper("A3", "other weights in the base", lambda run, _: flip(run / "base/model.safetensors")),
    Tamper("A4", "a pickle called README", lambda run, _: put(run / "base/README.md", PICKLE)),
    Tamper("A4", "a torch archive in a checkpoint", write_archive),
    Tamper("A4", "binary rows", lambda run, _: put(run / "sources/1/chat.jsonl", b"\0\1\2")),
    Tamper("A4", "weights of another format", lambda run, _: put(run / "base/model.safetensors", b"GGUF" * 9)),
    Tamper("A4", "a link", lambda run, _: (run / "base/vocab.json").symlink_to("/etc/hostname")),
    Tamper(
        "A4",
        "pickled objects in an array",
        lambda run, _: put(run / "data/x.npy", b"\x93NUMPY\1\0v\0{'descr': '|O', }"),
    ),
    ledger("A4", "an object unpickled", data_of("stage_surroundings", unpickled=["posix.system"])),
    ledger(
        "A4",
        "no word of unpickling",
        lambda e: [e.remove(x) for x in of_type(e, "stage_surroundings")],
        "evidence missing",
    ),
    Tamper("A5", "a token", shard("token_ids", lambda v: set_at(v, 9, 65))),
    Tamper("A5", "a token, not covered up", shard("token_ids", lambda v: set_at(v, 9, 65), covered=False)),
    Tamper("A5", "where a prompt ends", shard("prompt_lens", lambda v: set_at(v, 0, 5))),
    Tamper("A5", "whose row it is", relabel_kept_row),
    ledger(
        "A5",
        "another count of documents",
        lambda e: of_type(e, "prepare")[0]["data"]["config"]["sources"][2].update(count=7),
    ),
    Tamper(
        "A5",
        "a source row",
        lambda run, s: replace_fetched(
            run, s, "sources/1", "chat.jsonl", (run / "sources/1/chat.jsonl").read_bytes().replace(b"green", b"mauve")
        ),
    ),
    Tamper("A6", "fewer skipped rows", count_in_receipt(edit_source(0, dropped={"source is math": 2}))),
    Tamper("A6", "other row counts", count_in_receipt(edit_source(0, rows=13))),
    Tamper("A6", "other document counts", count_in_receipt(edit_source(2, documents=9))),
    Tamper("A6", "a kept row that is excluded", relabel_kept_row),
    Tamper("A7", "an evaluation item trained on", plant_item),
    Tamper("A7", "a blocked row trained on, reworded", plant_blocked_row),
    Tamper("A7", "an evaluated problem that was not kept out", swap_sample),
    ledger(
        "A7",
        "a narrower blocklist",
        lambda e: of_type(e, "prepare")[0]["data"]["config"]["evaluation"][0].update(count=1),
    ),
    ledger(
        "A7",
        "a blocklist file that is not where it was",
        lambda e: of_type(e, "prepare")[0]["data"]["config"].update(blocklist_files=["/nowhere/kept_out.jsonl"]),
        "evidence missing",
    ),
    Tamper("A8", "a removal forgotten", removed(drop_evaluation_row)),
    Tamper("A8", "another rule", removed(rename_rule)),
    Tamper("A8", "another list of all removals", removed(lambda lines: lines.pop())),
    ledger(
        "A8",
        "more items than there are",
        lambda e: of_type(e, "prepare")[0]["data"]["decontamination"].update(num_items=500),
    ),
    Tamper("A9", "other rows", steps(lambda lines: lines[2].update(row_ids=[99]))),
    Tamper("A9", "another digest", steps(lambda lines: lines[4].update(batch_sha256=OTHER))),
    Tamper("A9", "another block size", steps(lambda lines: lines[0].update(block_size=4))),
    Tamper("A9", "a step less", steps(lambda lines: lines.pop(3))),
    Tamper(
        "A9",
        "a better loss",
        lambda run, _: edit_lines(run / "metrics.jsonl", lambda c: c[5].update(diffusion_loss=0.1)),
    ),
    ledger("A9", "another seed", lambda e: of_type(e, "train_started")[-1]["data"]["config"].update(seed=1)),
    ledger(
        "A10",
        "other weights at the resume",
        lambda e: of_type(e, "train_started")[-1]["data"]["resumed"].update(tensor_root=OTHER),
    ),
    ledger(
        "A10",
        "another optimizer state",
        lambda e: of_type(e, "train_started")[-1]["data"]["resumed"].update(state_sha256=OTHER),
    ),
    ledger("A10", "a resume from another step", data_of("train_started", step=2)),
    ledger("A10", "a resume from nowhere", data_of("train_started", step=5)),
    ledger("A10", "a resume without its root", data_of("train_started", resumed=None), "evidence missing"),
    Tamper("A11", "the past run: a byte count that no file has", wrong_byte_count),
    Tamper("A11", "the past run: a download declared without a log", declared_download),
    Tamper("A11", "another time of download", downloads("UTC", "CET")),
    Tamper(
        "A11",
        "another architecture",
        lambda run, _: edit_json(run / "architecture.json", lambda c: c.update(base="a bigger one")),
    ),
    Tamper("A11", "a bit of the weights", lambda run, _: flip(checkpoint(run) / "model.safetensors")),
    Tamper("A11", "another tokenizer", lambda run, _: put(checkpoint(run) / "tokenizer.json", "{}")),
    Tamper("A11", "a checkpoint that nobody saved", copy_checkpoint),
    Tamper("A11", "another averaged model", lambda run, _: flip(run / "averaged/model.safetensors")),
    ledger("A11", "another root saved", data_of("checkpoint_saved", tensor_root=OTHER)),
    ledger("A11", "another end of training", data_of("train_finished", tensor_root=OTHER)),
    *(
        Tamper(
            "A11",
            f"{name} edited by hand",
            lambda run, _, name=name: put(run / name, (run / name).read_bytes() + b" "),
        )
        for name in ("MODEL_CARD.md", "bom.cdx.json", "croissant.json")
    ),
    Tamper(
        "A11",
        "other line ends",
        lambda run, _: put(run / "DOWNLOADS.md", (run / "DOWNLOADS.md").read_bytes().replace(b"\n", b"\r\n")),
    ),
    Tamper("A12", "a tensor less", weights(lambda t: t.pop("model.norm.weight"))),
    Tamper("A12", "a tensor more", weights(lambda t: t.update(extra=t["model.norm.weight"]))),
    Tamper("A12", "a tensor under another name", weights(rename)),
    Tamper("A12", "half precision", weights(lambda t: t.update({k: v.astype("float16") for k, v in t.items()}))),
    Tamper("A12", "another width", config(lambda c: c.update(intermediate_size=64))),
    Tamper("A12", "another mask", config(lambda c: c["ar2diff"].update(mask_token_id=7))),
    Tamper("A14", "no attention between positions", weights(silence_attention)),
    Tamper("A14", "no diffusion settings", config(lambda c: c.pop("ar2diff"))),
    Tamper("A14", "blocks of one", config(lambda c: c["ar2diff"].update(block_size=1, trained_block_sizes=[1]))),
    Tamper("A14", "weights that are no numbers", weights(lambda t: set_at(t["model.norm.weight"], 0, float("nan")))),
    ledger("A15", "a token at hand", data_of("session_started", credential_names=["HF_TOKEN"]), "evidence missing"),
    ledger("A15", "another provider's address", data_of("session_started", provider_url_names=["OPENAI_BASE_URL"])),
    ledger(
        "A15", "an authorization sent", all_fetches(lambda f: f.update(request_headers=["host", "Authorization"]))
    ),
    ledger(
        "A15",
        "no word of the environment",
        lambda e: [e.remove(x) for x in of_type(e, "session_started")],
        "evidence missing",
    ),
    ledger(
        "A15",
        "a token at hand in one stage",
        data_of("stage_surroundings", credential_names=["OPENAI_API_KEY"]),
        "evidence missing",
    ),
    ledger("A16", "another torch", code(lambda data: data["libraries"]["torch"].update(files_sha256=OTHER))),
    ledger("A16", "another trainer", code(lambda data: data["files"].update({"train/trainer.py": OTHER}))),
    ledger("A16", "a file that is not shipped", code(lambda data: data["files"].update({"train/secret.py": OTHER}))),
    ledger("A16", "a list that is not the logged one", code(lambda data: data.update(root=OTHER))),
    ledger(
        "A16", "an older version", code(lambda data: data["versions"].update(ar2diff="0.0.0")), "evidence missing"
    ),
    Tamper("A17", "a grade", samples(lambda lines: lines[0].update(correct=not lines[0]["correct"]))),
    Tamper("A17", "a better text", samples(lambda lines: lines[0].update(finish_reason="stop", correct=True))),
    Tamper("A17", "an answer less", samples(lambda lines: lines.pop())),
    Tamper("A17", "a better score", report(lambda c: c["scores"][0].update(num_correct=2, accuracy=1.0))),
    Tamper(
        "A17", "another report", lambda run, _: edit_json(run / "eval.json", lambda c: c.update(bits_per_token={}))
    ),
    Tamper(
        "A18",
        "other line ends",
        lambda run, _: put(run / LEDGER_NAME, (run / LEDGER_NAME).read_bytes().replace(b"\n", b"\r\n")),
    ),
    Tamper("A18", "a byte of a line", lambda run, _: flip(run / LEDGER_NAME, 300)),
    Tamper("A18", "the last line cut off", cut_lines(LEDGER_NAME, 1)),
    Tamper(
        "A18",
        "the end of a stage cut off, and the signature with it",
        lambda run, s: [cut_lines(LEDGER_NAME, 3)(run, s), cut_lines(HEADS_NAME, 1)(run, s)],
    ),
    # Cut back to an earlier signed head a ledger is whole in itself; the files that are left tell.
    Tamper(
        "A17",
        "the evaluation cut out of the ledger with its signature",
        lambda run, s: [cut_lines(LEDGER_NAME, 2)(run, s), cut_lines(HEADS_NAME, 1)(run, s)],
    ),
    Tamper("A18", "an event changed and chained anew", rechain(data_of("train_finished", elapsed_s=1.5))),
    Tamper("A18", "lines that change places", swap_lines),
    Tamper(
        "A18", "half a line more", lambda run, _: put(run / LEDGER_NAME, (run / LEDGER_NAME).read_bytes() + b'{"seq"')
    ),
    Tamper("A18", "no signatures", lambda run, _: (run / HEADS_NAME).unlink()),
    Tamper("A18", "somebody else's signatures", sign_with_other_key),
    Tamper("A18", "a signature of something else", spoil_signature),
    Tamper("A18", "another run's name", rechain(lambda events: events[0]["data"].update(run_id="best"))),
]


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: f"{tamper.claim}: {tamper.name}")
def test_the_claim_that_a_forgery_attacks_catches_it(tamper, copied, made_run):
    tamper.act(copied, made_run.signer)
    result = audit_run(copied, only=(tamper.claim,)).find(tamper.claim)
    assert result.verdict == tamper.verdict, result.as_json()
    assert audit_run(made_run.folder, only=(tamper.claim,)).find(tamper.claim).verdict == "pass"


def test_there_are_sixty_forgeries_and_three_against_every_claim():
    counts = {t.claim: sum(other.claim == t.claim for other in TAMPERS) for t in TAMPERS}
    assert len(TAMPERS) >= 60
    assert min(counts.values()) >= 3
    assert set(counts) == {f"A{n}" for n in range(1, 19)} - {"A13"}
