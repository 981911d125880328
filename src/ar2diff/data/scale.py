"""The parts of a data run made on many machines, by datatrove's executors: on Ray here, on Slurm by the same step.

`MakeParts` is one pipeline step of datatrove: task r of n makes the parts of node r of n, as `prepare_parts` does.
Both sides of a cluster see one file system. Nothing is imported of datatrove or Ray before `make_parts_on_ray` runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ar2diff.data.config import DataConfig
from ar2diff.data.pipeline import prepare_parts
from ar2diff.data.receipt import Node
from ar2diff.errors import ConfigError
from ar2diff.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeParts:
    """A step for any of datatrove's executors; `prepare` with the same config joins what it makes.

    Args:
        tokenizer_dir: the model folder whose tokenizer is used.
        out_dir: the folder that `prepare` will make, an absolute path that every machine sees.
        fetched: the folder of each downloaded source, by its text.
    """

    config: DataConfig
    tokenizer_dir: Path
    out_dir: Path
    fetched: Mapping[str, Path] = field(default_factory=dict)

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Make the parts of task `rank` of `world_size`; what came from the step before is passed on."""
        prepare_parts(
            self.config,
            Tokenizer.from_folder(self.tokenizer_dir),
            self.out_dir,
            node=Node(index=rank, count=world_size),
            progress=None,
            fetched=self.fetched,
        )
        return data


def make_parts_on_ray(step: MakeParts, *, num_tasks: int, logging_dir: Path) -> None:
    """Run the tasks on the Ray cluster that `RAY_ADDRESS` names, or on this machine, one processor each.

    A task that fails leaves its parts to `prepare`, which makes them and then shows the fault itself.

    Args:
        logging_dir: for datatrove's logs and its marks of finished tasks.

    Raises:
        ConfigError: the `scale` extra is not installed, or there are no tasks.
    """
    if num_tasks < 1:
        raise ConfigError("no tasks", given=num_tasks, fix="Take at least one")
    try:
        from datatrove.executor.ray import RayPipelineExecutor
    except ImportError:
        raise ConfigError("datatrove and Ray are not installed", fix="pip install 'ar2diff[scale]'") from None
    # Parts that are there are skipped by their names, also those of tasks that were cut short.
    RayPipelineExecutor(
        [step], tasks=num_tasks, mem_per_cpu_gb=1, logging_dir=str(logging_dir), skip_completed=False
    ).run()
