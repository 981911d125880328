"""A13: a server holds the weights of this run: the root over its live tensors against the files, computed here."""

from pathlib import Path
from typing import Any

from ar2diff.audit.live.server import LiveServer, LoopbackError, ServerError, ServerUnderAudit
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, read_object
from ar2diff.audit.tensor_files import list_model_tensors, served_root, stored_root
from ar2diff.models.families.table import read_decoder_config

PROVENANCE_PATH = "/v1/provenance"
SERVED_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
PRINTED = "tensor root"


def check_server(run: RunFiles, result: ClaimResult, servers: ServerUnderAudit) -> None:
    """A13: the stored and the live root that the server names are those of a model of this run, recomputed."""
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        result.missing("a checkpoint", found_in="checkpoints/")
        return
    if reason := servers.find_reason_against(checkpoint):
        result.not_claimed(reason, found_in=run.name(checkpoint))
        return
    server = open_server(servers, checkpoint, result)
    if server is None:
        return
    try:
        claimed = server.get(PROVENANCE_PATH)
    except ServerError as error:
        result.fail("the server says what it runs", error.one_line(), found_in=PROVENANCE_PATH)
        return
    folders = run.models() if servers.is_given else [checkpoint]
    result.level = "a running server" if servers.is_given else "a server started by this audit"
    _compare(run, claimed, _choose(folders, claimed), result)
    _check_printed(server, claimed, result)


def open_server(servers: ServerUnderAudit, checkpoint: Path, result: ClaimResult) -> LiveServer | None:
    """The server, or None where it does not start, which `result` then says."""
    try:
        return servers.open(checkpoint)
    except LoopbackError as error:
        result.missing("a loopback to ask a server over", found=error.one_line(), found_in="this machine")
        return None
    except ServerError as error:
        absent = "No module named" in str(error.given) or "ar2diff[serve]" in str(error.given)
        if absent:
            result.missing("a library that the server needs", found=str(error.given), found_in="this installation")
        else:
            result.fail("the server starts", error.one_line(), found_in="ar2diff serve")
        return None


def _choose(folders: list[Path], claimed: dict[str, Any]) -> tuple[Path, str]:
    """The folder whose root the server names, else the first, with its root."""
    roots = [(folder, stored_root(list_model_tensors(folder))) for folder in folders]
    return next((pair for pair in roots if pair[1] == claimed.get("tensor_root")), roots[0])


def _compare(run: RunFiles, claimed: dict[str, Any], model: tuple[Path, str], result: ClaimResult) -> None:
    folder, root = model
    here = {"claimed_in": PROVENANCE_PATH, "found_in": run.name(folder)}
    result.equal("tensor root that the server names", claimed.get("tensor_root"), root, **here)
    dtype = SERVED_DTYPES.get(str(claimed.get("dtype")))
    if dtype is None:
        result.fail("the live tensors have a known dtype", claimed.get("dtype"), found_in=PROVENANCE_PATH)
        return
    config = read_object(folder / "config.json")
    settings = config.pop("ar2diff", None)
    tied = read_decoder_config(config).tied_head
    live = served_root(list_model_tensors(folder), tied_head=tied, dtype=dtype)
    result.equal(f"root over the live tensors ({dtype})", claimed.get("live_tensor_root"), live, **here)
    result.equal("diffusion settings", claimed.get("diffusion"), settings, **here)


def _check_printed(server: LiveServer, claimed: dict[str, Any], result: ClaimResult) -> None:
    if server.announced is None:
        return
    printed = [line.removeprefix(PRINTED).strip() for line in server.announced if line.startswith(PRINTED)]
    here = {"claimed_in": "ar2diff serve", "found_in": PROVENANCE_PATH}
    result.equal("tensor root that the server prints", printed, [claimed.get("tensor_root")], **here)
