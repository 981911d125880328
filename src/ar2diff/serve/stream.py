"""Server-sent events: text as it settles, an end that is always said, and readers that are slow or gone."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message, Receive, Send

from ar2diff.engine.generation import Generation
from ar2diff.serve.answers import Answer
from ar2diff.serve.bodies import AnswerHead
from ar2diff.serve.logprobs import CompletionLogprobs
from ar2diff.serve.problems import ApiError, internal_error
from ar2diff.serve.reading.steps import StepReader
from ar2diff.serve.trace import Trace

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


class Disconnected(Exception):  # noqa: N818 - no fault of ours
    """The client went away, or does not read."""


async def pieces(answer: Answer, head: AnswerHead, *, usage: bool, trace: bool) -> AsyncIterator[dict[str, Any]]:
    """The stream's objects in order: roles first, settled text, a final piece with its reason."""
    finished: dict[int, Generation] = {}
    traces: dict[int, Trace | None] = {}
    offsets: dict[int, CompletionLogprobs] = {}
    readings: dict[int, StepReader] = {}
    async for idx, step in answer.outcomes():
        if idx not in traces:
            traces[idx] = Trace(head.tokenizer) if trace else None
            offsets[idx] = CompletionLogprobs(head.tokenizer)
            readings[idx] = StepReader(head.plan)
            if head.route == "chat":
                yield head.role(idx)
        reasoning, calls = readings[idx].advance(step)
        if step.text or reasoning or trace or (head.has_logprobs and step.settled):
            yield head.text(idx, step, traces[idx], offsets[idx], reasoning)
        for call_idx, call in calls:
            for piece in head.call(idx, call_idx, call):
                yield piece
        if step.generation is not None:
            finished[idx] = step.generation
            yield head.final(idx, step.generation, trace=trace)
    if usage:
        yield head.usage_piece([finished[idx] for idx in sorted(finished)])


def as_event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def send_stream(send: Send, events: AsyncIterator[dict[str, Any]], *, slow_reader_s: float) -> None:
    """Send the events, and after them `[DONE]` or an error event. A fault before the first event is raised instead.

    Raises:
        ApiError: nothing was sent yet.
        Disconnected: the client takes nothing for `slow_reader_s`.
    """
    first = await anext(events)
    timed = _TimedSend(send, slow_reader_s)
    await timed({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await timed(_body(as_event(first)))
    try:
        async for event in events:
            await timed(_body(as_event(event)))
        end = DONE
    except ApiError as error:
        end = as_event(error.body())
    except Disconnected:
        raise
    except Exception:  # our own mistake: a stream that is merely cut looks finished to the public client
        await timed(_end(as_event(internal_error().body())))
        raise
    await timed(_end(end))


async def watch_disconnect(receive: Receive) -> None:
    """Return once the client is gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Any) -> Any:
    """Run a coroutine, and cancel it as soon as the client is gone.

    Raises:
        Disconnected: the client went away first.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(watch_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class _TimedSend:
    def __init__(self, send: Send, limit_s: float) -> None:
        self._send, self._limit_s = send, limit_s

    async def __call__(self, message: Message) -> None:
        try:
            await asyncio.wait_for(self._send(message), self._limit_s)
        except (TimeoutError, OSError):
            raise Disconnected from None


def _end(content: bytes) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": False}


def _body(content: bytes) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": True}
