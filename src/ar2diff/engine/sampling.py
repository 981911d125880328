"""Choosing tokens from logits: greedy or sampled, reproducible, whatever runs beside it.

Every draw is keyed by (seed, what for, answer position, pass), never by a batch row or by call order.
Shape letters: N rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ar2diff.engine.request import Request
from ar2diff.errors import GenerationError
from ar2diff.seeding import keyed_generator

Place = tuple[int, int]  # answer position, pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Chosen tokens of N rows: ids, log p under the raw logits, and entropy in nats (zeros where not asked for)."""

    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]


class Sampler:
    """The token rule of one request.

    Args:
        never_emit_ids: ids whose logit counts as -inf, MASK among them.
    """

    def __init__(self, request: Request, never_emit_ids: Sequence[int], *, device: torch.device) -> None:
        self._request = request
        self._banned = torch.tensor(sorted(set(never_emit_ids)), dtype=torch.int64, device=device)
        self._biased = torch.tensor(list(request.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(request.logit_bias.values()), dtype=torch.float32, device=device)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self._request.temperature == 0.0

    def prepare(self, logits_NV: Tensor) -> Tensor:
        """Bias added and never-emitted ids at -inf, in place; returns the same tensor.

        Raises:
            GenerationError: logits that are not finite, or nothing left to emit.
        """
        if self._biased.numel():
            logits_NV[:, self._biased] += self._bias
        if self._banned.numel():
            logits_NV[:, self._banned] = -math.inf
        # NaN carries through a maximum, so one number a row shows every fault.
        if not torch.isfinite(logits_NV.amax(dim=-1)).all():
            raise GenerationError("the model gives no finite logits", fix="Check the weights and their precision")
        return logits_NV

    def choose(
        self, logits_NV: Tensor, places: Sequence[Place], *, entropy: bool = False, greedy: bool = False
    ) -> Choice:
        """Choose a token a row from prepared logits; ties go to the lowest id. `greedy` overrides the temperature."""
        lse_N = logits_NV.logsumexp(dim=-1)
        if self.is_greedy or greedy:
            ids_N = logits_NV.argmax(dim=-1)
        else:
            ids_N = self.draw(self.probabilities(logits_NV), "token", places)
        logprobs_N = logits_NV.gather(1, ids_N[:, None])[:, 0] - lse_N
        entropies = _entropies(logits_NV, lse_N).tolist() if entropy else [0.0] * len(places)
        return Choice(token_ids=ids_N.tolist(), logprobs=logprobs_N.tolist(), entropies=entropies)

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        """The distribution tokens are drawn from, fp64, shape (N, V): temperature, then top_k, then top_p.

        Temperature 0 puts everything on the most likely token.
        """
        wide = logits_NV.double()
        if self.is_greedy:
            return torch.zeros_like(wide).scatter_(1, wide.argmax(dim=-1, keepdim=True), 1.0)
        scaled = (wide - wide.amax(dim=-1, keepdim=True)) / self._request.temperature
        probs_NV = scaled.softmax(dim=-1)
        if self._request.top_k is None and self._request.top_p == 1.0:
            return probs_NV
        ordered, order = probs_NV.sort(dim=-1, descending=True, stable=True)
        if self._request.top_k is not None:
            ordered[:, self._request.top_k :] = 0.0
            ordered /= ordered.sum(dim=-1, keepdim=True)
        if self._request.top_p < 1.0:
            before = ordered.cumsum(dim=-1) - ordered
            before[:, 0] = 0.0
            ordered = ordered.masked_fill(before >= self._request.top_p, 0.0)
        return torch.zeros_like(probs_NV).scatter_(1, order, ordered / ordered.sum(dim=-1, keepdim=True))

    def draw(self, weights_NV: Tensor, purpose: str, places: Sequence[Place]) -> Tensor:
        """One id a row with probability proportional to its weight, shape (N,)."""
        marks = torch.tensor([self.uniform(purpose, place) for place in places], dtype=torch.float64)
        summed_NV = weights_NV.cumsum(dim=-1)
        total_N = summed_NV[:, -1]
        # Strictly below the total, the first id whose running sum exceeds the target has a positive weight.
        below_N = torch.nextafter(total_N, torch.zeros_like(total_N))
        targets_N = torch.minimum(marks.to(total_N.device) * total_N, below_N)
        return torch.searchsorted(summed_NV, targets_N[:, None], right=True)[:, 0]

    def uniform(self, purpose: str, place: Place) -> float:
        """A number in [0, 1) for this request's seed, purpose, position and pass."""
        return float(keyed_generator(purpose, self._request.seed, *place).random())


def _entropies(logits_NV: Tensor, lse_N: Tensor) -> Tensor:
    logprobs_NV = logits_NV - lse_N[:, None]
    return -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV == -math.inf, 0.0)).sum(dim=-1)
