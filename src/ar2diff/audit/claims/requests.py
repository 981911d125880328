"""Part of A17: answers that came over a server are those that its own log says it gave, to these prompts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ar2diff.audit.data_rerun import find_tokenizer
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of, read_object_lines
from ar2diff.hashing import sha256_bytes, sha256_file, sha256_json
from ar2diff.provenance.ledger import LedgerEvent
from ar2diff.tasks.problem import Problem
from ar2diff.tokenizer import Tokenizer

SAMPLES_NAME, SERVER_LOG_NAME = "eval_samples.jsonl", "server_log.jsonl"
PARENT_MODE = "parent"


def check_requests(
    run: RunFiles,
    event: LedgerEvent,
    samples: list[dict[str, Any]],
    problems: Mapping[str, Problem],
    result: ClaimResult,
) -> None:
    """Each answer that names a request is in the server's log once, with its prompt, text, tokens and passes.

    Args:
        event: the evaluation; one over a server has an answer over it for all but the parent's.
    """
    asked = [sample for sample in samples if sample.get("request_id") is not None]
    server = event.data.get("server")
    if isinstance(server, dict):
        _check_server(event, server, samples, result)
    if not asked:
        return
    path = run.folder / SERVER_LOG_NAME
    if not path.is_file():
        result.missing("the log of the server that answered", found_in=SERVER_LOG_NAME)
        return
    here = {"claimed_in": line_of(event), "found_in": SERVER_LOG_NAME}
    if isinstance(logged := event.data.get("server_log"), dict):
        result.equal("sha256 of the server's log", logged.get("sha256"), sha256_file(path), **here)
    lines = [line for line in read_object_lines(path) if line.get("event") == "answer"]
    answered = {str(line.get("request_id")): line for line in lines}
    times = Counter(str(line.get("request_id")) for line in lines)
    names = Counter(str(sample["request_id"]) for sample in asked)
    wrong = [name for name, count in names.items() if count != 1 or times[name] != 1]
    here["claimed_in"] = SAMPLES_NAME
    result.equal(f"requests of {len(names)} that the server did not answer once", [], wrong[:5], **here)
    root = (event.data.get("roots") or {}).get("converted")
    others = [name for name in names if name in answered and answered[name].get("tensor_root") != root]
    result.equal(
        "answers of the server by another model", [], others[:5], claimed_in=line_of(event), found_in=path.name
    )
    pairs = [(sample, answered[name]) for sample in asked if (name := str(sample["request_id"])) in answered]
    _compare(pairs, find_tokenizer(run), problems, result)


def _check_server(
    event: LedgerEvent, server: dict[str, Any], samples: list[dict[str, Any]], result: ClaimResult
) -> None:
    where = line_of(event)
    root = (event.data.get("roots") or {}).get("converted")
    result.equal(
        "tensor root that the server named", root, server.get("tensor_root"), claimed_in=where, found_in=where
    )
    alone = [
        f"{sample.get('mode')}: {sample.get('problem_id')}"
        for sample in samples
        if sample.get("mode") != PARENT_MODE and sample.get("request_id") is None
    ]
    result.equal("answers that name no request", [], alone[:5], claimed_in=where, found_in=SAMPLES_NAME)


def _compare(
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
    tokenizer: Tokenizer | None,
    problems: Mapping[str, Problem],
    result: ClaimResult,
) -> None:
    here = {"claimed_in": SAMPLES_NAME, "found_in": SERVER_LOG_NAME}
    wrong: dict[str, list[str]] = {"text": [], "tokens": [], "passes": [], "end": [], "mode": [], "prompt": []}
    for sample, line in pairs:
        choices = line.get("choices")
        told: dict[str, Any] = choices[0] if isinstance(choices, list) and len(choices) == 1 else {}
        claimed = {
            "text": (sha256_bytes(str(sample.get("text")).encode()), told.get("text_sha256")),
            "tokens": (sha256_json(sample.get("token_ids")), told.get("token_ids_sha256")),
            "passes": (sample.get("num_forward_passes"), told.get("num_forward_passes")),
            "end": (sample.get("finish_reason"), told.get("finish_reason")),
            "mode": (sample.get("mode"), _name_mode(told)),
        }
        problem = problems.get(str(sample.get("problem_id")))
        if problem is not None and tokenizer is not None:
            ids = tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True)
            claimed["prompt"] = (sha256_json(list(ids)), told.get("prompt_sha256"))
        for what, (mine, theirs) in claimed.items():
            if mine != theirs:
                wrong[what].append(str(sample["request_id"]))
    if tokenizer is None:
        result.missing("a tokenizer to make the prompts again", found_in="base/, checkpoints/")
    for what, names in wrong.items():
        result.equal(f"answers of the server with another {what}", [], names[:5], **here)


def _name_mode(choice: dict[str, Any]) -> str:
    """What a report calls the way in which a logged request was decoded, greedily."""
    if choice.get("temperature") != 0:
        return "sampled"
    if choice.get("mode") == "verified" and choice.get("copy_drafts"):
        return "verified+copies"
    if choice.get("mode") != "diffusion":
        return str(choice.get("mode"))
    if choice.get("policy") == "threshold":
        return f"diffusion, threshold={choice.get('policy_parameter'):g}"
    return f"diffusion, steps={choice.get('denoising_steps')}"
