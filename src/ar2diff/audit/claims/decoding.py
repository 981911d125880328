"""A13, A14: what decodes and what serves. The probes compute with torch and are loaded only here."""

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles


def check_decoding(run: RunFiles, result: ClaimResult) -> None:
    """A14: five probes on the newest checkpoint with the engine that answers requests."""
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        result.missing("a checkpoint", found_in="checkpoints/")
        return
    from ar2diff.audit.live.probes import run_probes

    run_probes(checkpoint, run.name(checkpoint), result)


def check_server(run: RunFiles, result: ClaimResult) -> None:
    """A13: nothing in a run speaks of a server yet."""
    result.not_claimed("the run has no server", found_in=run.name(run.folder / "ledger.jsonl"))
