"""Hidden states of a training sequence: in one pass, or, under a mask-gated adapter, stream by stream.

With an adapter the clean stream is the frozen parent: its keys and values are computed without gradients and without
the adapter; then the noisy views run in draft mode and attend to them.

Shape letters: L sequence, C clean tokens, P loss positions, E model dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ar2diff.attention.flex import flex_attend
from ar2diff.attention.layout import RowLayout
from ar2diff.attention.noisy import (
    ClosedContext,
    SplitLayout,
    flex_noisy_attend,
    noisy_attend,
    recorded_attend,
    split_layout,
)
from ar2diff.attention.ops import LayerAttend
from ar2diff.attention.tiled import tiled_attend
from ar2diff.models.decoder import Decoder
from ar2diff.models.layers import Attend
from ar2diff.train.batch import TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """What one forward pass leaves.

    Attributes:
        at_positions_PE: at the loss positions, with gradients.
        clean_CE: the parent's at all clean tokens, without gradients; None where the clean stream is trained.
    """

    at_positions_PE: Tensor
    clean_CE: Tensor | None


def build_attend(layout: RowLayout, decoder: Decoder) -> LayerAttend:
    """The sparse attention path of the decoder's device: tiles on the CPU, FlexAttention on CUDA."""
    scale, device = decoder.config.softmax_scale, decoder.embedding.weight.device
    if device.type == "cuda":
        return flex_attend(layout, scale, device=device, compiled=True)
    return tiled_attend(layout, scale)


def forward_states(decoder: Decoder, batch: TrainingBatch, *, attend: Attend | None = None) -> HiddenStates:
    """Run the decoder over a training sequence.

    Args:
        attend: attention over the whole sequence in place of the device's own; not with an adapter.
    """
    device = decoder.embedding.weight.device
    if decoder.adapter is not None:
        assert attend is None
        return _forward_streams(decoder, batch, split_layout(batch.layout))
    token_ids_1L = batch.token_ids_L[None].to(device)
    position_ids_1L = batch.layout.places.position_idx[None].to(device)
    hidden_1LE = decoder(token_ids_1L, position_ids_1L, attend or build_attend(batch.layout, decoder))
    chosen_PE = hidden_1LE[0].index_select(0, batch.logit_idx_P.to(device))
    return HiddenStates(at_positions_PE=chosen_PE, clean_CE=None)


@torch.no_grad()
def forward_clean(decoder: Decoder, batch: TrainingBatch, split: SplitLayout, attend: Attend | None = None) -> Tensor:
    """Hidden states of the clean streams alone, without gradients, shape (C, E)."""
    hidden_1CE: Tensor = decoder(
        *_select(batch, split.clean_idx_C, decoder), attend or build_attend(split.clean, decoder)
    )
    return hidden_1CE[0]


def _forward_streams(decoder: Decoder, batch: TrainingBatch, split: SplitLayout) -> HiddenStates:
    assert decoder.adapter is not None
    contexts: list[ClosedContext] = []
    clean_CE = forward_clean(decoder, batch, split, recorded_attend(build_attend(split.clean, decoder), contexts))
    if not len(split.noisy_idx_L):
        return HiddenStates(at_positions_PE=clean_CE[batch.logit_idx_P.to(clean_CE.device)], clean_CE=clean_CE)
    scale, device = decoder.config.softmax_scale, clean_CE.device
    if device.type == "cuda":
        attend = flex_noisy_attend(split, contexts, scale, device=device, compiled=True)
    else:
        attend = noisy_attend(split, contexts, scale)
    with decoder.adapter.gated(True):
        noisy_1LE = decoder(*_select(batch, split.noisy_idx_L, decoder), attend)
    # Loss positions count along the whole sequence; here the streams lie one behind the other.
    place_L = torch.empty_like(batch.token_ids_L)
    place_L[torch.cat((split.clean_idx_C, split.noisy_idx_L))] = torch.arange(len(place_L))
    both = torch.cat((clean_CE, noisy_1LE[0]))
    chosen_PE = both.index_select(0, place_L[batch.logit_idx_P].to(device))
    return HiddenStates(at_positions_PE=chosen_PE, clean_CE=clean_CE)


def _select(batch: TrainingBatch, index: Tensor, decoder: Decoder) -> tuple[Tensor, Tensor]:
    device = decoder.embedding.weight.device
    return batch.token_ids_L[index][None].to(device), batch.layout.places.position_idx[index][None].to(device)
