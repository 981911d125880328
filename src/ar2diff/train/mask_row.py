"""The mask token's embedding row, trained beside a frozen embedding.

Shape letters: B batch, L sequence, E model dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ar2diff.models.decoder import Decoder


class MaskRow(nn.Module):
    """The mask row as a parameter of its own, put in place of the frozen embedding's row in every forward pass.

    The gradient of the rest of the embedding is then never computed.
    """

    def __init__(self, decoder: Decoder, mask_token_id: int) -> None:
        super().__init__()
        self.row = nn.Parameter(decoder.embedding.weight[mask_token_id].detach().clone())
        self._decoder = [decoder]  # in a list: not a submodule
        self._mask_token_id = mask_token_id
        self._hook = decoder.embedding.register_forward_hook(self._replace)

    def _replace(self, _: nn.Module, inputs: tuple[Any, ...], embedded_BLE: Tensor) -> Tensor:
        return torch.where((inputs[0] == self._mask_token_id)[..., None], self.row, embedded_BLE)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the row into the embedding, as saving needs it."""
        self._decoder[0].embedding.weight[self._mask_token_id] = self.row

    @torch.no_grad()
    def read_again(self) -> None:
        """Take the row over from the embedding, after weights were loaded into it."""
        self.row.copy_(self._decoder[0].embedding.weight[self._mask_token_id])

    def remove(self) -> None:
        """Give the decoder its plain embedding back, the trained row in it."""
        self.write_back()
        self._hook.remove()


@torch.no_grad()
def measure_mask_row(decoder: Decoder, mask_row: MaskRow | None, mask_token_id: int) -> float | None:
    """The norm of the mask's embedding row; None where ranks hold parts of the embedding."""
    if mask_row is not None:
        return float(mask_row.row.norm())
    weight = decoder.embedding.weight
    return None if isinstance(weight, DTensor) else float(weight[mask_token_id].norm())
