"""The visibility rule: who may attend to whom. One predicate for training, decoding and tests.

A token is described by four integers: its document, its stream (0 is the clean stream, 1..K the noisy views), its
block (-1 for prompt tokens, else 0, 1, ... inside its document) and its position inside the document. The rule
(CONVERSION section 1):

- nothing crosses a document border;
- a clean token sees clean tokens only: at its own and earlier positions ("causal"), or also to the end of its
  own block ("block");
- a noisy token sees the clean tokens before its block, and its own block in its own view.

Shape letters: L sequence (queries), M sequence (keys).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CleanAttention = Literal["causal", "block"]
PAD_DOCUMENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlaces:
    """Where each token of a sequence stands; all four are int64 of shape (L,). Padding has document -1."""

    document_idx: Tensor
    stream_idx: Tensor
    block_idx: Tensor
    position_idx: Tensor

    def __len__(self) -> int:
        return self.document_idx.shape[0]

    def select(self, index: Tensor | slice | tuple[slice | None, ...]) -> "TokenPlaces":
        """The places of some of the tokens, or of all in another shape."""
        return TokenPlaces(
            document_idx=self.document_idx[index],
            stream_idx=self.stream_idx[index],
            block_idx=self.block_idx[index],
            position_idx=self.position_idx[index],
        )


def is_visible(query: TokenPlaces, key: TokenPlaces, *, clean_attention: CleanAttention) -> Tensor:
    """Whether each query may attend to each key, elementwise over places of any shapes that broadcast.

    Padding sees only itself, so that no query sees nothing. This is the definition; every faster path equals it.
    """
    same_document = (query.document_idx == key.document_idx) & (query.document_idx != PAD_DOCUMENT)
    same_block = (query.block_idx == key.block_idx) & (query.block_idx >= 0)
    key_is_clean = key.stream_idx == 0
    in_past = key.position_idx <= query.position_idx
    clean_rule = in_past | same_block if clean_attention == "block" else in_past
    from_clean = (query.stream_idx == 0) & key_is_clean & clean_rule
    to_context = (query.stream_idx > 0) & key_is_clean & (key.block_idx < query.block_idx)
    to_own_block = (query.stream_idx > 0) & (key.stream_idx == query.stream_idx) & same_block
    visible = same_document & (from_clean | to_context | to_own_block)
    both_padding = (query.document_idx == PAD_DOCUMENT) & (key.document_idx == PAD_DOCUMENT)
    return visible | (both_padding & (query.position_idx == key.position_idx))


def build_visible_mask(queries: TokenPlaces, keys: TokenPlaces, *, clean_attention: CleanAttention) -> Tensor:
    """Boolean (L, M): `is_visible` for all pairs."""
    return is_visible(
        queries.select((slice(None), None)), keys.select((None, slice(None))), clean_attention=clean_attention
    )


def causal_places(length: int, *, device: torch.device | None = None) -> TokenPlaces:
    """Places of one plain causal document of `length` tokens."""
    zeros = torch.zeros(length, dtype=torch.int64, device=device)
    return TokenPlaces(
        document_idx=zeros, stream_idx=zeros, block_idx=zeros - 1, position_idx=torch.arange(length, device=device)
    )
