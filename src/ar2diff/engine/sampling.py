"""Choosing tokens from logits: greedy or sampled, reproducible, whatever runs beside it.

Every draw is keyed by (seed, what for, answer position, pass), never by a batch row or by call order.
Shape letters: N rows, V vocabulary, C ids that count.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ar2diff.engine.generation import Pick, TokenLogprob
from ar2diff.engine.request import Request
from ar2diff.errors import GenerationError
from ar2diff.seeding import keyed_generator

Place = tuple[int, int]  # answer position, pass


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

    def prepare(self, logits_NV: Tensor, generated: Sequence[Sequence[int]]) -> Tensor:
        """Penalties and bias added, never-emitted ids at -inf, in place; returns the same tensor.

        Args:
            generated: for each row, the answer's tokens that its penalties count; not read where there are none.

        Raises:
            GenerationError: logits that are not finite, or nothing left to emit.
        """
        if self._request.has_penalties:
            for logits_V, ids in zip(logits_NV, generated, strict=True):
                self._penalize(logits_V, ids)
        if self._biased.numel():
            logits_NV[:, self._biased] += self._bias
        return self.ban(logits_NV)

    def ban(self, logits_NV: Tensor) -> Tensor:
        """Never-emitted ids at -inf, in place; returns the same tensor.

        Raises:
            GenerationError: as `prepare`.
        """
        if self._banned.numel():
            logits_NV[:, self._banned] = -math.inf
        check_finite(logits_NV.amax(dim=-1))
        return logits_NV

    def restrict(self, logits_NV: Tensor, allowed: Sequence[Tensor]) -> None:
        """Everything but what is allowed at -inf, in place.

        Args:
            allowed: boolean masks (V,) of the first rows, one each; other rows stay.

        Raises:
            GenerationError: nothing left to emit.
        """
        self.forbid(logits_NV, allowed)
        self.check_any_left(logits_NV)

    def forbid(self, logits_NV: Tensor, allowed: Sequence[Tensor]) -> None:
        """`restrict`, but for rows that may never come true: they may have nothing left."""
        for logits_V, allowed_V in zip(logits_NV, allowed, strict=False):
            logits_V.masked_fill_(~allowed_V.to(logits_V.device), -math.inf)

    def check_any_left(self, logits_NV: Tensor) -> None:
        """Refuse prepared rows that a constraint left nothing of.

        Raises:
            GenerationError: a row has nothing left to emit.
        """
        if not torch.isfinite(logits_NV.amax(dim=-1)).all():
            problem = "no token of this model goes on as the constraint asks"
            raise GenerationError(problem, fix="Change the constraint")

    def choose(
        self, logits_NV: Tensor, places: Sequence[Place], *, entropy: bool = False, greedy: bool = False
    ) -> list[Pick]:
        """Choose a token a row from prepared logits; ties go to the lowest id. `greedy` overrides the temperature."""
        if self.is_greedy or greedy:
            ids_N = logits_NV.argmax(dim=-1)
        else:
            ids_N = self.draw(self.probabilities(logits_NV), "token", places)
        return self.describe(logits_NV, ids_N.tolist(), entropy=entropy)

    def describe(self, logits_NV: Tensor, token_ids: Sequence[int], *, entropy: bool = False) -> list[Pick]:
        """What prepared logits say about one token a row."""
        lse_N = logits_NV.logsumexp(dim=-1)
        ids_N = torch.tensor(token_ids, dtype=torch.int64, device=logits_NV.device)
        logprobs = (logits_NV.gather(1, ids_N[:, None])[:, 0] - lse_N).tolist()
        entropies = _entropies(logits_NV, lse_N).tolist() if entropy else [0.0] * len(token_ids)
        tops = find_likeliest(logits_NV, lse_N, self._request.top_logprobs)
        return [
            Pick(token_id=token_id, logprob=logprob, entropy=value, top=top)
            for token_id, logprob, value, top in zip(token_ids, logprobs, entropies, tops, strict=True)
        ]

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        """The distribution tokens are drawn from, fp64, shape (N, V): temperature, then top_k, top_p and min_p.

        Temperature 0 puts everything on the most likely token.
        """
        wide = logits_NV.double()
        if self.is_greedy:
            return torch.zeros_like(wide).scatter_(1, wide.argmax(dim=-1, keepdim=True), 1.0)
        scaled = (wide - wide.amax(dim=-1, keepdim=True)) / self._request.temperature
        return self._limit(scaled.softmax(dim=-1))

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

    def _penalize(self, logits_V: Tensor, generated: Sequence[int]) -> None:
        asked, counts = self._request, Counter(generated)
        if asked.repetition_penalty != 1.0:
            ids_C = torch.tensor(sorted({*asked.prompt_ids, *counts}), device=logits_V.device)
            values_C, penalty = logits_V[ids_C], asked.repetition_penalty
            changed_C = torch.where(values_C > 0, values_C / penalty, values_C * penalty)
            # A tiny penalty must not turn a logit into what a broken model gives.
            most = torch.finfo(torch.float32).max
            logits_V[ids_C] = torch.where(values_C.isfinite(), changed_C.clamp(max=most), values_C)
        if counts and (asked.presence_penalty or asked.frequency_penalty):
            times_C = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits_V.device)
            ids_C = torch.tensor(list(counts), device=logits_V.device)
            logits_V[ids_C] -= asked.presence_penalty + asked.frequency_penalty * times_C

    def _limit(self, probs_NV: Tensor) -> Tensor:
        asked = self._request
        if asked.top_k is None and asked.top_p == 1.0 and asked.min_p == 0.0:
            return probs_NV
        if asked.top_k is not None or asked.top_p < 1.0:
            ordered, order = probs_NV.sort(dim=-1, descending=True, stable=True)
            if asked.top_k is not None:
                ordered[:, asked.top_k :] = 0.0
                ordered /= ordered.sum(dim=-1, keepdim=True)
            if asked.top_p < 1.0:
                before = ordered.cumsum(dim=-1) - ordered
                ordered = ordered.masked_fill(before >= asked.top_p, 0.0)
            probs_NV = torch.zeros_like(probs_NV).scatter_(1, order, ordered)
        if asked.min_p > 0.0:
            least_N1 = asked.min_p * probs_NV.amax(dim=-1, keepdim=True)
            probs_NV = probs_NV.masked_fill(probs_NV < least_N1, 0.0)
        return probs_NV / probs_NV.sum(dim=-1, keepdim=True)


def find_likeliest(logits_NV: Tensor, lse_N: Tensor, count: int) -> list[tuple[TokenLogprob, ...]]:
    """The `count` likeliest ids of each row with their log p; ids of probability 0 are left out."""
    if not count:
        return [()] * len(logits_NV)
    found = logits_NV.topk(min(count, logits_NV.shape[1]), dim=-1)
    values = (found.values - lse_N[:, None]).tolist()
    return [
        tuple(
            sorted(((i, v) for i, v in zip(ids, row, strict=True) if v > -math.inf), key=lambda iv: (-iv[1], iv[0]))
        )
        for ids, row in zip(found.indices.tolist(), values, strict=True)
    ]


def check_finite(values: Tensor) -> None:
    """Refuse what a model computed, or the largest logit of each row: NaN carries through a maximum.

    Raises:
        GenerationError: a value is not finite.
    """
    if not torch.isfinite(values).all():
        raise GenerationError("the model gives no finite logits", fix="Check the weights and their precision")


def _entropies(logits_NV: Tensor, lse_N: Tensor) -> Tensor:
    logprobs_NV = logits_NV - lse_N[:, None]
    return -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV == -math.inf, 0.0)).sum(dim=-1)
