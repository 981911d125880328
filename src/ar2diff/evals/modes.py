"""The ways of decoding that a report sets side by side, named as people write them: `ar`, `verified`, `steps=4`."""

from dataclasses import dataclass
from typing import Literal

from ar2diff.errors import ConfigError

Mode = Literal["ar", "verified", "diffusion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMode:
    """One column of a report.

    Attributes:
        name: what the table prints.
        parent: decode with the AR parent instead of the converted model.
        denoising_steps: passes per block of a `top_k` diffusion mode.
        confidence_threshold: of a `threshold` diffusion mode; None for the others.
        draft_len: tokens that the model drafts a cycle of the verified mode at most, fewer while little is accepted;
            None for the others. The answer does not depend on it.
        copy_drafts: the verified mode drafts by copying too. The answer does not depend on it.
    """

    name: str
    mode: Mode
    parent: bool = False
    denoising_steps: int | None = None
    confidence_threshold: float | None = None
    draft_len: int | None = None
    copy_drafts: bool = False


PARENT_MODE = EvalMode(name="parent", mode="ar", parent=True)
AR_MODE = EvalMode(name="ar", mode="ar")
VERIFIED_MODE = EvalMode(name="verified", mode="verified", draft_len=4)
COPIES_MODE = EvalMode(name="verified+copies", mode="verified", draft_len=4, copy_drafts=True)
_FIXED = {mode.name: mode for mode in (PARENT_MODE, AR_MODE, VERIFIED_MODE, COPIES_MODE)}
NAMES = ", ".join([*_FIXED, "diffusion"])


def build_modes(names: str, steps: tuple[int, ...], thresholds: tuple[float, ...]) -> tuple[EvalMode, ...]:
    """The modes of a comma-separated list out of `NAMES`.

    Raises:
        ConfigError: an unknown mode, or a step count or threshold out of range.
    """
    modes: list[EvalMode] = []
    for name in (part.strip() for part in names.split(",") if part.strip()):
        if name == "diffusion":
            modes += [_steps_mode(count) for count in steps]
            modes += [_threshold_mode(value) for value in thresholds]
        elif name in _FIXED:
            modes.append(_FIXED[name])
        else:
            raise ConfigError("unknown mode", given=name, fix=f"Choose from {NAMES}")
    if not modes:
        raise ConfigError("no mode to evaluate", given=names, fix=f"Choose from {NAMES}")
    # Named twice, a mode would be counted twice.
    return tuple(dict.fromkeys(modes))


def _steps_mode(count: int) -> EvalMode:
    if count < 1:
        raise ConfigError("denoising steps must be at least 1", given=count)
    return EvalMode(name=f"diffusion, steps={count}", mode="diffusion", denoising_steps=count)


def _threshold_mode(value: float) -> EvalMode:
    if not 0.0 < value <= 1.0:
        raise ConfigError("a confidence threshold lies above 0 and at most 1", given=value)
    return EvalMode(name=f"diffusion, threshold={value:g}", mode="diffusion", confidence_threshold=value)
