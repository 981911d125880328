"""Which drafted tokens to keep: those that the model's own AR path agrees with.

Greedy acceptance keeps the AR answer itself; sampled acceptance keeps its distribution (speculative sampling,
Leviathan et al., 2023). Shape letters: N drafted tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def accept_greedy(drafts: Sequence[int], ar_ids: Sequence[int]) -> int:
    """The length of the longest prefix of `drafts` equal to the AR path's own choices."""
    for idx, (draft, ar_id) in enumerate(zip(drafts, ar_ids, strict=False)):
        if draft != ar_id:
            return idx
    return len(drafts)


def accept_sampled(
    drafts: Sequence[int], draft_probs_NV: Tensor | None, ar_probs_NV: Tensor, marks: Sequence[float]
) -> tuple[int, Tensor]:
    """How many drafts to keep, and the weights (V,) to draw the token after them from.

    Args:
        draft_probs_NV: what each draft was drawn from; None where drafts were not drawn but determined.
        ar_probs_NV: the AR distribution at each drafted position and the one after: N + 1 rows.
        marks: N numbers drawn uniformly from [0, 1).
    """
    for idx, (draft, mark) in enumerate(zip(drafts, marks, strict=True)):
        ar_probs_V = ar_probs_NV[idx]
        if draft_probs_NV is None:
            draft_probs_V = torch.zeros_like(ar_probs_V)
            draft_probs_V[draft] = 1.0
        else:
            draft_probs_V = draft_probs_NV[idx]
        if mark * float(draft_probs_V[draft]) >= float(ar_probs_V[draft]):
            rest_V = (ar_probs_V - draft_probs_V).clamp(min=0.0)
            return idx, rest_V
    return len(drafts), ar_probs_NV[len(drafts)]


PRIOR_CHANCE, PRIOR_CYCLES = 0.8, 2.0
"""What a place's acceptance is taken for before there is evidence, and how many cycles that is worth."""
FADING = 0.97
"""What a cycle's evidence is worth one cycle later; so a request that stopped drafting tries again."""


class AcceptanceLog:
    """What verification kept so far in one answer; it only steers how much to draft, never what is answered."""

    def __init__(self) -> None:
        self.drafted_by_offset: list[int] = []
        self.accepted_by_offset: list[int] = []
        self.reached_by_offset: list[int] = []
        self._recent: list[int] = []
        self._reached: list[float] = []
        self._kept: list[float] = []

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Note one cycle."""
        while len(self.drafted_by_offset) < num_drafted:
            self.drafted_by_offset.append(0)
            self.accepted_by_offset.append(0)
            self.reached_by_offset.append(0)
        for offset in range(num_drafted):
            self.drafted_by_offset[offset] += 1
            self.accepted_by_offset[offset] += offset < num_accepted
            self.reached_by_offset[offset] += offset <= num_accepted
        self._weigh(num_drafted, num_accepted)
        if num_drafted:
            self._recent = [*self._recent[-7:], num_accepted]

    def suggest_len(self, at_most: int) -> int:
        """Tokens to draft next: twice the recent mean acceptance and one more, so that a good run can grow."""
        if not self._recent:
            return at_most
        return min(at_most, 1 + round(2 * sum(self._recent) / len(self._recent)))

    def chances(self, count: int) -> list[float]:
        """For the first `count` places, the chance that a draft is accepted there once all before it were."""
        evidence = [*zip(self._kept, self._reached, strict=True), *[(0.0, 0.0)] * count][:count]
        return [(kept + PRIOR_CHANCE * PRIOR_CYCLES) / (reached + PRIOR_CYCLES) for kept, reached in evidence]

    def likely_lens(self, num_drafted: int, count: int) -> list[int]:
        """The `count` acceptance lengths that seem likeliest for a draft of `num_drafted` tokens, ascending."""
        seen = [self._recent.count(length) for length in range(num_drafted + 1)]
        # Before evidence: all of the draft, then short acceptances first.
        order = sorted(range(num_drafted + 1), key=lambda length: (-seen[length], length != num_drafted, length))
        return sorted(order[:count])

    def _weigh(self, num_drafted: int, num_accepted: int) -> None:
        short = max(0, num_drafted - len(self._reached))
        self._reached = [FADING * value for value in self._reached] + [0.0] * short
        self._kept = [FADING * value for value in self._kept] + [0.0] * short
        for offset in range(min(num_drafted, num_accepted + 1)):
            self._reached[offset] += 1
            self._kept[offset] += offset < num_accepted
