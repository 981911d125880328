"""Signed heads: a hash chain alone cannot see lines cut off its end, a signature over its size and head can.

`checkpoints.dsse.jsonl` holds one DSSE envelope a line (Ed25519) over `{run_id, size, head}`. The public key stands
in the ledger's `signer` event, so that a copied run is verified anywhere. Format: DSSE version 1 of in-toto.
"""

import errno
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SigningError
from securesystemslib.signer._crypto_signer import CryptoSigner
from securesystemslib.signer._key import Key

from ar2diff.errors import LedgerError
from ar2diff.files import space_error
from ar2diff.hashing import canonical_json

HEADS_NAME = "checkpoints.dsse.jsonl"
SIGNER_EVENT = "signer"
PAYLOAD_TYPE = "application/vnd.ar2diff.ledger-head+json"


class SignedHead(NamedTuple):
    """What one envelope says: after `size` lines the head was `head`; `fault` says why it does not count, or None."""

    run_id: str
    size: int
    head: str
    keyid: str
    fault: str | None


class HeadSigner:
    """Signs heads with one Ed25519 key."""

    def __init__(self, signer: CryptoSigner) -> None:
        self._signer = signer

    @classmethod
    def open(cls, path: Path) -> "HeadSigner":
        """The signer of the PEM key at `path`, which is made, readable by its owner alone, where it is absent.

        Raises:
            LedgerError: the file holds no Ed25519 key.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(CryptoSigner.generate_ed25519().private_bytes)
        fix = "Remove the file: a new key is made"
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, OSError) as error:
            raise LedgerError(f"the signing key cannot be read: {error}", given=str(path), fix=fix) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise LedgerError("the signing key is not an Ed25519 key", given=str(path), fix=fix)
        return cls(CryptoSigner(key))

    @classmethod
    def generate(cls) -> "HeadSigner":
        """A signer whose key lives as long as this object."""
        return cls(CryptoSigner.generate_ed25519())

    @property
    def public_key(self) -> dict[str, Any]:
        """The public key as the `signer` event holds it."""
        key = self._signer.public_key
        return {"keyid": key.keyid, **key.to_dict()}

    def sign(self, content: dict[str, Any], payload_type: str) -> bytes:
        """A DSSE envelope of the content's canonical JSON, as one line."""
        envelope = Envelope(canonical_json(content), payload_type, {})
        envelope.sign(self._signer)
        return canonical_json(envelope.to_dict()) + b"\n"

    def append(self, path: Path, *, run_id: str, size: int, head: str) -> None:
        """Add the signed head as a durable line of `path`; half a line that a killed signer left is dropped.

        Raises:
            SpaceError: the file system is full; the file is as it was.
        """
        line = self.sign({"run_id": run_id, "size": size, "head": head}, PAYLOAD_TYPE)
        with path.open("a+b", buffering=0) as stream:
            stream.seek(0)
            whole = stream.read().rfind(b"\n") + 1
            os.ftruncate(stream.fileno(), whole)
            try:
                if stream.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "the line was written in part")
                os.fsync(stream.fileno())
            except OSError as error:
                os.ftruncate(stream.fileno(), whole)
                raise space_error(error, path) or error from error


def read_heads(path: Path, public_keys: list[dict[str, Any]]) -> list[SignedHead]:
    """Every whole line of a heads file, each verified against the keys; an absent file has none."""
    if not path.is_file():
        return []
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [_read_head(line, public_keys) for line in whole]


def _read_head(line: bytes, public_keys: list[dict[str, Any]]) -> SignedHead:
    keyid = ""
    try:
        envelope = Envelope.from_dict(json.loads(line))
        keyid = next(iter(envelope.signatures), "")
        content = json.loads(envelope.payload)
        head = SignedHead(str(content["run_id"]), int(content["size"]), str(content["head"]), keyid, None)
        if envelope.payload_type != PAYLOAD_TYPE:
            return head._replace(fault="the payload is no ledger head")
        envelope.verify([_read_key(key) for key in public_keys], 1)
    except (SigningError, ValueError, KeyError, TypeError, AttributeError) as error:
        return SignedHead("", 0, "", keyid, f"the signature does not hold: {type(error).__name__}")
    return head


def _read_key(stored: dict[str, Any]) -> Key:
    content = dict(stored)
    keyid = content.pop("keyid")
    return Key.from_dict(keyid, content)
