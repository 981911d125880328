"""A11: the newest checkpoint is the one that was trained, and the documents beside it say what the ledger says."""

from pathlib import Path
from typing import Any

from ar2diff.audit.claims.averaged import check_averaged
from ar2diff.audit.claims.rounds import ROUND_EVENT, check_rounds
from ar2diff.audit.claims.told import check_end
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import AVERAGED_DIR, RELEASE_DIR, RunFiles, line_of, read_object
from ar2diff.audit.tensor_files import list_model_tensors, stored_root
from ar2diff.hashing import sha256_file
from ar2diff.provenance.documents import OPTIONAL_DOCUMENTS, RENDERERS
from ar2diff.provenance.ledger import LEDGER_NAME

STATE_NAME, COMPLETE_NAME = "training.json", "COMPLETE"
DIFFUSION_KEY = "ar2diff"


def check_release(run: RunFiles, result: ClaimResult) -> None:
    """Roots and digests of every checkpoint that is there, the end of training, the averaged model, the documents."""
    saved = {int(e.data["step"]): e for e in run.find("checkpoint_saved") if isinstance(e.data.get("step"), int)}
    found = run.checkpoints()
    if not saved:
        result.missing("a saved checkpoint", found_in=LEDGER_NAME)
    if saved and max(saved) not in [_step_of(path) for path in found]:
        result.missing("the newest checkpoint's files", found_in=f"checkpoints/ (step {max(saved)})")
    for folder in found:
        event = saved.get(_step_of(folder))
        if event is None:
            result.fail(
                "every checkpoint was saved by the training",
                "no such event",
                found_in=LEDGER_NAME,
                claimed=run.name(folder),
                claimed_in="checkpoints/",
            )
            continue
        _check_checkpoint(run, folder, event.data, line_of(event), result)
    _check_end(run, saved, result)
    check_averaged(run, result)
    check_rounds(run, result)
    _check_release(run, saved, result)
    _check_links(run, result)
    _check_documents(run, result)


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() else -1


def _check_checkpoint(run: RunFiles, folder: Path, saved: dict[str, Any], where: str, result: ClaimResult) -> None:
    name = run.name(folder)
    state_path = folder / STATE_NAME
    if not state_path.is_file():
        result.missing("the checkpoint's state", found_in=f"{name}/{STATE_NAME}")
        return
    if "state_sha256" in saved:
        found = sha256_file(state_path)
        result.equal(
            "digest of the checkpoint's state",
            saved["state_sha256"],
            found,
            claimed_in=where,
            found_in=f"{name}/{STATE_NAME}",
        )
    else:
        result.missing("digest of the checkpoint's state", found_in=where)
    mark = folder / COMPLETE_NAME
    written = mark.read_text(encoding="utf-8", errors="replace").strip() if mark.is_file() else None
    here = {"claimed_in": f"{name}/{COMPLETE_NAME}", "found_in": f"{name}/{STATE_NAME}"}
    result.equal("the mark of a complete checkpoint", written, sha256_file(state_path), **here)
    _check_files(folder, name, result)
    root = stored_root(list_model_tensors(folder))
    result.equal(
        "tensor root", saved.get("tensor_root"), root, claimed_in=where, found_in=f"{name}/model.safetensors"
    )


def _check_files(folder: Path, name: str, result: ClaimResult) -> None:
    """Every file of a checkpoint has the digest that its state holds, and there are no others."""
    files = read_object(folder / STATE_NAME).get("files")
    if not isinstance(files, dict):
        result.fail("the state lists the checkpoint's files", files, found_in=f"{name}/{STATE_NAME}")
        return
    here = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    extra = sorted(here - set(files) - {STATE_NAME, COMPLETE_NAME})
    result.equal(
        "files that the checkpoint was not saved with", [], extra, claimed_in=f"{name}/{STATE_NAME}", found_in=name
    )
    for file, digest in files.items():
        if file not in here:
            result.missing("a file of the checkpoint", found_in=f"{name}/{file}")
        else:
            result.equal(
                f"sha256 of {file}",
                digest,
                sha256_file(folder / file),
                claimed_in=f"{name}/{STATE_NAME}",
                found_in=f"{name}/{file}",
            )


def _check_end(run: RunFiles, saved: dict[int, Any], result: ClaimResult) -> None:
    """What the end of training and the evaluation name is the last checkpoint."""
    for kind in ("train_finished", "train_interrupted"):
        for event in run.find(kind):
            check_end(event, result)
            of_step = saved.get(event.data.get("step", -1))
            root = of_step.data.get("tensor_root") if of_step else None
            where = line_of(of_step) if of_step else LEDGER_NAME
            result.equal(
                "tensor root at the end of training",
                event.data.get("tensor_root"),
                root,
                claimed_in=line_of(event),
                found_in=where,
            )
    evaluated = run.last("evaluate")
    if evaluated is not None and saved:
        known = _known_roots(run, saved)
        root = (evaluated.data.get("roots") or {}).get("converted")
        result.holds(
            "the evaluated model is a saved one",
            root in known,
            claimed=root,
            claimed_in=line_of(evaluated),
            found=known,
            found_in=LEDGER_NAME,
        )


def _known_roots(run: RunFiles, saved: dict[int, Any]) -> list[str]:
    """The roots of every model that the run logged."""
    made = [*saved.values(), *run.find("checkpoints_averaged"), *run.find(ROUND_EVENT)]
    return sorted(str(event.data.get("tensor_root")) for event in made)


def _check_release(run: RunFiles, saved: dict[int, Any], result: ClaimResult) -> None:
    """A release in our own format holds a logged model; one for another engine has other tensors, and claims none."""
    folder = run.folder / RELEASE_DIR
    config = folder / "config.json"
    if not config.is_file() or DIFFUSION_KEY not in read_object(config):
        return
    root, known = stored_root(list_model_tensors(folder)), _known_roots(run, saved)
    result.holds(
        "the released model is a saved one",
        root in known,
        claimed=known,
        claimed_in=LEDGER_NAME,
        found=root,
        found_in=RELEASE_DIR,
    )


def _check_links(run: RunFiles, result: ClaimResult) -> None:
    """A link can point elsewhere tomorrow: what is shipped are files."""
    folders = [*run.checkpoints(), run.folder / AVERAGED_DIR, run.folder / RELEASE_DIR]
    links = [run.name(path) for folder in folders for path in sorted(folder.glob("*")) if path.is_symlink()]
    result.equal("links in place of files", [], links[:5], claimed_in="a model's folder", found_in="run")


def _check_documents(run: RunFiles, result: ClaimResult) -> None:
    """Byte by byte: a document is what the ledger renders to, or it was written by hand."""
    for name, render in RENDERERS.items():
        path = run.folder / name
        if not path.is_file():
            # Whoever logs the export targets renders them too: such a run has every document.
            if name not in OPTIONAL_DOCUMENTS or run.find("export_targets"):
                result.missing("a generated document", found_in=name)
            continue
        expected, content = render(run.events), path.read_bytes()
        wanted, found = expected.split("\n"), content.decode("utf-8", "backslashreplace").split("\n")
        # Bytes, so that no two texts look alike.
        if content == expected.encode():
            result.equal(f"{name} rendered again", len(wanted), len(found), claimed_in=LEDGER_NAME, found_in=name)
            continue
        if wanted == [line.removesuffix("\r") for line in found]:
            result.fail(f"{name} rendered again", "other line ends (CRLF)", found_in=name, claimed_in=LEDGER_NAME)
            continue
        idx = next(
            (i for i, pair in enumerate(zip(wanted, found, strict=False)) if pair[0] != pair[1]),
            min(len(wanted), len(found)),
        )
        pair = [lines[idx] if idx < len(lines) else "(no such line)" for lines in (wanted, found)]
        result.fail(
            f"{name} rendered again",
            pair[1],
            found_in=f"{name} line {idx + 1}",
            claimed=pair[0],
            claimed_in=LEDGER_NAME,
        )
