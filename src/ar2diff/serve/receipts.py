"""The request log: for each answer its request's id and digests of what was asked and answered, never their text.

One JSON object a line, event "answer". With it an evaluation over this server can be checked, answer by answer. A
digest of a short text can be guessed by trying texts, so nothing writes this log unless it is asked for.
"""

from collections.abc import Sequence
from typing import Any

from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.hashing import sha256_bytes, sha256_json
from ar2diff.serve.log import JsonLog
from ar2diff.serve.served import ServedModel


def log_answer(
    log: JsonLog, request_id: str, served: ServedModel, asked: Sequence[Request], answers: Sequence[Generation]
) -> None:
    """Write the line of one finished answer."""
    choices = [_describe(request, answer) for request, answer in zip(asked, answers, strict=True)]
    roots = {"tensor_root": served.loaded.tensor_root, "live_tensor_root": served.live_tensor_root}
    log.event("answer", request_id=request_id, model=served.name, **roots, choices=choices)


def _describe(request: Request, answer: Generation) -> dict[str, Any]:
    return {
        "mode": request.mode,
        "policy": request.policy,
        "policy_parameter": request.policy_parameter,
        "denoising_steps": request.denoising_steps,
        "copy_drafts": request.copy_drafts,
        "temperature": request.temperature,
        "prompt_sha256": sha256_json(list(request.prompt_ids)),
        "text_sha256": sha256_bytes(answer.text.encode()),
        "token_ids_sha256": sha256_json(list(answer.token_ids)),
        "finish_reason": answer.finish_reason,
        "num_forward_passes": answer.num_forward_passes,
    }
