"""The engine: a loaded model that answers requests, pass by pass or all at once."""

from collections.abc import Callable, Iterator

import torch

from ar2diff.clock import Clock
from ar2diff.engine.ask import Steps
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.generation import Generation, Pass
from ar2diff.engine.loops import decode_ar, decode_diffusion
from ar2diff.engine.passes import PassRunner
from ar2diff.engine.precision import build_runner
from ar2diff.engine.request import Request, check_request
from ar2diff.engine.session import Session
from ar2diff.engine.speculate import decode_verified
from ar2diff.models.loading import LoadedModel

LOOPS: dict[str, Callable[[Session], Steps]] = {
    "diffusion": decode_diffusion,
    "verified": decode_verified,
    "ar": decode_ar,
}


class Engine:
    """Answers one request at a time. A failed request leaves nothing behind.

    Args:
        loaded: the model; its weights must not change while the engine lives.
        clock: what timings in the results are measured with.

    Attributes:
        runner: the forward passes; a module, so that a forward hook can count them.
        passes: runs what decoding loops ask on the runner.
        precision_reason: what they are computed in, and why.

    Raises:
        BuildError, UnsupportedModelError: the precision asked for is impossible here.
    """

    def __init__(self, loaded: LoadedModel, *, clock: Clock, config: EngineConfig | None = None) -> None:
        self.loaded = loaded
        self.config = config or EngineConfig()
        self.runner, self.precision_reason = build_runner(loaded.decoder, self.config)
        self.passes = PassRunner(self.runner, self.config)
        self._clock = clock

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

    def stream(self, request: Request) -> Iterator[Pass]:
        """The answer step by step; the last `Pass` carries the answer. Leaving early frees its memory.

        Raises:
            RequestError, GenerationError: as `generate`; a request that cannot be served fails here, not later.
        """
        session = self.open_session(request)
        return _run(session, LOOPS[request.mode](session), self.passes)

    def open_session(self, request: Request) -> Session:
        """A request's state before its first pass, for who drives passes by hand; `passes` runs what it asks.

        Raises:
            RequestError: this model cannot serve the request.
        """
        check_request(request, self.loaded.config, self.loaded.diffusion)
        return Session(
            request,
            runner=self.runner,
            tokenizer=self.loaded.tokenizer,
            diffusion=self.loaded.diffusion,
            config=self.config,
            clock=self._clock,
        )


def _run(session: Session, steps: Steps, passes: PassRunner) -> Iterator[Pass]:
    # Inference mode must not leak to the caller between steps, so it is entered anew for each of them.
    while True:
        with torch.inference_mode():
            step = next(steps)
            while not isinstance(step, Pass):
                step = steps.send(passes.run(step, session.cache))
            if session.answer.is_finished:
                step = session.finish(step)
        yield step
        if step.generation is not None:
            return
