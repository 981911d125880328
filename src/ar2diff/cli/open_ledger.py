"""A run's ledger as every command opens it: with the user's signing key, and what this process runs in."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ar2diff.clock import Clock
    from ar2diff.provenance.ledger import Ledger

KEY_NAME = "ledger_key.pem"


def open_ledger(run_dir: Path, *, clock: "Clock", run_id: str) -> "Ledger":
    """Open or create the ledger of a run; heads are signed with the user's own key, made on first use."""
    from ar2diff.provenance.environment import describe_session, describe_stage
    from ar2diff.provenance.ledger import Ledger
    from ar2diff.provenance.signing import HeadSigner
    from ar2diff.provenance.unpickling import UnpicklingWatch

    watch = UnpicklingWatch()
    signer = HeadSigner.open(default_key_path())
    return Ledger.open(
        run_dir,
        clock=clock,
        run_id=run_id,
        signer=signer,
        session=describe_session(os.environ),
        look_around=lambda: describe_stage(os.environ, watch.list_classes()),
    )


def default_key_path() -> Path:
    """Where the user's key lies, by the XDG rule."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ar2diff" / KEY_NAME
