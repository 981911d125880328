"""Masks from the model's own decoding in place of noise: each view shows a block as some denoising pass saw it.

`reveals.npy` holds, block by block in the order of the shard's documents, the pass that revealed each position; what
no pass revealed holds `NEVER`. A revealed token stays, so before pass p exactly those of p and later are masked.

Shape letters: N blocks, S block, K views.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ar2diff.data.stream import RowStream
from ar2diff.diffusion.noise import BlockNoise, Bools
from ar2diff.errors import DataError
from ar2diff.seeding import keyed_generator
from ar2diff.train.batch import DrawNoise

REVEALS_NAME = "reveals.npy"
NEVER = 2**15 - 1

Reveals = NDArray[np.int16]


class Traces:
    """The traces of a shard's documents.

    Args:
        path: of `reveals.npy`.
        stream: over the shard; says which documents a row packs.

    Raises:
        DataError: the file is no array of blocks, or of another shard; a step of another block size is one too.
    """

    def __init__(self, path: Path, stream: RowStream) -> None:
        try:
            self._reveals_NS: Reveals = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"the traces cannot be read: {error}", given=str(path), fix="Decode them again") from None
        if self._reveals_NS.dtype != np.int16 or self._reveals_NS.ndim != 2:
            raise DataError("the traces have the wrong type", given=str(path), fix="Decode them again")
        self.block_size = int(self._reveals_NS.shape[1])
        self._stream = stream
        blocks = -(-stream.response_lens // self.block_size)
        self._starts = np.concatenate([[0], np.cumsum(blocks)])
        if self._starts[-1] != len(self._reveals_NS):
            raise DataError("the traces are of another shard", given=str(path), fix="Decode them again")

    def at(self, *, num_views: int, seed: int, step: int) -> DrawNoise:
        """The masks of one step, by row."""

        def draw(supervised_NS: Bools, row_id: int) -> BlockNoise:
            if supervised_NS.shape[1] != self.block_size:
                raise DataError(
                    f"the traces are of blocks of {self.block_size}",
                    given=f"block size {supervised_NS.shape[1]}",
                    fix="Train the block size that was decoded",
                )
            parts = [
                self._reveals_NS[self._starts[document] : self._starts[document + 1]]
                for document in self._stream.documents_of(row_id)
            ]
            generator = keyed_generator("trace", seed, step, row_id)
            drawn_NK = generator.random((len(supervised_NS), num_views))
            return draw_states(np.concatenate(parts), supervised_NS, drawn_NK)

        return draw


def draw_states(reveals_NS: Reveals, supervised_NS: Bools, drawn_NK: NDArray[np.float64]) -> BlockNoise:
    """One state of each block for each view, no state twice; a block with fewer states than views keeps fewer.

    Args:
        drawn_NK: uniform in [0, 1), picks among a block's passes that revealed something supervised.
    """
    num_blocks, num_views = drawn_NK.shape
    masked_NKS = np.zeros((num_blocks, num_views, reveals_NS.shape[1]), dtype=np.bool_)
    kept_NK = np.zeros((num_blocks, num_views), dtype=np.bool_)
    for block in range(num_blocks):
        passes = np.unique(reveals_NS[block][supervised_NS[block]]).tolist()
        for view in range(min(num_views, len(passes))):
            chosen = passes.pop(int(drawn_NK[block, view] * len(passes)))
            masked_NKS[block, view] = reveals_NS[block] >= chosen
            kept_NK[block, view] = True
    return BlockNoise(masked_NKS=masked_NKS, kept_NK=kept_NK, weight_NK=np.ones((num_blocks, num_views)))
