"""How fast each contestant answers the same prompts, alone and in batches, in turns within one run.

A turn is one contestant on one batch. Contestants change places from repeat to repeat, every repeat has prompts of
its own, and nothing that is known of a prompt is kept from turn to turn. A rate counts the answers' tokens over the
seconds of the whole turn, prompts included; the first token has a figure of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Protocol

from rich.table import Table

from ar2diff.clock import Clock
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.errors import Ar2diffError, ConfigError
from ar2diff.evals.modes import EvalMode
from ar2diff.evals.run import build_request

BASELINE = "ar"
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one batch cost.

    Attributes:
        seconds: from the first prompt's start to the last token.
        first_s: until a request's first token was there, the mean over the batch.
        num_tokens: of all answers.
        num_forward_passes: forwards that requests took part in, summed over them, prompt chunks before the last left
            out; None where it is not known.
        num_blocks, num_block_passes: denoising blocks and their passes; 0 where there are none.
    """

    seconds: float
    first_s: float
    num_tokens: int
    num_forward_passes: int | None = None
    num_blocks: int = 0
    num_block_passes: int = 0


class Racer(Protocol):
    """A contestant."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        ...

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        """Answer all prompts together, greedily."""
        ...


class EngineRacer:
    """One of our modes.

    Args:
        engine: with room for the largest batch at once.
        hold_threads: wraps each turn, so that torch has the threads that this engine wants.
    """

    def __init__(
        self,
        engine: Engine,
        mode: EvalMode,
        *,
        clock: Clock,
        hold_threads: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._engine, self._mode, self._clock, self._hold_threads = engine, mode, clock, hold_threads

    @property
    def name(self) -> str:
        """The mode's."""
        return self._mode.name

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        """All prompts together on the scheduler, as a server runs them.

        Raises:
            RequestError: a prompt that cannot be served.
        """
        scheduler, first, done = self._engine.scheduler, dict[int, float](), dict[int, Generation]()
        self._engine.pages.forget_kept()
        with self._hold_threads():
            start_s = self._clock.seconds()
            for place, ids in enumerate(prompts):
                scheduler.add(place, replace(build_request(self._mode, tuple(ids), max_tokens), trace=False))
            while len(done) < len(prompts):
                for key, step in scheduler.step():
                    if isinstance(step, Ar2diffError):
                        raise step
                    assert isinstance(key, int)
                    if key not in first and (step.settled or step.generation):
                        first[key] = self._clock.seconds() - start_s
                    if step.generation is not None:
                        done[key] = step.generation
            seconds = self._clock.seconds() - start_s
        return _sum_up(list(done.values()), seconds, sum(first.values()) / len(first))


def _sum_up(generations: Sequence[Generation], seconds: float, first_s: float) -> Timing:
    passes = [count for generation in generations for count in generation.passes_per_block]
    return Timing(
        seconds=seconds,
        first_s=first_s,
        num_tokens=sum(len(generation.token_ids) for generation in generations),
        num_forward_passes=sum(generation.num_forward_passes for generation in generations),
        num_blocks=sum(count > 0 for count in passes),
        num_block_passes=sum(passes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One contestant on one batch in one repeat."""

    name: str
    batch_size: int
    repeat: int
    timing: Timing

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "batch_size": self.batch_size,
            "repeat": self.repeat,
            **asdict(self.timing),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """One contestant at one batch size: medians over the repeats.

    Attributes:
        over_ar: tokens a second over those of our AR mode in the same repeat; None without that mode.
        lowest, highest: of the repeats' tokens a second.
        tokens_per_forward: answer tokens over the forwards that a request took part in.
        passes_per_block: denoising passes of a block; None where nothing is denoised.
    """

    name: str
    batch_size: int
    tokens_per_s: float
    lowest: float
    highest: float
    over_ar: float | None
    first_token_s: float
    tokens_per_forward: float | None
    passes_per_block: float | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """All turns, and why contestants are missing."""

    turns: tuple[Turn, ...]
    absent: Mapping[str, str]
    about: Mapping[str, Any]

    @property
    def rows(self) -> list[SpeedRow]:
        """By batch size, contestants in the order of their first turn."""
        sizes = dict.fromkeys(turn.batch_size for turn in self.turns)
        names = dict.fromkeys(turn.name for turn in self.turns)
        found = {
            (name, size): [t for t in self.turns if (t.name, t.batch_size) == (name, size)]
            for size in sizes
            for name in names
        }
        return [_build_row(chosen, found.get((BASELINE, size), [])) for (_, size), chosen in found.items() if chosen]

    def as_json(self) -> dict[str, Any]:
        """What is saved as speed.json."""
        return {
            "about": dict(self.about),
            "absent": dict(self.absent),
            "rows": [asdict(row) for row in self.rows],
            "turns": [turn.as_json() for turn in self.turns],
        }

    def tables(self) -> list[Table]:
        """All that is shown on a terminal."""
        return [self.table()]

    def table(self) -> Table:
        """One row a contestant and batch size."""
        table = Table(title="Speed", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("contestant", no_wrap=True)
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(*show_row(row))
        for name, reason in self.absent.items():
            table.add_row(name, f"absent: {reason}")
        return table


HEADINGS = ("batch", "tokens\nper s", "x AR", "first\ntoken s", "tokens\n/ pass", "passes\n/ block")


def show_row(row: SpeedRow | Mapping[str, Any]) -> list[str]:
    """A row's cells as text, a dash where there is no such figure."""
    values = asdict(row) if isinstance(row, SpeedRow) else row
    return [
        str(values["name"]).replace(",", ""),
        str(values["batch_size"]),
        f"{values['tokens_per_s']:.1f}",
        _show(values["over_ar"]),
        f"{values['first_token_s']:.3f}",
        _show(values["tokens_per_forward"]),
        _show(values["passes_per_block"]),
    ]


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _build_row(turns: Sequence[Turn], baseline: Sequence[Turn]) -> SpeedRow:
    base = {turn.repeat: _rate(turn) for turn in baseline}
    ratios = [_rate(turn) / base[turn.repeat] for turn in turns if base.get(turn.repeat)]
    rates, timings = [_rate(turn) for turn in turns], [turn.timing for turn in turns]
    tokens, passes = sum(t.num_tokens for t in timings), [t.num_forward_passes for t in timings]
    forwards = sum(count for count in passes if count is not None) if None not in passes else 0
    blocks = sum(t.num_blocks for t in timings)
    return SpeedRow(
        name=turns[0].name,
        batch_size=turns[0].batch_size,
        tokens_per_s=round(median(rates), 3),
        lowest=round(min(rates), 3),
        highest=round(max(rates), 3),
        over_ar=round(median(ratios), 4) if ratios else None,
        first_token_s=round(median(t.first_s for t in timings), 4),
        tokens_per_forward=round(tokens / forwards, 3) if forwards else None,
        passes_per_block=round(sum(t.num_block_passes for t in timings) / blocks, 3) if blocks else None,
        num_tokens=tokens,
    )


def _rate(turn: Turn) -> float:
    return turn.timing.num_tokens / turn.timing.seconds if turn.timing.seconds > 0 else 0.0


def race(
    racers: Sequence[Racer], prompts: Prompts, batch_sizes: Sequence[int], *, repeats: int, max_tokens: int
) -> Iterator[Turn]:
    """Every contestant on every batch size, `repeats` times, after one short turn each to warm up.

    Args:
        prompts: at least as many as the largest batch; a repeat goes on where the one before it ended.

    Raises:
        ConfigError: too few prompts.
    """
    if len(prompts) < max(batch_sizes):
        raise ConfigError("fewer prompts than the largest batch", given=f"{len(prompts)} of {max(batch_sizes)}")
    for racer in racers:
        racer.answer(prompts[: max(batch_sizes)], min(max_tokens, WARM_UP_TOKENS))
    for repeat in range(repeats):
        for size in batch_sizes:
            chosen = [prompts[(repeat * size + idx) % len(prompts)] for idx in range(size)]
            first = repeat % len(racers)
            for racer in (*racers[first:], *racers[:first]):
                timing = racer.answer(chosen, max_tokens)
                yield Turn(name=racer.name, batch_size=size, repeat=repeat, timing=timing)


WARM_UP_TOKENS = 8
