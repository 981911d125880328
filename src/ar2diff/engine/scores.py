"""Log probabilities of a prompt's own tokens, for likelihood scoring: a few rows of logits at a time.

Shape letters: L new tokens, N rows, E model dim, V vocabulary.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ar2diff.engine.ask import Ask, LogitsAsk
from ar2diff.engine.generation import TokenLogprob
from ar2diff.engine.sampling import Sampler, find_likeliest

ROWS_AT_ONCE = 32


class PromptScores:
    """What the AR path says of a prompt, token by token.

    Attributes:
        logprobs: log p of each token given those before it; None for the first.
        tops: the likeliest tokens in its place; empty for the first.

    Args:
        num_top: how many of them.
    """

    def __init__(self, sampler: Sampler, num_top: int) -> None:
        self.logprobs: list[float | None] = [None]
        self.tops: list[tuple[TokenLogprob, ...]] = [()]
        self._sampler, self._num_top = sampler, num_top

    def add(self, hidden_LE: Tensor, next_ids: Sequence[int]) -> Generator[Ask, Tensor, None]:
        """Score the tokens that follow each row; never holds more than a few rows of logits.

        Raises:
            GenerationError: the logits are not finite.
        """
        for first in range(0, len(next_ids), ROWS_AT_ONCE):
            ids = next_ids[first : first + ROWS_AT_ONCE]
            logits_NV = self._sampler.ban((yield LogitsAsk(hidden_NE=hidden_LE[first : first + len(ids)])))
            lse_N = logits_NV.logsumexp(dim=-1)
            ids_N = torch.tensor(ids, device=logits_NV.device)
            self.logprobs += (logits_NV.gather(1, ids_N[:, None])[:, 0] - lse_N).tolist()
            self.tops += find_likeliest(logits_NV, lse_N, self._num_top)
