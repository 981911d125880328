"""Tools of a forger: change files of a copied run, and, with the run's own key, write its ledger anew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ar2diff.hashing import canonical_json, sha256_bytes, sha256_file, sha256_json
from ar2diff.provenance.documents import RENDERERS, write_all_documents
from ar2diff.provenance.ledger import GENESIS, LEDGER_NAME
from ar2diff.provenance.signing import HEADS_NAME, HeadSigner
from ar2diff.tokenizer import Tokenizer

Events = list[dict[str, Any]]


def put(path: Path, content: bytes | str) -> None:
    """Give a path new content; the file it was linked to stays as it is."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    put(path, bytes(content))


def edit_json(path: Path, edit: Callable[[Any], Any]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    edit(content)
    put(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def edit_lines(path: Path, edit: Callable[[list[Any]], Any]) -> None:
    """Change the lines of a .jsonl file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    put(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_events(run: Path) -> Events:
    """The ledger's lines."""
    return [json.loads(line) for line in (run / LEDGER_NAME).read_bytes().splitlines()]


def write_events(run: Path, events: Events) -> str:
    """Chain events anew and write them; returns the head."""
    head, lines = GENESIS, []
    for seq, event in enumerate(events):
        line = canonical_json({**event, "seq": seq, "prev": head})
        lines.append(line + b"\n")
        head = sha256_bytes(line)
    put(run / LEDGER_NAME, b"".join(lines))
    return head


def forge(run: Path, signer: HeadSigner, edit: Callable[[Events], Any], *, documents: bool = True) -> None:
    """Edit the ledger as the holder of the key: chained, signed and with documents that fit."""
    events = read_events(run)
    edit(events)
    head = write_events(run, events)
    (run / HEADS_NAME).unlink()
    signer.append(run / HEADS_NAME, run_id=events[0]["data"]["run_id"], size=len(events), head=head)
    if documents:
        for name in RENDERERS:
            (run / name).unlink()
        write_all_documents(run)


def of_type(events: Events, kind: str) -> Events:
    """The events of one type."""
    return [event for event in events if event["type"] == kind]


def cover_up(run: Path, signer: HeadSigner, edit: Callable[[Any], Any] = lambda _: None) -> None:
    """Make the shard's receipt, mark and ledger event fit its changed files, with a further edit of the receipt."""
    data = run / "data"

    def fit(content: Any) -> None:
        content["files"] = {name: sha256_file(data / name) for name in content["files"]}
        content["digest"] = sha256_json(content["files"])
        edit(content)

    edit_json(data / "receipt.json", fit)
    put(data / "COMPLETE", sha256_file(data / "receipt.json") + "\n")
    receipt = json.loads((data / "receipt.json").read_text())
    forge(run, signer, lambda events: of_type(events, "prepare")[-1].update(data=receipt))


def edit_array(path: Path, edit: Callable[[Any], Any]) -> None:
    """Change a .npy file."""
    values = np.load(path)
    edit(values)
    path.unlink()
    np.save(path, values)


def plant_document(run: Path, text: str) -> None:
    """Put a text at the end of the training shard, as a document of its own."""
    data = run / "data"
    ids = Tokenizer.from_folder(run / "base").encode(text)
    tokens, offsets = np.load(data / "token_ids.npy"), np.load(data / "document_offsets.npy")
    lens = np.load(data / "prompt_lens.npy")
    for name, values in (
        ("token_ids", np.concatenate([tokens, np.array(ids, dtype=tokens.dtype)])),
        ("document_offsets", np.append(offsets, offsets[-1] + len(ids))),
        ("prompt_lens", np.append(lens, np.int32(2))),
    ):
        (data / f"{name}.npy").unlink()
        np.save(data / f"{name}.npy", values)
    edit_lines(data / "ids.jsonl", lambda lines: lines.append({"id": "planted", "source": "local:chat.jsonl#9"}))


def checkpoint(run: Path) -> Path:
    """The newest checkpoint."""
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def edit_weights(run: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of the newest checkpoint."""
    from safetensors.numpy import load_file, save_file

    path = checkpoint(run) / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    path.unlink()
    save_file(tensors, path)
