"""Ask problems in one mode, time the answers and grade them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ar2diff.clock import Clock
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError
from ar2diff.evals.modes import EvalMode
from ar2diff.evals.scores import Answer
from ar2diff.hashing import sha256_json
from ar2diff.models.loading import LoadedModel
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import ANSWER_MARK, find_choice
from ar2diff.tasks.table import TASKS
from ar2diff.tokenizer import Tokenizer


class AnsweringEngine(Protocol):
    """A model that answers requests, here or over a server."""

    loaded: LoadedModel

    def generate_many(self, requests: Sequence[Request]) -> list[Generation | Ar2diffError]:
        """The whole answers, or what each was refused with, in the requests' order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestants:
    """The two engines of a comparison; they share a tokenizer."""

    parent: AnsweringEngine
    converted: AnsweringEngine
    tokenizer: Tokenizer


def answer_problems(
    contestants: Contestants, problems: Sequence[Problem], mode: EvalMode, *, max_tokens: int, clock: Clock
) -> list[Answer]:
    """Answers to problems that are asked together, graded; one that reaches `max_tokens` is truncated, never graded.

    What is known of a prompt from an earlier answer is forgotten first, so that every mode takes its prompts in.

    Raises:
        RequestError: a prompt that cannot be served.
    """
    engine = contestants.parent if mode.parent else contestants.converted
    if isinstance(engine, Engine):
        engine.pages.forget_kept()
    requests = [
        build_request(mode, tuple(_encode(contestants.tokenizer, problem)), max_tokens) for problem in problems
    ]
    start = clock.seconds()
    generations = engine.generate_many(requests)
    seconds = (clock.seconds() - start) / len(problems)
    return [
        _grade(generation, mode, problem, seconds) for generation, problem in zip(generations, problems, strict=True)
    ]


def _encode(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    return tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True)


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
        copy_drafts=mode.copy_drafts,
        trace=mode.mode == "diffusion",
    )


def _grade(generation: Generation | Ar2diffError, mode: EvalMode, problem: Problem, seconds: float) -> Answer:
    if isinstance(generation, Ar2diffError):
        raise generation
    truncated, task = generation.finish_reason == "length", TASKS[problem.task]
    answer = Answer(
        mode=mode.name,
        problem_id=problem.id,
        domain=problem.domain,
        text=generation.text,
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason,
        correct=None if task.score is None else not truncated and task.score(problem, generation.text),
        num_forward_passes=generation.num_forward_passes,
        seconds=seconds,
        drafted_by_offset=generation.drafted_by_offset,
        accepted_by_offset=generation.accepted_by_offset,
        reveal_passes=_list_reveal_passes(generation),
    )
    return _withhold(answer) if task.hash_only else answer


def _withhold(answer: Answer) -> Answer:
    """The answer without its text, which may repeat the question: what is graded stays, the letter after the mark."""
    letter = find_choice(answer.text)
    return replace(
        answer,
        text="" if letter is None else f"{ANSWER_MARK} {letter}",
        token_ids=(),
        reveal_passes=(),
        num_withheld=len(answer.token_ids),
        ids_sha256=sha256_json(list(answer.token_ids)),
    )


def _list_reveal_passes(generation: Generation) -> tuple[int, ...]:
    """For each token the pass of its block that revealed it; empty where there was no trace."""
    revealed = {reveal.position: step.pass_idx for step in generation.passes for reveal in step.reveals}
    return tuple(revealed[place] for place in range(len(generation.token_ids))) if revealed else ()
