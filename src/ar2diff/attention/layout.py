"""How training documents lie in one sequence: each one's clean tokens, then its noisy blocks, views side by side.

A micro-batch is one long sequence of isolated documents, so padding costs nothing. Prompts have no noisy copy, and a
noisy block is present only in the views that learn something from it. The order inside a document is clean tokens,
then block 0 view 1, block 0 view 2, block 1 view 1, ...: neighbouring blocks share one attention tile.

Shape letters: L sequence, T queries of a tile, M keys of a tile, K views, N blocks, S block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ar2diff.attention.masks import CleanAttention, TokenPlaces, build_visible_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentShape:
    """One document of a row.

    Attributes:
        num_tokens: clean tokens, prompt and response.
        prompt_len: how many of them are prompt; blocks start behind it.
        block_views: boolean (N, K): which views hold a noisy copy of which response block.
    """

    num_tokens: int
    prompt_len: int
    block_views: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSpan:
    """Where one document lies: clean tokens at [start, noisy_start), noisy ones at [noisy_start, end)."""

    start: int
    noisy_start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The places of all tokens of a training sequence and the spans of its documents."""

    places: TokenPlaces
    spans: tuple[DocumentSpan, ...]
    prompt_lens: tuple[int, ...]
    block_size: int
    clean_attention: CleanAttention

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """Some queries and all keys that any of them sees.

    Attributes:
        queries: T consecutive positions.
        context, own: the keys, M in all: clean tokens, and the tile's own noisy ones (may be empty).
        num_open: the first keys, which every query sees.
        mask_TM: visibility of the keys behind those, boolean (T, M - num_open).
    """

    queries: slice
    context: slice
    own: slice
    num_open: int
    mask_TM: Tensor


def count_blocks(num_tokens: int, prompt_len: int, block_size: int) -> int:
    """Response blocks of a document; the last one may reach past its end."""
    return -(-(num_tokens - prompt_len) // block_size)


def build_layout(
    documents: Sequence[DocumentShape], *, block_size: int, clean_attention: CleanAttention
) -> RowLayout:
    """Lay the documents out one after another; nothing of one is visible from another."""
    columns: list[NDArray[np.int64]] = []
    spans = []
    start = 0
    for idx, document in enumerate(documents):
        piece = _document_places(document, idx, block_size)
        columns.append(piece)
        noisy_start, end = start + document.num_tokens, start + piece.shape[1]
        spans.append(DocumentSpan(start=start, noisy_start=noisy_start, end=end))
        start = end
    document_idx, stream_idx, block_idx, position_idx = torch.from_numpy(np.concatenate(columns, axis=1))
    places = TokenPlaces(
        document_idx=document_idx, stream_idx=stream_idx, block_idx=block_idx, position_idx=position_idx
    )
    return RowLayout(
        places=places,
        spans=tuple(spans),
        prompt_lens=tuple(document.prompt_len for document in documents),
        block_size=block_size,
        clean_attention=clean_attention,
    )


def _document_places(document: DocumentShape, idx: int, block_size: int) -> NDArray[np.int64]:
    # Rows of the result: document, stream, block, position.
    positions = np.arange(document.num_tokens)
    blocks = np.maximum((positions - document.prompt_len) // block_size, -1)
    clean = np.stack((np.full_like(positions, idx), np.zeros_like(positions), blocks, positions))
    noisy_block, noisy_view = np.nonzero(document.block_views)
    in_block = np.arange(block_size)
    noisy_positions = document.prompt_len + noisy_block[:, None] * block_size + in_block
    noisy = np.stack(
        (
            np.full(noisy_positions.size, idx),
            np.repeat(noisy_view + 1, block_size),
            np.repeat(noisy_block, block_size),
            noisy_positions.reshape(-1),
        )
    )
    return np.concatenate((clean, noisy), axis=1).astype(np.int64)


def build_tiles(layout: RowLayout, *, tile_size: int) -> list[AttentionTile]:
    """Cut a layout into tiles of about `tile_size` queries that together hold every visible pair once.

    A tile never reaches into another document, and its keys end where its last query's sight does, so the masked-out
    work is at most a tile's width per query. Tiles are in sequence order.
    """
    tiles: list[AttentionTile] = []
    for span in layout.spans:
        for queries in _cut(span.start, span.noisy_start, tile_size):
            tiles.append(_build_tile(layout, span, queries, own=slice(0, 0)))
        # Noisy tiles end at block borders, so that a block and its keys share a tile.
        noisy_size = max(tile_size // layout.block_size, 1) * layout.block_size
        for queries in _cut(span.noisy_start, span.end, noisy_size):
            tiles.append(_build_tile(layout, span, queries, own=queries))
    return tiles


def _cut(start: int, end: int, size: int) -> Iterator[slice]:
    for at in range(start, end, size):
        yield slice(at, min(at + size, end))


def _build_tile(layout: RowLayout, span: DocumentSpan, queries: slice, own: slice) -> AttentionTile:
    first, last = (
        _context_len(layout, at, is_noisy=own.stop > own.start) for at in (queries.start, queries.stop - 1)
    )
    context = slice(span.start, min(span.start + last, span.noisy_start))
    # Sight only grows along a tile, so what its first query sees, all see; the mask needs no column for it.
    num_open = min(first, context.stop - context.start)
    mask = build_visible_mask(
        layout.places.select(queries),
        _join(layout.places.select(slice(context.start + num_open, context.stop)), layout.places.select(own)),
        clean_attention=layout.clean_attention,
    )
    return AttentionTile(queries=queries, context=context, own=own, num_open=num_open, mask_TM=mask)


def _context_len(layout: RowLayout, query: int, *, is_noisy: bool) -> int:
    # How many clean tokens of its document a query sees.
    block, position = int(layout.places.block_idx[query]), int(layout.places.position_idx[query])
    if not is_noisy and (block < 0 or layout.clean_attention == "causal"):
        return position + 1
    in_block = (position - layout.prompt_lens[int(layout.places.document_idx[query])]) % layout.block_size
    return position - in_block + (0 if is_noisy else layout.block_size)


def _join(first: TokenPlaces, second: TokenPlaces) -> TokenPlaces:
    return TokenPlaces(
        document_idx=torch.cat((first.document_idx, second.document_idx)),
        stream_idx=torch.cat((first.stream_idx, second.stream_idx)),
        block_idx=torch.cat((first.block_idx, second.block_idx)),
        position_idx=torch.cat((first.position_idx, second.position_idx)),
    )
