"""Who runs when: requests wait in line, run together, one forward for all, and leave as soon as they are finished.

Each step is one forward. It serves every request that decodes, and prompt chunks in the order of arrival: the oldest
always, more while they fit into `prefill_chunk`. So neither a long prompt nor many decoding requests stop the other.
A request starts when there is a place for it and KV memory for its prompt; nobody overtakes. Where memory is short,
younger requests pause until older ones have left; nobody that runs is ever put back.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ar2diff.engine.ask import ForwardAsk, LogitsAsk, Steps
from ar2diff.engine.cache import Lease, PageTable
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.generation import Pass
from ar2diff.engine.passes import PassRunner
from ar2diff.engine.request import Request
from ar2diff.engine.session import Session
from ar2diff.errors import Ar2diffError

Result = tuple[Hashable, Pass | Ar2diffError]


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request that runs; `ask` is the forward it waits for."""

    key: Hashable
    session: Session
    steps: Steps
    lease: Lease
    ask: ForwardAsk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a scheduler needs to know of the model that it runs.

    Attributes:
        check: raises an `Ar2diffError` for a request that can never be served.
        count_places: KV places that a request needs.
        start: a request's session over a cache, and its decoding loop.
    """

    check: Callable[[Request], None]
    count_places: Callable[[Request], int]
    start: Callable[[Request, Lease], tuple[Session, Steps]]


class Scheduler:
    """Runs requests together, under keys that the caller chooses. Not for several threads at a time."""

    def __init__(self, model: Model, passes: PassRunner, pages: PageTable, config: EngineConfig) -> None:
        self._model, self._passes, self._pages, self._config = model, passes, pages, config
        self._waiting: deque[tuple[Hashable, Request]] = deque()
        self._running: dict[Hashable, _Running] = {}
        self._refused: list[Result] = []

    @property
    def capacity(self) -> int:
        """Requests that may run together; more may be added and wait."""
        return self._config.max_running

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold KV memory."""
        return len(self._running)

    @property
    def kv_use(self) -> float:
        """The share of the KV memory that running requests hold, 0 to 1."""
        return self._pages.num_used / self._pages.store.num_pages

    def add(self, key: Hashable, request: Request) -> None:
        """Take a request in; one that can never be served fails with the next step."""
        try:
            self._model.check(request)
        except Ar2diffError as error:
            self._refused.append((key, error))
            return
        self._waiting.append((key, request))

    def remove(self, key: Hashable) -> None:
        """Forget a request, wherever it is; its KV memory is free at once."""
        self._refused = [result for result in self._refused if result[0] != key]
        self._waiting = deque(item for item in self._waiting if item[0] != key)
        if key in self._running:
            self._leave(self._running[key])

    def step(self) -> list[Result]:
        """One forward for all. What came of it, in order; a request leaves with its answer or its error."""
        results, self._refused = self._refused, []
        # Inference mode must not leak to the caller between steps, so it is entered anew for each of them.
        with torch.inference_mode():
            self._admit(results)
            chosen = self._choose()
            if chosen:
                hidden = self._passes.forward([(ask, running.session.cache) for running, ask in chosen])
                self._advance([running for running, _ in chosen], hidden, results)
        return results

    def _admit(self, results: list[Result]) -> None:
        while self._waiting and len(self._running) < self.capacity:
            key, request = self._waiting[0]
            # A prompt that is scored must be computed whole: the scores of known pages are not kept.
            reuse = request.prompt_logprobs is None
            lease = self._pages.lease(request.prompt_ids, self._model.count_places(request), reuse=reuse)
            if lease is None:
                return
            self._waiting.popleft()
            try:
                session, steps = self._model.start(request, lease)
            except Ar2diffError as error:  # a constraint that does not compile
                self._pages.release(lease)
                results.append((key, error))
                continue
            self._running[key] = running = _Running(key=key, session=session, steps=steps, lease=lease)
            self._advance([running], [None], results)

    def _choose(self) -> list[tuple[_Running, ForwardAsk]]:
        """Whom the next forward serves: by arrival, since KV memory may not do for all; the oldest always."""
        chosen, prompt_rows = list[tuple[_Running, ForwardAsk]](), 0
        for running in self._running.values():
            ask = running.ask
            assert ask is not None
            is_decoding = running.session.is_prefilled
            if not is_decoding and prompt_rows and prompt_rows + ask.num_rows > self._config.prefill_chunk:
                continue
            if not self._pages.grow(running.lease, self._count_places_now(running, ask)):
                continue
            prompt_rows += 0 if is_decoding else ask.num_rows
            chosen.append((running, ask))
        return chosen

    def _count_places_now(self, running: _Running, ask: ForwardAsk) -> int:
        return running.session.cache.length + ask.num_rows + self._config.row_multiple

    def _advance(self, asking: Sequence[_Running], replies: Sequence[Tensor | None], results: list[Result]) -> None:
        """Hand out results of asks, until everyone waits for a forward or has left; logits are computed together."""
        while asking:
            asks = [self._resume(running, reply, results) for running, reply in zip(asking, replies, strict=True)]
            waiting = [(running, ask) for running, ask in zip(asking, asks, strict=True) if ask is not None]
            asking = [running for running, _ in waiting]
            replies = self._passes.logits([ask for _, ask in waiting]) if waiting else []

    def _resume(self, running: _Running, reply: Tensor | None, results: list[Result]) -> LogitsAsk | None:
        """Go on with one request until it asks again; returns what it asks of the head, if it does."""
        running.ask = None
        try:
            item = running.steps.send(reply)  # type: ignore[arg-type]  # None starts a generator
            while isinstance(item, Pass):
                if running.session.answer.is_finished:
                    results.append((running.key, running.session.finish(item)))
                    self._leave(running)
                    return None
                results.append((running.key, item))
                item = next(running.steps)
        except Ar2diffError as error:
            results.append((running.key, error))
            self._leave(running, is_spoiled=True)
            return None
        if isinstance(item, LogitsAsk):
            return item
        running.ask = item
        self._pages.publish(running.lease, running.session.reusable_ids)
        return None

    def _leave(self, running: _Running, *, is_spoiled: bool = False) -> None:
        del self._running[running.key]
        running.steps.close()
        if not is_spoiled:
            self._pages.publish(running.lease, running.session.reusable_ids)
        self._pages.release(running.lease, is_spoiled=is_spoiled)
