"""All benchmarks by name. A module beside this and a row here add one: evaluated and kept out of data at once."""

from ar2diff.errors import ConfigError
from ar2diff.tasks import reasoning, structured
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
}


def find_task(name: str) -> Task:
    """The task called `name`.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in TASKS:
        raise ConfigError("unknown task", given=name, fix=f"Use one of: {', '.join(TASKS)}")
    return TASKS[name]
