"""All benchmarks by name. A module beside this and a row here add one: evaluated and kept out of data at once."""

from ar2diff.errors import ConfigError
from ar2diff.tasks import (
    gpqa_diamond,
    gsm8k,
    humaneval,
    livecodebench,
    math500,
    mbpp,
    medmcqa,
    programs,
    prompts,
    reasoning,
    stored,
    structured,
)
from ar2diff.tasks.problem import Task

TASKS: dict[str, Task] = {
    "structured": Task(
        name=structured.NAME,
        version=structured.VERSION,
        domain=structured.DOMAIN,
        procedural=True,
        build_problems=structured.build_problems,
        score=structured.score,
        template_texts=structured.template_texts,
    ),
    "reasoning": Task(
        name=reasoning.NAME,
        version=reasoning.VERSION,
        domain=reasoning.DOMAIN,
        procedural=True,
        build_problems=reasoning.build_problems,
        score=reasoning.score,
        template_texts=reasoning.template_texts,
        libraries=("reasoning-gym",),
    ),
    "gsm8k": Task(
        name=gsm8k.NAME,
        version=gsm8k.VERSION,
        domain=gsm8k.DOMAIN,
        procedural=False,
        build_problems=stored.refuse_building,
        score=gsm8k.score,
        read_problem=gsm8k.read_problem,
    ),
    "math500": Task(
        name=math500.NAME,
        version=math500.VERSION,
        domain=math500.DOMAIN,
        procedural=False,
        build_problems=stored.refuse_building,
        score=math500.score,
        read_problem=math500.read_problem,
    ),
    "humaneval": Task(
        name=humaneval.NAME,
        version=humaneval.VERSION,
        domain=humaneval.DOMAIN,
        procedural=False,
        build_problems=stored.refuse_building,
        score=programs.passes_tests,
        read_problem=humaneval.read_problem,
    ),
    "mbpp": Task(
        name=mbpp.NAME,
        version=mbpp.VERSION,
        domain=mbpp.DOMAIN,
        procedural=False,
        build_problems=stored.refuse_building,
        score=programs.passes_tests,
        read_problem=mbpp.read_problem,
    ),
    "livecodebench": Task(
        name=livecodebench.NAME,
        version=livecodebench.VERSION,
        domain=livecodebench.DOMAIN,
        procedural=False,
        build_problems=stored.refuse_building,
        score=programs.passes_cases,
        read_problem=livecodebench.read_problem,
    ),
    "medmcqa": Task(
        name=medmcqa.NAME,
        version=medmcqa.VERSION,
        domain=medmcqa.DOMAIN,
        procedural=False,
        build_problems=stored.refuse_building,
        score=stored.score_choice,
        read_problem=medmcqa.read_problem,
    ),
    "gpqa_diamond": Task(
        name=gpqa_diamond.NAME,
        version=gpqa_diamond.VERSION,
        domain=gpqa_diamond.DOMAIN,
        procedural=False,
        build_problems=stored.refuse_building,
        score=stored.score_choice,
        read_problem=gpqa_diamond.read_problem,
        hash_only=True,
    ),
    "prompts": Task(
        name=prompts.NAME,
        version=prompts.VERSION,
        domain=prompts.DOMAIN,
        procedural=False,
        build_problems=stored.refuse_building,
        score=None,
        read_problem=prompts.read_problem,
    ),
}


def find_task(name: str) -> Task:
    """The task called `name`.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in TASKS:
        raise ConfigError("unknown task", given=name, fix=f"Use one of: {', '.join(TASKS)}")
    return TASKS[name]
