"""What a decoding loop asks of the model: forwards, and logits of rows of a forward.

A loop is a generator. It yields asks and is sent their results, so that whoever drives it may join the asks of many
requests in one forward; it yields a `Pass` whenever its answer has come a step further.
Shape letters: L rows of a forward, N chosen rows, E model dim, V vocabulary.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ar2diff.engine.generation import Pass

# Rows that see the prefix, the first `int` clean rows of the same pass, and each other.
Group = tuple[int, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardAsk:
    """One forward over new rows; its result is their hidden states (L, E), clean rows first, then the groups' rows.

    Attributes:
        clean: ids that follow the committed prefix, causally or, with `clean_is_block`, as one block.
        groups: noisy rows; each group follows the clean rows it sees.
        is_prefill: the rows only take in a part of the prompt.
    """

    clean: Sequence[int]
    groups: Sequence[Group] = ()
    clean_is_block: bool = False
    is_prefill: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return len(self.clean) + sum(len(group_ids) for _, group_ids in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsAsk:
    """The model's head over some hidden states (N, E); its result is their raw logits (N, V), the asker's own."""

    hidden_NE: Tensor


Ask = ForwardAsk | LogitsAsk
Steps = Generator[Ask | Pass, Tensor, None]
