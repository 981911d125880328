"""How much of a run is done: by steps, or by the time that the training loop took."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The end of a run; exactly one of both is given."""

    steps: int | None
    minutes: float | None

    def is_over(self, step: int, elapsed_s: float, last_step_s: float) -> bool:
        """Whether no further step is to begin: one that would end past a time budget is not, but the first always."""
        if self.steps is not None:
            return step >= self.steps
        return step > 0 and elapsed_s + last_step_s > self._budget_s

    def share_before(self, step: int, elapsed_s: float) -> float:
        """The share of the run that lies before the step after `step` steps, in [0, 1]."""
        if self.steps is not None:
            return step / self.steps
        return min(elapsed_s / self._budget_s, 1.0)

    def share_after(self, step: int, elapsed_s: float, last_step_s: float) -> float:
        """The share of the run that is done when that step is, as far as the last one tells, in [0, 1]."""
        return self.share_before(step + 1, elapsed_s + last_step_s)

    def seconds_left(self, step: int, elapsed_s: float, last_step_s: float) -> float:
        """An estimate for what remains after `step` steps."""
        if self.steps is not None:
            return (self.steps - step) * last_step_s
        return max(self._budget_s - elapsed_s, 0.0)

    @property
    def _budget_s(self) -> float:
        assert self.minutes is not None
        return self.minutes * 60
