"""Answers counted: accuracy with its interval, agreement with the AR mode, speed, by mode and domain."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One problem answered in one mode.

    Attributes:
        correct: None where nothing is right or wrong.
        seconds: of prefill and decoding; of a batch, its share.
        drafted_by_offset, accepted_by_offset: of a verified answer, by place after the anchor.
        reveal_passes: of a diffusion answer: for each token the pass of its block that revealed it, from 0.
        num_withheld: tokens whose ids are not kept, since the task's owner asks that its text stay unpublished.
        ids_sha256: digest of them, to compare answers by.
        request_id: of an answer that a server gave.
    """

    mode: str
    problem_id: str
    domain: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    correct: bool | None
    num_forward_passes: int
    seconds: float
    drafted_by_offset: tuple[int, ...] = ()
    accepted_by_offset: tuple[int, ...] = ()
    reveal_passes: tuple[int, ...] = ()
    num_withheld: int = 0
    ids_sha256: str = ""
    request_id: str | None = None

    @property
    def num_tokens(self) -> int:
        """The answer's length."""
        return len(self.token_ids) + self.num_withheld

    def is_same(self, other: "Answer") -> bool:
        """Whether both say the same, token for token."""
        return (self.token_ids, self.ids_sha256) == (other.token_ids, other.ids_sha256)

    @property
    def is_truncated(self) -> bool:
        """True where the answer hit the token limit: counted, never graded."""
        return self.finish_reason == "length"

    @property
    def is_graded(self) -> bool:
        """True where the answer is right or wrong."""
        return self.correct is not None and not self.is_truncated

    def as_json(self) -> dict[str, Any]:
        """The sample as it is kept beside a report."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Answer":
        """The sample that `as_json` gave."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """All answers of one mode in one domain.

    Attributes:
        num_scored: of problems that have a right answer.
        num_graded: of these, those that came to their end; one that was cut off is neither right nor wrong.
        accuracy: correct over graded; None where no problem has a right answer.
        interval: 95% Wilson interval of it.
        equal_share: share of answers whose token ids equal the AR mode's.
        tokens_per_s: answer tokens over wall time, prefill included.
        num_drafts: cycles of verified decoding that drafted.
        num_accepted: drafted tokens that the AR path accepted.
    """

    mode: str
    domain: str
    num_problems: int
    num_scored: int
    num_graded: int
    num_correct: int
    num_truncated: int
    accuracy: float | None
    interval: tuple[float, float] | None
    equal_share: float | None
    num_tokens: int
    num_forward_passes: int
    tokens_per_s: float
    tokens_per_forward: float
    num_drafts: int
    num_accepted: int

    @property
    def right(self) -> str:
        """Right answers of graded ones as a table shows them; empty where no problem has a right answer."""
        return f"{self.num_correct}/{self.num_graded}" if self.num_scored else ""

    def as_json(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {**asdict(self), "interval": None if self.interval is None else list(self.interval)}


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson, 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    denominator = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / denominator
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def score_answers(answers: Sequence[Answer], *, baseline: str = "ar") -> list[Score]:
    """Scores per mode and domain, in order of first appearance; domain "all" covers every domain of a mode."""
    base = {a.problem_id: a for a in answers if a.mode == baseline}
    scores = []
    for mode in _unique(a.mode for a in answers):
        of_mode = [a for a in answers if a.mode == mode]
        domains = _unique(a.domain for a in of_mode)
        for domain in [*domains, "all"]:
            chosen = [a for a in of_mode if domain in (a.domain, "all")]
            scores.append(_score(mode, domain, chosen, base))
    return scores


def _score(mode: str, domain: str, answers: Sequence[Answer], base: Mapping[str, Answer]) -> Score:
    correct, graded = sum(bool(a.correct) for a in answers), sum(a.is_graded for a in answers)
    scored = sum(a.correct is not None for a in answers)
    tokens, passes = sum(a.num_tokens for a in answers), sum(a.num_forward_passes for a in answers)
    seconds = sum(a.seconds for a in answers)
    compared = [a.is_same(base[a.problem_id]) for a in answers if a.problem_id in base]
    return Score(
        mode=mode,
        domain=domain,
        num_problems=len(answers),
        num_scored=scored,
        num_graded=graded,
        num_correct=correct,
        num_truncated=sum(a.is_truncated for a in answers),
        accuracy=correct / max(1, graded) if scored else None,
        interval=wilson_interval(correct, graded) if scored else None,
        equal_share=sum(compared) / len(compared) if compared else None,
        num_tokens=tokens,
        num_forward_passes=passes,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        tokens_per_forward=tokens / passes if passes else 0.0,
        num_drafts=sum(sum(a.drafted_by_offset[:1]) for a in answers),
        num_accepted=sum(sum(a.accepted_by_offset) for a in answers),
    )


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
