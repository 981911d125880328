"""Choices on the event loop: outcomes come from the engine thread into a bounded buffer, in order.

An `Answer` is all choices of one HTTP request; leaving it cancels what is not finished.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType

from ar2diff.clock import Clock
from ar2diff.engine.generation import Generation, Pass
from ar2diff.engine.request import Request
from ar2diff.serve.limits import Limits
from ar2diff.serve.metrics import Metrics
from ar2diff.serve.problems import ApiError, failed, unavailable
from ar2diff.serve.worker import Deliver, Failure, Job, Outcome, Refusal, Worker


class Answer:
    """The running choices of one request, as an async context manager.

    Attributes:
        finished: whole choices by index, as they come to their end.

    Raises:
        ApiError: on entering: 429 where the queue is full, 503 where the engine takes nothing.
    """

    def __init__(
        self, worker: Worker, requests: Sequence[Request], *, limits: Limits, clock: Clock, metrics: Metrics
    ) -> None:
        self._worker, self._requests, self._limits = worker, list(requests), limits
        self._clock, self._metrics = clock, metrics
        self._ready: deque[tuple[int, Outcome]] = deque()
        self._wake = asyncio.Event()
        self._open = set(range(len(requests)))
        self._jobs: list[Job] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._started_s = clock.seconds()
        self._is_seen = self._is_left = False
        self.finished: dict[int, Generation] = {}

    async def __aenter__(self) -> "Answer":
        loop = asyncio.get_running_loop()
        asked = [(request, self._deliver_to(loop, idx)) for idx, request in enumerate(self._requests)]
        try:
            self._jobs = self._worker.submit(asked)
        except Refusal as refusal:
            raise as_refusal(refusal.reason, self._worker, self._metrics) from None
        self._timers = [
            loop.call_later(self._limits.queue_s, self._expire_queue),
            loop.call_later(self._limits.request_s, self._expire, "the answer took too long", "request_timeout"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_left = True
        for timer in self._timers:
            timer.cancel()
        for idx in self._open:
            self._worker.cancel(self._jobs[idx])
        self._metrics.cancelled.inc(len(self._open) if self._jobs else 0)

    async def outcomes(self) -> AsyncIterator[tuple[int, Pass]]:
        """Passes with their choice's index, until every choice has its last one.

        Raises:
            ApiError: a choice failed.
        """
        while self._open:
            while not self._ready:
                self._wake.clear()
                await self._wake.wait()
            idx, outcome = self._ready.popleft()
            if isinstance(outcome, Failure):
                self._open.discard(idx)
                raise _as_error(outcome)
            self._observe(outcome)
            if outcome.generation is not None:
                self._open.discard(idx)
                self.finished[idx] = outcome.generation
            yield idx, outcome

    async def generations(self) -> list[Generation]:
        """Every choice's whole answer, in order."""
        async for _ in self.outcomes():
            pass
        return [self.finished[idx] for idx in sorted(self.finished)]

    def _deliver_to(self, loop: asyncio.AbstractEventLoop, idx: int) -> Deliver:
        def deliver(outcome: Outcome) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(self._take, idx, outcome)

        return deliver

    def _take(self, idx: int, outcome: Outcome) -> None:
        if self._is_left or idx not in self._open:
            return
        self._ready.append((idx, outcome))
        self._wake.set()
        if len(self._ready) > self._limits.max_buffered_passes and not isinstance(outcome, Failure):
            self._expire("the reader is too slow", "slow_reader")

    def _expire_queue(self) -> None:
        if self._jobs and not self._jobs[0].is_started:
            self._expire("no place came free in time", "queue_timeout")

    def _expire(self, message: str, code: str) -> None:
        self._metrics.rejected.labels(code).inc()
        for idx in self._open:
            self._worker.cancel(self._jobs[idx])
        self._ready.clear()
        self._ready.append((min(self._open, default=0), Failure(message=message, code=code)))
        self._wake.set()

    def _observe(self, step: Pass) -> None:
        if not self._is_seen and (step.settled or step.generation is not None):
            self._is_seen = True
            self._metrics.first_token_s.observe(self._clock.seconds() - self._started_s)
        if step.generation is not None:
            self._metrics.observe(step.generation)


def as_refusal(reason: str, worker: Worker, metrics: Metrics) -> ApiError:
    """The error for a request that the worker does not take: 429 with a time to wait, or 503."""
    metrics.rejected.labels(reason).inc()
    if reason != "queue_full":
        return unavailable(f"the server is {reason}", f"server_{reason}")
    wait_s = min(30, max(1, round(worker.num_waiting * metrics.mean_answer_s)))
    headers = {"retry-after": str(wait_s)}
    return ApiError(429, "too many requests are waiting", code=reason, kind="rate_limit_error", headers=headers)


_UNAVAILABLE = ("shutting_down", "engine_dead", "queue_timeout")


def _as_error(failure: Failure) -> ApiError:
    if failure.code in _UNAVAILABLE:
        return unavailable(failure.message, failure.code)
    if failure.code == "request_timeout":
        return ApiError(504, failure.message, code=failure.code, kind="server_error")
    return failed(failure.message, failure.code)
