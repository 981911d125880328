"""The engine: a loaded model that answers requests, together and pass by pass."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from ar2diff.attention.kv_cache import KEY_GROUP, KVCache, KVStore, PagedCache
from ar2diff.clock import Clock
from ar2diff.engine.ask import ForwardAsk, LogitsAsk, Steps
from ar2diff.engine.cache import Lease, PageTable
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.draft_plan import PassCosts
from ar2diff.engine.generation import Generation, Pass
from ar2diff.engine.grammar import GrammarCompiler
from ar2diff.engine.loops import decode_ar, decode_diffusion, score_prompt
from ar2diff.engine.passes import PassRunner
from ar2diff.engine.precision import AnyRunner, build_runner
from ar2diff.engine.request import Request, check_request
from ar2diff.engine.scheduler import Model, Scheduler
from ar2diff.engine.session import Session, count_places
from ar2diff.engine.speculate import decode_verified
from ar2diff.errors import Ar2diffError, ConfigError, RequestError
from ar2diff.models.loading import LoadedModel

LOOPS: dict[str, Callable[[Session], Steps]] = {
    "diffusion": decode_diffusion,
    "verified": decode_verified,
    "ar": decode_ar,
}
PLACES_EACH = 2048
"""KV places for each running request where `EngineConfig.kv_tokens` does not say."""


class Engine:
    """Answers requests; those that are open at a time share every forward. A failed request leaves nothing behind.

    `generate`, `stream` and `generate_many` may be called from several threads. Who drives `scheduler` by hand uses
    nothing else of the engine meanwhile.

    Args:
        loaded: the model; its weights must not change while the engine lives.
        clock: what timings in the results are measured with.

    Attributes:
        runner: the forward passes; a module, so that a forward hook can count them.
        grammars: compiles constraints. It may take 2 s of the processor: a server does it
            beforehand, outside the engine's thread.
        passes: runs what decoding loops ask on the runner.
        pages: the KV memory, taken once.
        scheduler: who runs when.
        precision_reason: what is computed in, and why.

    Raises:
        BuildError, UnsupportedModelError: the precision asked for is impossible here.
        ConfigError: `never_emit_ids` beyond the vocabulary.
    """

    def __init__(self, loaded: LoadedModel, *, clock: Clock, config: EngineConfig | None = None) -> None:
        self.loaded = loaded
        self.config = config or EngineConfig()
        bad = next((idx for idx in self.config.never_emit_ids if not 0 <= idx < loaded.config.vocab_size), None)
        if bad is not None:
            raise ConfigError(f"never_emit_ids run from 0 to {loaded.config.vocab_size - 1}", given=bad)
        self.runner, self.precision_reason = build_runner(loaded.decoder, self.config)
        self.grammars = GrammarCompiler(loaded.tokenizer, loaded.config.vocab_size)
        self.passes = PassRunner(self.runner, self.config)
        self.pages = PageTable(_build_store(self.runner, self.config))
        model = Model(check=self.check, count_places=self._count_places, start=self._start)
        self.scheduler = Scheduler(model, self.passes, self.pages, self.config)
        self._clock = clock
        self._costs = PassCosts(dict(self.config.pass_seconds)) if self.config.pass_seconds else None
        self._lock = threading.Lock()
        self._left: deque[object] = deque()
        self._results: dict[object, deque[Pass | Ar2diffError]] = {}

    def generate(self, request: Request) -> Generation:
        """The whole answer.

        Raises:
            RequestError: this model cannot serve the request; nothing was computed.
            GenerationError: the model's logits are not finite.
        """
        for step in self.stream(request):
            if step.generation is not None:
                return step.generation
        raise AssertionError("a stream ends with its answer")

    def generate_many(self, requests: Iterable[Request]) -> list[Generation | Ar2diffError]:
        """The answers to many requests, in their order, run together; what fails holds its error."""
        keys = [self._enter(request) for request in requests]
        try:
            return [_last(self._follow(key)) for key in keys]
        finally:
            for key in keys:
                self._exit(key)

    def stream(self, request: Request) -> Iterator[Pass]:
        """The answer step by step; the last `Pass` carries the answer. Leaving early frees its memory.

        Raises:
            RequestError, GenerationError: as `generate`; a request that cannot be served fails here, not later.
        """
        self.check(request)
        return self._stream(request)

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

        Raises:
            RequestError: names the field.
        """
        check_request(request, self.loaded.config, self.loaded.diffusion)
        places, room = self._count_places(request), self.pages.store.num_pages * self.pages.store.page_size
        if self.pages.count_pages(places) > self.pages.store.num_pages:
            raise RequestError(
                f"the request never fits into the KV memory of {room} tokens",
                given=f"{places} tokens, prompt and answer",
                fix="Ask for fewer tokens, or give the engine more kv_tokens",
            )

    def pass_costs(self) -> PassCosts:
        """What forwards cost by their rows, as configured or as measured when first asked for."""
        if self._costs is None:
            with torch.inference_mode():
                self._costs = PassCosts(self._time_passes())
        return self._costs

    def open_session(self, request: Request) -> Session:
        """A request's state before its first pass, with a cache of its own, for who drives passes by hand.

        Raises:
            RequestError: this model cannot serve the request.
        """
        check_request(request, self.loaded.config, self.loaded.diffusion)
        return self._open(request, self._build_cache(self._count_places(request)))

    def _stream(self, request: Request) -> Iterator[Pass]:
        # A generator of its own: a stream that nobody reads holds nothing.
        key = self._enter(request)
        try:
            yield from self._follow(key)
        finally:
            self._exit(key)

    def _enter(self, request: Request) -> object:
        key = object()
        with self._lock:
            self._results[key] = deque()
            self.scheduler.add(key, request)
        return key

    def _exit(self, key: object) -> None:
        # A stream may be dropped anywhere, even by the garbage collector in the middle of a step; then the next one
        # who steps sweeps it out.
        self._left.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while self._left:
            key = self._left.popleft()
            self.scheduler.remove(key)
            del self._results[key]

    def _follow(self, key: object) -> Iterator[Pass]:
        while True:
            result = self._next_result(key)
            if isinstance(result, Ar2diffError):
                raise result
            yield result
            if result.generation is not None:
                return

    def _next_result(self, key: object) -> Pass | Ar2diffError:
        # The results of a step are kept for all: whoever steps brings the others' answers on.
        with self._lock:
            while not self._results[key]:
                self._sweep()
                for other, result in self.scheduler.step():
                    self._results[other].append(result)
            return self._results[key].popleft()

    def _start(self, request: Request, lease: Lease) -> tuple[Session, Steps]:
        session = self._open(request, lease.cache)
        return session, (LOOPS[request.mode] if request.max_tokens else score_prompt)(session)

    def _open(self, request: Request, cache: PagedCache) -> Session:
        self.runner.reserve(self._count_places(request))
        constraint = request.constraint
        return Session(
            request,
            model=self.runner.config,
            cache=cache,
            tokenizer=self.loaded.tokenizer,
            diffusion=self.loaded.diffusion,
            config=self.config,
            clock=self._clock,
            form=self.grammars.compile(constraint).start() if constraint else None,
            costs=self.pass_costs() if request.chooses_draft_len else None,
        )

    def _time_passes(self) -> dict[int, float]:
        """The least of some timings for each of some row counts, up to a whole block; about 20 plain steps in all."""
        diffusion = self.loaded.diffusion
        widest = max(2, diffusion.block_size if diffusion else 1)
        counts = sorted({*(2**power for power in range(widest.bit_length())), widest})
        cache = self._build_cache(KEY_GROUP + widest + self.config.row_multiple)
        self.runner.reserve(cache.capacity)
        cache.commit(KEY_GROUP)
        found = dict.fromkeys(counts, math.inf)
        # The first round finds cold memory and unrecorded passes.
        for _ in range(3):
            for count in counts:
                started_s = self._clock.seconds()
                hidden = self.passes.forward([(ForwardAsk(clean=[0] * count), cache)])[0]
                self.passes.logits([LogitsAsk(hidden_NE=hidden)])
                found[count] = min(found[count], self._clock.seconds() - started_s)
        return found

    def _build_cache(self, capacity: int) -> KVCache:
        config = self.runner.config
        return KVCache(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            softmax_scale=config.softmax_scale,
            capacity=capacity,
            dtype=self.runner.dtype,
            device=self.runner.device,
        )

    def _count_places(self, request: Request) -> int:
        return count_places(request, self.loaded.config, self.loaded.diffusion, row_multiple=self.config.row_multiple)


def _last(steps: Iterator[Pass]) -> Generation | Ar2diffError:
    try:
        for step in steps:
            if step.generation is not None:
                return step.generation
    except Ar2diffError as error:
        return error
    raise AssertionError("a stream ends with its answer")


def _build_store(runner: AnyRunner, config: EngineConfig) -> KVStore:
    model = runner.config
    whole = model.max_seq_len + PLACES_EACH // 8  # behind the context a pass stages blocks and lanes
    places = config.kv_tokens or max(whole, config.max_running * min(whole, PLACES_EACH))
    return KVStore(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        softmax_scale=model.softmax_scale,
        num_pages=-(-places // config.page_size),
        page_size=config.page_size,
        dtype=runner.dtype,
        device=runner.device,
    )
