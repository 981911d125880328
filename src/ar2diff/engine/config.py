"""How an engine runs, whatever is asked of it. Free of torch."""

from dataclasses import dataclass

from ar2diff.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        prefill_chunk: prompt tokens a forward at most.
        row_multiple: every decoding pass is filled up to a multiple of this many rows. Matrix kernels round
            differently for a single row than for several (bf16, measured); 2 makes a one-token pass and a verifying
            pass agree there, at next to no cost.
        never_emit_ids: ids that are never produced, beside MASK and ids the tokenizer does not know.
    """

    prefill_chunk: int = 512
    row_multiple: int = 2
    never_emit_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefill_chunk", "row_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", given=getattr(self, name))
