"""Packed rows and their noise as one training sequence, with the positions that carry a loss.

Shape letters: L sequence (all documents of the micro-batch), P loss positions, N blocks, S block, K views.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ar2diff.attention.layout import DocumentShape, RowLayout, build_layout
from ar2diff.attention.masks import CleanAttention
from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.corrupt import (
    LossPositions,
    ResponseBlocks,
    causal_positions,
    corrupt_blocks,
    cut_response,
    diffusion_positions,
)
from ar2diff.diffusion.noise import BlockNoise, Bools, NoiseConfig, draw_block_noise
from ar2diff.errors import DataError
from ar2diff.models.config import Anchor

DrawNoise = Callable[[Bools, int], BlockNoise]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What turns rows into a training sequence, noise aside.

    Attributes:
        end_token_id: fills the last block of a response.
        with_causal: whether the clean stream's next-token positions are wanted.
        anchor: "last" starts the first block at the last token before the response.
    """

    block_size: int
    shift_logits: bool
    clean_attention: CleanAttention
    mask_token_id: int
    end_token_id: int
    nelbo_weighted: bool
    with_causal: bool
    anchor: Anchor = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One micro-batch: a single sequence of isolated documents.

    Attributes:
        token_ids_L: int64, on the CPU like all else here.
        logit_idx_P, target_ids_P, weights_P: the loss positions, diffusion first, then the clean stream's.
        num_diffusion: how many of them are diffusion positions.
        diffusion_scale: what the diffusion loss is a mean over: masked tokens, or, under likelihood weights, the
            supervised tokens of every view.
        row_ids: the rows it holds.
    """

    token_ids_L: Tensor
    layout: RowLayout
    logit_idx_P: Tensor
    target_ids_P: Tensor
    weights_P: Tensor
    num_diffusion: int
    diffusion_scale: int
    row_ids: tuple[int, ...]

    @property
    def num_causal(self) -> int:
        """Loss positions of the clean stream."""
        return len(self.logit_idx_P) - self.num_diffusion

    def digest(self) -> str:
        """SHA-256 over inputs, positions and targets: what an audit recomputes."""
        whole = hashlib.sha256()
        for tensor in (self.token_ids_L, self.layout.places.position_idx, self.logit_idx_P, self.target_ids_P):
            whole.update(tensor.numpy().astype("<i8").tobytes())
        return whole.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoisyDocument:
    token_ids: NDArray[np.int64]
    prompt_len: int
    blocks_start: int
    blocks: ResponseBlocks
    noise: BlockNoise


def keyed_noise(config: NoiseConfig, *, shift_logits: bool, seed: int, step: int) -> DrawNoise:
    """The training noise of one step, by row."""

    def draw(supervised_NS: Bools, row_id: int) -> BlockNoise:
        return draw_block_noise(config, supervised_NS, shift_logits=shift_logits, seed=seed, step=step, row_id=row_id)

    return draw


def build_batch(rows: Sequence[PackedRow], settings: BatchSettings, draw_noise: DrawNoise) -> TrainingBatch:
    """Lay out the rows' documents with their noisy views; documents without a response are left out.

    Raises:
        DataError: no document has a response.
    """
    documents = [document for row in rows for document in _corrupt_row(row, settings, draw_noise)]
    if not documents:
        raise DataError(
            "no document of these rows has a response to learn",
            given=f"rows {[row.row_id for row in rows]}",
            fix="Prepare the data from documents with answers",
        )
    shapes = [
        DocumentShape(num_tokens=len(d.token_ids), prompt_len=d.blocks_start, block_views=d.noise.kept_NK)
        for d in documents
    ]
    layout = build_layout(shapes, block_size=settings.block_size, clean_attention=settings.clean_attention)
    token_ids = [
        part
        for d in documents
        for part in (d.token_ids, corrupt_blocks(d.blocks, d.noise, mask_token_id=settings.mask_token_id))
    ]
    diffusion = [
        diffusion_positions(
            d.blocks,
            d.noise,
            noisy_start=span.noisy_start,
            shift_logits=settings.shift_logits,
            nelbo_weighted=settings.nelbo_weighted,
        )
        for d, span in zip(documents, layout.spans, strict=True)
    ]
    causal = [
        causal_positions(d.token_ids, d.prompt_len, start=span.start)
        for d, span in zip(documents if settings.with_causal else [], layout.spans, strict=False)
    ]
    num_diffusion = sum(len(part.logit_idx) for part in diffusion)
    num_supervised = sum(int(d.blocks.supervised_NS.sum()) * d.noise.kept_NK.shape[1] for d in documents)
    return _assemble(
        np.concatenate(token_ids),
        layout,
        diffusion + causal,
        num_diffusion=num_diffusion,
        diffusion_scale=num_supervised if settings.nelbo_weighted else num_diffusion,
        row_ids=tuple(row.row_id for row in rows),
    )


def _assemble(
    token_ids_L: NDArray[np.int64],
    layout: RowLayout,
    positions: Sequence[LossPositions],
    *,
    num_diffusion: int,
    diffusion_scale: int,
    row_ids: tuple[int, ...],
) -> TrainingBatch:
    return TrainingBatch(
        token_ids_L=torch.from_numpy(token_ids_L),
        layout=layout,
        logit_idx_P=torch.from_numpy(np.concatenate([part.logit_idx for part in positions])),
        target_ids_P=torch.from_numpy(np.concatenate([part.target_ids for part in positions])),
        weights_P=torch.from_numpy(np.concatenate([part.weights for part in positions]).astype(np.float32)),
        num_diffusion=num_diffusion,
        diffusion_scale=diffusion_scale,
        row_ids=row_ids,
    )


def _corrupt_row(row: PackedRow, settings: BatchSettings, draw_noise: DrawNoise) -> Iterator[_NoisyDocument]:
    whole = [
        (row.token_ids[start : start + length], int(prompt_len))
        for start, length, prompt_len in zip(row.document_starts, row.document_lens, row.prompt_lens, strict=True)
        if prompt_len < length
    ]
    if not whole:
        return
    cut = [
        cut_response(
            ids,
            _blocks_start(prompt_len, settings),
            block_size=settings.block_size,
            end_token_id=settings.end_token_id,
            shift_logits=settings.shift_logits,
        )
        for ids, prompt_len in whole
    ]
    # One draw for the whole row, so that levels are stratified over all its blocks.
    noise = draw_noise(np.concatenate([blocks.supervised_NS for blocks in cut]), row.row_id)
    start = 0
    for (ids, prompt_len), blocks in zip(whole, cut, strict=True):
        part = slice(start, start := start + len(blocks.token_ids_NS))
        own = BlockNoise(
            masked_NKS=noise.masked_NKS[part], kept_NK=noise.kept_NK[part], weight_NK=noise.weight_NK[part]
        )
        yield _NoisyDocument(
            token_ids=ids,
            prompt_len=prompt_len,
            blocks_start=_blocks_start(prompt_len, settings),
            blocks=blocks,
            noise=own,
        )


def _blocks_start(prompt_len: int, settings: BatchSettings) -> int:
    # A document without a prompt has no token before its response: its own first one is the first anchor.
    return max(prompt_len - 1, 0) if settings.anchor == "last" else prompt_len
