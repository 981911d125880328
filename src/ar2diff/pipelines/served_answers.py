"""The converted model's answers from a running server, each with its request's id, and the server's log of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ar2diff.audit.live.server import LiveServer, ServerError
from ar2diff.audit.run_files import read_object_lines
from ar2diff.engine.generation import Generation, Pass, Reveal
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError, ModelError, RunError
from ar2diff.files import write_text
from ar2diff.models.loading import LoadedModel, load_model

SERVER_LOG_NAME = "server_log.jsonl"
ANSWER_EVENT = "answer"


class ServedEngine:
    """Answers requests over HTTP as an engine does in process.

    Args:
        server: the address of an `ar2diff serve`.
        log: the file that its `--request-log` names, where this machine can read it.

    Attributes:
        provenance: what the server says of its weights.
        last_request_ids: of the newest answers, in their order.

    Raises:
        ServerError: the server does not answer.
        RunError: the log is not there.
    """

    def __init__(self, server: LiveServer, checkpoint: Path, *, log: Path | None = None) -> None:
        if log is not None and not log.is_file():
            raise RunError("no request log", given=str(log), fix="Start the server with --request-log")
        self._server, self._log = server, log
        self.provenance = server.get("/v1/provenance")
        self.loaded: LoadedModel = load_model(checkpoint)
        self.last_request_ids: list[str] = []
        if self.provenance.get("tensor_root") != self.loaded.tensor_root:
            raise ModelError(
                "the server holds another model",
                given=f"tensor root {self.provenance.get('tensor_root')}",
                fix=f"Serve {checkpoint}",
            )

    def generate_many(self, requests: Sequence[Request]) -> list[Generation | Ar2diffError]:
        """The server's answers to greedy requests, one after the other.

        Raises:
            ServerError: it does not answer, or an answer lacks something.
        """
        self.last_request_ids = []
        return [self.generate(request) for request in requests]

    def generate(self, request: Request) -> Generation:
        """The server's answer to a greedy request.

        Raises:
            ServerError: it does not answer, or its answer lacks something.
        """
        body = {
            "model": self.provenance["model"],
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "diffusion": _options(request),
        }
        content = self._server.post("/v1/completions", body)
        try:
            generation = _read(content, trace=request.trace)
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError("the answer lacks what an evaluation needs", given=repr(error)) from None
        self.last_request_ids.append(str(content["id"]).partition("-")[2])
        return generation

    def keep_log(self, run_dir: Path, request_ids: set[str]) -> Path | None:
        """Copy the log's lines of these requests into the run; None where the log is elsewhere.

        Raises:
            RunError: the log lacks some of them.
        """
        if self._log is None:
            return None
        lines = [line for line in read_object_lines(self._log) if line.get("event") == ANSWER_EVENT]
        kept = [line for line in lines if line.get("request_id") in request_ids]
        absent = request_ids - {str(line["request_id"]) for line in kept}
        if absent:
            raise RunError(
                f"the request log lacks {len(absent)} of {len(request_ids)} answers",
                given=str(self._log),
                fix="Name the log of this server; the answers so far are kept",
            )
        path = run_dir / SERVER_LOG_NAME
        write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        return path


def _options(request: Request) -> dict[str, Any]:
    options: dict[str, Any] = {"mode": request.mode, "policy": request.policy, "trace": True}
    if request.mode == "verified":
        options |= {"draft_len": request.draft_len, "copy_drafts": request.copy_drafts}
    for name in ("denoising_steps", "policy_parameter"):
        if (value := getattr(request, name)) is not None:
            options[name] = value
    return options


def _read(content: dict[str, Any], *, trace: bool) -> Generation:
    # The trace is asked for always: it alone tells tokens by their ids.
    choice, count = content["choices"][0], int(content["usage"]["completion_tokens"])
    told = choice["diffusion"]
    passes = tuple(_read_pass(step) for step in told["passes"])
    revealed = {reveal.position: reveal for step in passes for reveal in step.reveals}
    tokens = [revealed[place] for place in range(count)]
    return Generation(
        token_ids=tuple(reveal.token_id for reveal in tokens),
        text=str(choice["text"]),
        finish_reason=choice["finish_reason"],
        logprobs=tuple(reveal.logprob for reveal in tokens),
        num_forward_passes=int(told["num_forward_passes"]),
        num_prefill_passes=int(told["num_prefill_passes"]),
        passes_per_block=tuple(told["passes_per_block"]),
        drafted_by_offset=tuple(told.get("drafted_by_offset", ())),
        accepted_by_offset=tuple(told.get("accepted_by_offset", ())),
        prefill_s=float(told["prefill_s"]),
        decode_s=float(told["decode_s"]),
        passes=passes if trace else (),
    )


def _read_pass(step: dict[str, Any]) -> Pass:
    reveals = tuple(
        Reveal(position=int(r["position"]), token_id=int(r["token_id"]), logprob=float(r["logprob"]))
        for r in step["reveals"]
    )
    return Pass(
        block_idx=int(step["block_idx"]),
        pass_idx=int(step["pass_idx"]),
        start=int(step["start"]),
        token_ids=tuple(step["token_ids"]),
        reveals=reveals,
        text="",
    )
