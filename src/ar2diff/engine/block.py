"""One diffusion block while it is denoised: what is revealed, what may still be. Free of torch."""

from collections.abc import Callable

from ar2diff.engine.generation import Pick, Reveal


class Block:
    """Tokens of one block.

    Attributes:
        start: the answer position of its first token.
        token_ids: by place in the block; None is masked. A revealed token never changes.
        reveals: the revealed tokens by place.
        num_settled: tokens that were handed to the answer, from the left.
        num_passes: denoising passes so far.

    Args:
        size: tokens in the block.
        wanted: places from this one on lie past the answer's limit and are never revealed.
        is_end: whether an id ends the turn.
    """

    def __init__(self, *, start: int, size: int, wanted: int, is_end: Callable[[int], bool]) -> None:
        self.start, self.size = start, size
        self.token_ids: list[int | None] = [None] * size
        self.reveals: dict[int, Reveal] = {}
        self.num_settled = 0
        self.num_passes = 0
        self._wanted = min(size, wanted)
        self.is_end = is_end

    def reveal(self, place: int, pick: Pick) -> Reveal:
        """Make a masked place visible."""
        assert self.token_ids[place] is None
        self.token_ids[place] = pick.token_id
        shown = Reveal(position=self.start + place, token_id=pick.token_id, logprob=pick.logprob, top=pick.top)
        self.reveals[place] = shown
        return shown

    def open_places(self) -> list[int]:
        """Masked places that the answer may still need: left of its limit and of a revealed end of turn."""
        places: list[int] = []
        for place, token_id in enumerate(self.token_ids[: self._wanted]):
            if token_id is None:
                places.append(place)
            elif self.is_end(token_id):
                break
        return places

    def unsettled_ids(self) -> list[int]:
        """The revealed tokens that the answer does not hold yet."""
        return [token_id for token_id in self.token_ids[self.num_settled :] if token_id is not None]

    def input_ids(self, mask_token_id: int) -> list[int]:
        """What the model sees."""
        return [mask_token_id if token_id is None else token_id for token_id in self.token_ids]
