"""Ask one problem in one mode, time the answer and grade it."""

from dataclasses import dataclass
from typing import Protocol

from ar2diff.clock import Clock
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.evals.modes import EvalMode
from ar2diff.evals.scores import Answer
from ar2diff.models.loading import LoadedModel
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.table import TASKS
from ar2diff.tokenizer import Tokenizer


class AnsweringEngine(Protocol):
    """A model that answers requests, here or over a server."""

    loaded: LoadedModel

    def generate(self, request: Request) -> Generation:
        """The whole answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestants:
    """The two engines of a comparison; they share a tokenizer."""

    parent: AnsweringEngine
    converted: AnsweringEngine
    tokenizer: Tokenizer


def answer_problem(
    contestants: Contestants, problem: Problem, mode: EvalMode, *, max_tokens: int, clock: Clock
) -> Answer:
    """One answer, graded; one that reaches `max_tokens` is truncated: counted, never graded."""
    prompt_ids = contestants.tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True)
    engine = contestants.parent if mode.parent else contestants.converted
    return _answer(engine, build_request(mode, tuple(prompt_ids), max_tokens), mode, problem, clock)


def build_request(mode: EvalMode, prompt_ids: tuple[int, ...], max_tokens: int) -> Request:
    """The greedy request that a mode stands for."""
    policy, parameter = ("threshold", mode.confidence_threshold) if mode.confidence_threshold else ("top_k", None)
    return Request(
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        mode=mode.mode,
        denoising_steps=mode.denoising_steps,
        policy=policy,
        policy_parameter=parameter,
        draft_len=mode.draft_len,
        adaptive_draft=mode.draft_len is not None,
        trace=mode.mode == "diffusion",
    )


def _answer(engine: AnsweringEngine, request: Request, mode: EvalMode, problem: Problem, clock: Clock) -> Answer:
    start = clock.seconds()
    generation = engine.generate(request)
    seconds = clock.seconds() - start
    truncated = generation.finish_reason == "length"
    return Answer(
        mode=mode.name,
        problem_id=problem.id,
        domain=problem.domain,
        text=generation.text,
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason,
        correct=not truncated and TASKS[problem.task].score(problem, generation.text),
        num_forward_passes=generation.num_forward_passes,
        seconds=seconds,
        drafted_by_offset=generation.drafted_by_offset,
        accepted_by_offset=generation.accepted_by_offset,
        reveal_passes=_list_reveal_passes(generation),
    )


def _list_reveal_passes(generation: Generation) -> tuple[int, ...]:
    """For each token the pass of its block that revealed it; empty where there was no trace."""
    revealed = {reveal.position: step.pass_idx for step in generation.passes for reveal in step.reveals}
    return tuple(revealed[place] for place in range(len(generation.token_ids))) if revealed else ()
