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

    def select(self, index: Tensor | slice) -> "TokenPlaces":
        """The places of some of the tokens."""
        return TokenPlaces(
            document_idx=self.document_idx[index],
            stream_idx=self.stream_idx[index],
            block_idx=self.block_idx[index],
            position_idx=self.position_idx[index],
        )


def build_visible_mask(queries: TokenPlaces, keys: TokenPlaces, *, clean_attention: CleanAttention) -> Tensor:
    """Boolean (L, M): True where the query may attend to the key. Padding sees only itself, so that no row is empty.

    This is the definition; every faster path equals it.
    """
    q_doc, q_stream = queries.document_idx[:, None], queries.stream_idx[:, None]
    q_block, q_pos = queries.block_idx[:, None], queries.position_idx[:, None]
    k_doc, k_stream = keys.document_idx[None], keys.stream_idx[None]
    k_block, k_pos = keys.block_idx[None], keys.position_idx[None]
    same_document = (q_doc == k_doc) & (q_doc != PAD_DOCUMENT)
    same_block = (q_block == k_block) & (q_block >= 0)
    k_clean = k_stream == 0
    in_past = k_pos <= q_pos
    clean_rule = in_past | same_block if clean_attention == "block" else in_past
    from_clean = (q_stream == 0) & k_clean & clean_rule
    to_context = (q_stream > 0) & k_clean & (k_block < q_block)
    to_own_block = (q_stream > 0) & (k_stream == q_stream) & same_block
    visible = same_document & (from_clean | to_context | to_own_block)
    padding = (q_doc == PAD_DOCUMENT) & (k_doc == PAD_DOCUMENT) & (q_pos == k_pos)
    return visible | padding


def causal_places(length: int, *, device: torch.device | None = None) -> TokenPlaces:
    """Places of one plain causal document of `length` tokens."""
    zeros = torch.zeros(length, dtype=torch.int64, device=device)
    return TokenPlaces(
        document_idx=zeros, stream_idx=zeros, block_idx=zeros - 1, position_idx=torch.arange(length, device=device)
    )
