"""One diffusion block while it is denoised: what is revealed, what may still be. Free of torch."""

from collections.abc import Callable

from ar2diff.engine.generation import Reveal


class Block:
    """Tokens of one block.

    Attributes:
        start: the answer position of its first token.
        token_ids: by place in the block; None is masked. A revealed token never changes.
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
        self.logprobs = [0.0] * size
        self.num_settled = 0
        self.num_passes = 0
        self._wanted = min(size, wanted)
        self._is_end = is_end

    def reveal(self, place: int, token_id: int, logprob: float) -> Reveal:
        """Make a masked place visible."""
        assert self.token_ids[place] is None
        self.token_ids[place] = token_id
        self.logprobs[place] = logprob
        return Reveal(position=self.start + place, token_id=token_id, logprob=logprob)

    def open_places(self) -> list[int]:
        """Masked places that the answer may still need: left of its limit and of a revealed end of turn."""
        places: list[int] = []
        for place, token_id in enumerate(self.token_ids[: self._wanted]):
            if token_id is None:
                places.append(place)
            elif self._is_end(token_id):
                break
        return places

    def input_ids(self, mask_token_id: int) -> list[int]:
        """What the model sees."""
        return [mask_token_id if token_id is None else token_id for token_id in self.token_ids]
