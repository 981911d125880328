"""How an engine runs, whatever is asked of it. Free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ar2diff.errors import ConfigError

Precision = Literal["loaded", "int8", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        prefill_chunk: prompt tokens a forward at most, of all requests together; requests that decode always run.
        max_running: requests that run together at most; more wait for their turn.
        page_size: tokens of a page of KV cache, the grain at which prefixes are used again.
        kv_tokens: room in the KV cache, in tokens, for all running requests and kept prefixes; taken once. None
            is 2,048 tokens for each of `max_running` requests, and at least one whole context.
        row_multiple: every decoding pass is filled up to a multiple of this many rows. Matrix kernels round
            differently for a single row than for several (bf16, measured); 2 makes a one-token pass and a verifying
            pass agree there, at next to no cost.
            In int8 rows are independent, and it is not used.
        precision: "loaded" computes in the dtype that the weights were loaded in. "int8" runs compiled code on the
            CPU, in which a row's result never depends on the other rows of a pass; where that is impossible it is an
            error. "auto" takes int8 where it is possible; `Engine.precision_reason` says what was taken and why.
        num_threads: for int8; one for each physical core is best, with torch itself held to one thread: both would
            otherwise spin on the same cores between passes.
        library_dir: where compiled code is kept, needed for "int8" and "auto"; the user's own, since it is run.
        pass_seconds: seconds of a forward by row count, ascending, at least two counts, for requests that let the
            engine choose the length of drafts. None measures them when the first such request comes.
        never_emit_ids: ids that are never produced, beside MASK and ids the tokenizer does not know.
    """

    prefill_chunk: int = 512
    max_running: int = 8
    page_size: int = 32
    kv_tokens: int | None = None
    row_multiple: int = 2
    precision: Precision = "loaded"
    num_threads: int = 1
    library_dir: Path | None = None
    pass_seconds: tuple[tuple[int, float], ...] | None = None
    never_emit_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefill_chunk", "row_multiple", "num_threads", "max_running", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1", given=value)
        if self.page_size < 1 or self.page_size % 32:
            raise ConfigError("page_size must be a multiple of 32", given=self.page_size)
        rows = [count for count, _ in self.pass_seconds or ((1, 0.0), (2, 0.0))]
        if len(rows) < 2 or rows != sorted(set(rows)):
            raise ConfigError("pass_seconds needs at least two row counts, ascending", given=rows)
        if self.precision not in get_args(Precision):
            raise ConfigError("unknown precision", given=self.precision, fix=f"Use {', '.join(get_args(Precision))}")
        if self.precision != "loaded" and self.library_dir is None:
            raise ConfigError(f"precision {self.precision} needs library_dir", fix="Name a folder for compiled code")
