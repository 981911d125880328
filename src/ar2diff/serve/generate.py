"""One generating request from body to answer, streamed or whole."""

import json
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from ar2diff.engine.request import Request
from ar2diff.serve.answers import Answer, as_refusal
from ar2diff.serve.bodies import AnswerHead
from ar2diff.serve.body import read_body
from ar2diff.serve.conversation import name_constraint
from ar2diff.serve.prompts import build_requests
from ar2diff.serve.reading.reader import ReadingPlan
from ar2diff.serve.receipts import log_answer
from ar2diff.serve.schemas import ChatRequest, CompletionRequest, read_request
from ar2diff.serve.service import Service
from ar2diff.serve.stream import pieces, send_stream, until_disconnect
from ar2diff.serve.strict_json import parse_json
from ar2diff.serve.worker import Refusal

Body = ChatRequest | CompletionRequest


async def complete(service: Service, http: HttpRequest, kind: type[Body]) -> Response:
    """The response to a generating request.

    Raises:
        ApiError: the request or the server's state does not allow one.
        Disconnected: the client went away; its work is dropped.
    """
    try:
        service.worker.check_open()
    except Refusal as refusal:
        raise as_refusal(refusal.reason, service.worker, service.metrics) from None
    content = await read_body(http, service.limits)
    asked, requests = await run_in_threadpool(_read, service, content, kind)
    answer = Answer(service.worker, requests, limits=service.limits, clock=service.clock, metrics=service.metrics)
    head = _build_head(service, http, asked, requests)

    def keep() -> None:
        if service.request_log is not None and len(answer.finished) == len(requests):
            finished = [answer.finished[idx] for idx in range(len(requests))]
            log_answer(service.request_log, head.request_id, service.find(asked.model), requests, finished)

    if asked.stream:
        return _StreamedAnswer(answer, head, asked, service, keep)
    body = await until_disconnect(http.receive, _collect(answer, head))
    keep()
    return Response(json.dumps(body, ensure_ascii=False), media_type="application/json")


class _StreamedAnswer(Response):
    def __init__(
        self, answer: Answer, head: AnswerHead, asked: Body, service: Service, keep: Callable[[], None]
    ) -> None:
        super().__init__()
        self._answer, self._slow_reader_s, self._keep = answer, service.limits.slow_reader_s, keep
        trace = bool(asked.diffusion and asked.diffusion.trace)
        self._events = pieces(answer, head, usage=asked.wants_usage, trace=trace)

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with self._answer:
            await send_stream(send, self._events, slow_reader_s=self._slow_reader_s)
        self._keep()


async def _collect(answer: Answer, head: AnswerHead) -> dict[str, Any]:
    async with answer:
        generations = await answer.generations()
    return await run_in_threadpool(head.whole, generations)  # a long trace takes a while to describe


def _read(service: Service, content: bytes, kind: type[Body]) -> tuple[Body, list[Request]]:
    asked = read_request(kind, parse_json(content))
    served = service.find(asked.model)
    # More than the queue and the engine hold together would be told to come back for ever.
    max_choices = min(service.limits.max_choices, service.worker.max_jobs)
    requests = build_requests(asked, served, draw_seed=service.draw_seed, max_choices=max_choices)
    service.compile(requests[0].constraint, param=name_constraint(asked))
    return asked, requests


def _build_head(service: Service, http: HttpRequest, asked: Body, requests: list[Request]) -> AnswerHead:
    served = service.find(asked.model)
    plan = requests[0].reader
    assert plan is None or isinstance(plan, ReadingPlan)
    return AnswerHead(
        route="chat" if isinstance(asked, ChatRequest) else "completion",
        request_id=http.state.request_id,
        created=int(service.clock.utc().timestamp()),
        model=served.name,
        fingerprint=served.fingerprint,
        tokenizer=served.loaded.tokenizer,
        prompts=tuple(request.prompt_ids for request in requests),
        choices_per_prompt=asked.n or 1,
        has_logprobs=asked.logprobs is not None and asked.logprobs is not False,
        plan=plan,
        is_echoed=isinstance(asked, CompletionRequest) and bool(asked.echo),
    )
