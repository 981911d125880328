"""A14: what decodes. The probes compute with torch and are loaded only here."""

from pathlib import Path

from ar2diff.audit.claims.server import PROVENANCE_PATH, open_server
from ar2diff.audit.live.server import LiveServer, ServerError, ServerUnderAudit
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles


def check_decoding(run: RunFiles, result: ClaimResult, servers: ServerUnderAudit) -> None:
    """A14: five probes on the newest checkpoint with the engine that answers requests, and on the server's traces."""
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        result.missing("a checkpoint", found_in="checkpoints/")
        return
    from ar2diff.audit.live.probes import run_probes

    run_probes(checkpoint, run.name(checkpoint), result)
    result.level = "engine"
    if result.verdict != "pass" or servers.find_reason_against(checkpoint) is not None:
        return
    server = open_server(servers, checkpoint, result)
    if server is not None:
        result.level = "engine and server"
        _probe_server(server, checkpoint, result, exact=not servers.is_given or _computes_in_fp32(server))


def _probe_server(server: LiveServer, checkpoint: Path, result: ClaimResult, *, exact: bool) -> None:
    from ar2diff.audit.live.server_probes import probe_server
    from ar2diff.models.loading import load_model

    probe_server(server, load_model(checkpoint), result, exact=exact)


def _computes_in_fp32(server: LiveServer) -> bool:
    try:
        return str(server.get(PROVENANCE_PATH).get("precision")).startswith("float32")
    except ServerError:
        return False
