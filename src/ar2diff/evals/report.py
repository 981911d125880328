"""One comparison as a table for people and as JSON for machines."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from ar2diff.evals.scores import Answer, Score, score_answers
from ar2diff.evals.statistics import Difference, compare_answers

BASELINE = "ar"
# Short, and without rules between columns: the table of two domains fits a terminal of 80 columns.
HEADINGS = ("same\nas AR", "cut\noff", "bits/\ntoken", "tokens\nper s", "x AR", "tokens\n/ pass")
DOMAIN_HEADINGS = ("tokens/s", "x AR", "tokens a pass", "accepted a draft", "same as AR", "cut off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Scores by mode and domain.

    Attributes:
        bits_per_token: by mode: of the reference answers, in the causal modes exact, in diffusion modes the bound.
        about: what was compared where: model roots, hardware, versions, settings.
    """

    answers: tuple[Answer, ...]
    bits_per_token: Mapping[str, float]
    about: Mapping[str, Any]

    @property
    def scores(self) -> list[Score]:
        """By mode and domain; domain "all" last in each mode."""
        return score_answers(self.answers, baseline=BASELINE)

    def as_json(self) -> dict[str, Any]:
        """What is saved as eval.json."""
        return {
            "about": dict(self.about),
            "scores": [score.as_json() for score in self.scores],
            "bits_per_token": dict(self.bits_per_token),
            "against_ar": self._compare(),
            "speedup_over_ar": {s.mode: round(v, 4) for s in self._overall() if (v := self._speedup(s)) is not None},
        }

    def _compare(self) -> list[dict[str, Any]]:
        """Every mode against the baseline, by domain; not where nothing is right or wrong."""
        others = [score for score in self.scores if score.mode != BASELINE and score.num_scored]
        return [
            {"mode": score.mode, "domain": score.domain, **self.against_baseline(score).as_json()} for score in others
        ]

    def against_baseline(self, score: Score) -> Difference:
        """A score's mode against the AR mode, problem by problem."""
        return compare_answers(self.answers, score.mode, BASELINE, score.domain)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> "EvalReport":
        """The report that `as_json` and its answers' `as_json` gave."""
        answers = tuple(Answer.from_json(sample) for sample in samples)
        return cls(answers=answers, bits_per_token=content["bits_per_token"], about=content["about"])

    def tables(self) -> list[Table]:
        """The comparison, and where some domain has no right answers, the speed in each domain."""
        return [self.table(), *([self._domain_table()] if self.has_unscored else [])]

    @property
    def has_unscored(self) -> bool:
        """Whether some problems have no right answer."""
        return any(answer.correct is None for answer in self.answers)

    def table(self) -> Table:
        """The comparison, one row a mode; right answers of the domains that have any."""
        domains = list(dict.fromkeys(answer.domain for answer in self.answers if answer.correct is not None))
        title = "Converted model beside its AR parent"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("mode", no_wrap=True)
        for heading in (*(f"{escape(domain)}\nright" for domain in domains), *HEADINGS):
            table.add_column(heading, justify="right", overflow="fold")
        for score in self._overall():
            table.add_row(*self._cells(score, domains))
        return table

    def _cells(self, overall: Score, domains: Sequence[str]) -> list[str]:
        by_domain = {s.domain: s for s in self.scores if s.mode == overall.mode}
        bits, speedup = self.bits_per_token.get(overall.mode), self._speedup(overall)
        right = [by_domain[domain].right if domain in by_domain else "-" for domain in domains]
        equal = overall.equal_share
        return [
            overall.mode.replace(",", ""),
            *right,
            "-" if equal is None else f"{equal:.0%}",
            str(overall.num_truncated),
            "-" if bits is None else f"{bits:.3f}",
            f"{overall.tokens_per_s:.1f}",
            "-" if speedup is None else f"{speedup:.2f}",
            f"{overall.tokens_per_forward:.2f}",
        ]

    def domain_rows(self) -> list[list[str]]:
        """Domain, mode, and what `DOMAIN_HEADINGS` name, of every domain but "all"."""
        scores = [score for score in self.scores if score.domain != "all"]
        ar_speed = {score.domain: score.tokens_per_s for score in scores if score.mode == BASELINE}
        return [
            [
                score.domain,
                score.mode.replace(",", ""),
                f"{score.tokens_per_s:.1f}",
                f"{score.tokens_per_s / speed:.2f}" if (speed := ar_speed.get(score.domain)) else "-",
                f"{score.tokens_per_forward:.2f}",
                f"{score.num_accepted / score.num_drafts:.2f}" if score.num_drafts else "-",
                "-" if score.equal_share is None else f"{score.equal_share:.0%}",
                f"{score.num_truncated}/{score.num_problems}",
            ]
            for domain in dict.fromkeys(score.domain for score in scores)
            for score in scores
            if score.domain == domain
        ]

    def _domain_table(self) -> Table:
        title = "Speed by domain"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for heading in ("domain", "mode"):
            table.add_column(heading, no_wrap=True)
        for heading in DOMAIN_HEADINGS:
            table.add_column(heading.replace(" a ", "\n/ "), justify="right")
        for domain, *cells in self.domain_rows():
            table.add_row(escape(domain), *cells)
        return table

    def _overall(self) -> list[Score]:
        return [score for score in self.scores if score.domain == "all"]

    def _speedup(self, score: Score) -> float | None:
        baseline = next((s for s in self._overall() if s.mode == BASELINE), None)
        return score.tokens_per_s / baseline.tokens_per_s if baseline and baseline.tokens_per_s else None


def render_difference(before: EvalReport, after: EvalReport) -> Table:
    """Two reports of the same modes side by side, on the problems that both asked."""
    shared = {answer.problem_id for answer in before.answers} & {answer.problem_id for answer in after.answers}
    pairs = zip(_overall_of(before, shared), _overall_of(after, shared), strict=True)
    title = f"Before and after training, on the same {len(shared)} problems"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    for heading in ("right\nbefore", "right\nafter", "tokens/pass\nbefore", "tokens/pass\nafter"):
        table.add_column(heading, justify="right")
    for first, last in pairs:
        right = [f"{score.num_correct}/{score.num_scored}" for score in (first, last)]
        speed = [f"{score.tokens_per_forward:.2f}" for score in (first, last)]
        table.add_row(first.mode.replace(",", ""), *right, *speed)
    return table


def _overall_of(report: EvalReport, problem_ids: set[str]) -> list[Score]:
    answers = [answer for answer in report.answers if answer.problem_id in problem_ids]
    return [score for score in score_answers(answers, baseline=BASELINE) if score.domain == "all"]
