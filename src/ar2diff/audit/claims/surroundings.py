"""A15, A16: no credentials were at hand or sent, and the code that ran is the code that is installed here."""

from pathlib import Path

import ar2diff
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of
from ar2diff.hashing import sha256_file, sha256_json
from ar2diff.provenance.environment import CODE_EVENT, SESSION_EVENT, STAGE_EVENT, describe_library
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent
from ar2diff.sources.spec import is_inside

# Without these no training runs: a list of the code that lacks one is not the whole list.
TRAINING_CODE = (
    *(f"train/{name}.py" for name in ("trainer", "step", "step_batches", "batch", "optim", "checkpoint", "setup")),
    *(f"diffusion/{name}.py" for name in ("corrupt", "loss", "noise")),
    *(f"models/{name}.py" for name in ("decoder", "layers", "loading", "families/table")),
    *(f"data/{name}.py" for name in ("stream", "packing", "shards")),
    *("attention/masks.py", "attention/ops.py", "hashing.py", "seeding.py", "provenance/ledger.py"),
)
SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"}


def check_credentials(run: RunFiles, result: ClaimResult) -> None:
    """A15: credential-like variables by name in every process, provider addresses, headers of every request."""
    sessions = run.find(SESSION_EVENT)
    stages = [event for event in run.events if event.type in ("fetch", "prepare", "train_started", "evaluate")]
    if not sessions or (stages and sessions[0].seq > stages[0].seq):
        result.missing("what the first process ran in", found_in=LEDGER_NAME)
    for event in [*sessions, *run.find(STAGE_EVENT)]:
        where = line_of(event)
        urls = event.data.get("provider_url_names")
        result.equal("addresses of model providers that are set", [], urls, claimed_in="claim", found_in=where)
        names = event.data.get("credential_names")
        if names == []:
            result.equal("credential-like variables that are set", [], names, claimed_in="claim", found_in=where)
        else:
            # Being set is not being used, but nothing here can show that they were not.
            what = "proof that no credential was used: some are set; run without them"
            result.missing(what, found=", ".join(map(str, names or ["not logged"])), found_in=where)
    for event in run.find("fetch"):
        for file in event.data.get("files", []):
            sent = file.get("request_headers")
            if sent is not None:
                secret = sorted(SECRET_HEADERS & {str(name).lower() for name in sent})
                result.equal(
                    "secret headers sent", [], secret, claimed_in=str(file.get("path")), found_in=line_of(event)
                )
            elif file.get("url"):
                result.missing("headers of the request", found=str(file.get("path")), found_in=line_of(event))


def check_code(run: RunFiles, result: ClaimResult) -> None:
    """A16: each file that the training process had imported has the installed package's bytes."""
    events = run.find(CODE_EVENT)
    if not events or (run.find("train_started") and events[0].seq > run.find("train_started")[0].seq):
        result.missing("the digests of the code that trained", found_in=LEDGER_NAME)
    package = Path(str(ar2diff.__file__)).parent
    for event in events:
        where, files = line_of(event), event.data.get("files") or {}
        result.equal(
            "digest over the file digests",
            event.data.get("root"),
            sha256_json(files),
            claimed_in=where,
            found_in=where,
        )
        _check_libraries(event, result)
        ran = (event.data.get("versions") or {}).get("ar2diff")
        if ran != ar2diff.__version__:
            result.missing(
                f"ar2diff {ran}: install it to compare",
                found=f"ar2diff {ar2diff.__version__}",
                found_in="this installation",
            )
            continue
        left_out = [name for name in TRAINING_CODE if name not in files]
        result.equal("files without which nothing trains", [], left_out[:5], claimed_in=where, found_in=where)
        differing = [name for name, digest in files.items() if _digest(package, name) != digest]
        what = f"files of {len(files)} that differ from the installed ones"
        result.equal(what, [], differing[:5], claimed_in=where, found_in="this installation")


def find_other_code(run: RunFiles, *places: str) -> list[str]:
    """Files of the training's code under these folders whose bytes are not those of this installation."""
    package = Path(str(ar2diff.__file__)).parent
    listed = [event.data.get("files") for event in run.find(CODE_EVENT)]
    files = {name: digest for found in listed if isinstance(found, dict) for name, digest in found.items()}
    return sorted(
        name for name, digest in files.items() if name.startswith(places) and _digest(package, name) != digest
    )


def _check_libraries(event: LedgerEvent, result: ClaimResult) -> None:
    """Libraries of the same version and platform are the same wheels; others are nothing to compare with."""
    differing, compared = [], 0
    for name, ran in sorted((event.data.get("libraries") or {}).items()):
        here = describe_library(name)
        if here is not None and all(here[key] == ran.get(key) for key in ("version", "tags")):
            compared += 1
            differing += [name] if here["files_sha256"] != ran.get("files_sha256") else []
    what = f"libraries of {compared} at the same version whose files are others"
    result.equal(what, [], differing, claimed_in=line_of(event), found_in="this installation")


def _digest(package: Path, name: str) -> str | None:
    path = package / name
    return sha256_file(path) if is_inside(name) and path.is_file() else None
