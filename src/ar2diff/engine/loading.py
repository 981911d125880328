"""An engine from a model's path: which weights are loaded, and what they are computed in, by one word."""

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch

from ar2diff.clock import Clock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.errors import ConfigError
from ar2diff.models.loading import load_model

LoadPrecision = Literal["fp32", "bf16", "int8", "auto"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_precision(precision: str) -> None:
    """Refuse a word that is no precision.

    Raises:
        ConfigError: names the known ones.
    """
    if precision not in get_args(LoadPrecision):
        raise ConfigError("unknown precision", given=precision, fix=f"Use {', '.join(get_args(LoadPrecision))}")


def load_engine(
    path: Path,
    precision: LoadPrecision,
    *,
    clock: Clock,
    library_dir: Path,
    device: str = "cpu",
    num_threads: int,
    config: EngineConfig | None = None,
) -> Engine:
    """Load a model and build its engine.

    Args:
        precision: "int8" is the compiled CPU path, "auto" takes it where it can and bf16 where it cannot;
            `Engine.precision_reason` says which and why.
        library_dir: where compiled code is kept.
        num_threads: of the compiled path.
        config: further settings; precision, threads and folder come from the other arguments.

    Raises:
        BuildError, UnsupportedModelError: int8 was asked for and is impossible here.
        ModelError: as `load_model`.
    """
    check_precision(precision)
    plain = config or EngineConfig()
    if precision in ("fp32", "bf16"):
        return Engine(load_model(path, dtype=_DTYPES[precision], device=device), clock=clock, config=plain)
    compiled = replace(
        plain,
        precision="int8" if precision == "int8" else "auto",
        num_threads=num_threads,
        library_dir=library_dir,
    )
    if device == "cpu":
        engine = Engine(load_model(path), clock=clock, config=compiled)
        if engine.runner.rows_are_independent or precision == "int8":
            return engine
    elif precision == "int8":
        raise ConfigError("precision int8 is for the CPU", given=device, fix="Ask for bf16")
    return Engine(load_model(path, dtype=torch.bfloat16, device=device), clock=clock, config=plain)
