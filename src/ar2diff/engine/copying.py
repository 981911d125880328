"""Drafts that cost no pass: what followed the last tokens where the prompt or the answer had them before.

Known as prompt lookup. Answers that quote, list or loop are guessed well; verification keeps what the AR path says,
whatever is copied. Free of torch.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ar2diff.engine.verify import AcceptanceLog

MAX_MATCH = 4
"""Longer matches are not told apart."""
MAX_PLACES = 64
"""Earlier places of a token that are looked at, the latest first: what a search costs is bounded."""


class Copy(NamedTuple):
    """Ids to draft, and how many of the last tokens matched, 1 to `MAX_MATCH`; no ids where none did."""

    token_ids: list[int]
    match_len: int


class CopyDrafts:
    """The tokens of one request so far, by place, and what verification kept of copies.

    Attributes:
        logs: acceptance by the length of the match: longer ones promise more.
    """

    def __init__(self) -> None:
        self.logs = {length: AcceptanceLog() for length in range(1, MAX_MATCH + 1)}
        self._ids: list[int] = []
        self._places: dict[int, list[int]] = {}

    @property
    def num_known(self) -> int:
        """How many tokens were added."""
        return len(self._ids)

    def add(self, token_ids: Iterable[int]) -> None:
        """Note the request's next tokens."""
        for token_id in token_ids:
            self._places.setdefault(token_id, []).append(len(self._ids))
            self._ids.append(token_id)

    def find(self, count: int) -> Copy:
        """The `count` ids after the longest match of the last tokens, the latest of equals.

        Where they run into the end they go on with themselves, as a loop would.
        """
        if not self._ids or count < 1:
            return Copy([], 0)
        best_len, best_place = 0, 0
        for place in self._places[self._ids[-1]][-2 : -2 - MAX_PLACES : -1]:
            length = self._match_len(place)
            if length > best_len:
                best_len, best_place = length, place
            if best_len == MAX_MATCH:
                break
        if best_len == 0:
            return Copy([], 0)
        period = len(self._ids) - 1 - best_place
        found = self._ids[best_place + 1 : best_place + 1 + count]
        while len(found) < count:
            found.append(found[-period] if len(found) >= period else self._ids[len(found) - period])
        return Copy(found, best_len)

    def _match_len(self, place: int) -> int:
        length = 1
        while length < min(MAX_MATCH, place + 1) and self._ids[place - length] == self._ids[-1 - length]:
            length += 1
        return length
