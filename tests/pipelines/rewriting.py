"""A run whose ledger says something else, with chain and signatures that hold; and spoilt files."""

import json

from ar2diff.hashing import canonical_json, sha256_bytes
from ar2diff.provenance.ledger import LEDGER_NAME
from ar2diff.provenance.signing import HEADS_NAME, HeadSigner


def rewrite(run_dir, change):
    """The run's ledger with `change` done to every event, chained and signed anew by another key."""
    signer, head, events = HeadSigner.generate(), "0" * 64, []
    for line in (run_dir / LEDGER_NAME).read_bytes().splitlines():
        event = json.loads(line)
        if event["type"] == "signer":
            event["data"] = signer.public_key
        if (kept := change(event)) is not None:
            events.append(kept)
    with (run_dir / LEDGER_NAME).open("wb") as stream:
        for seq, event in enumerate(events):
            written = canonical_json({**event, "prev": head, "seq": seq})
            stream.write(written + b"\n")
            head = sha256_bytes(written)
    (run_dir / HEADS_NAME).unlink()
    signer.append(run_dir / HEADS_NAME, run_id="tiny", size=len(events), head=head)


def change_data(kind, **data):
    def change(event):
        return {**event, "data": {**event["data"], **data}} if event["type"] == kind else event

    return change


def without(kind):
    return lambda event: None if event["type"] == kind else event


def edit_receipt(folder, **changes):
    path = folder / "receipt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
