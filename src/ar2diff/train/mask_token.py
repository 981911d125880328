"""The mask token: which vocabulary row it takes, how that row starts, and its training beside a frozen embedding.

AR checkpoints hold near-zero rows for unused tokens, on which gradients explode; so the row starts as the mean of all
rows at their median norm. Shape letters: B batch, L sequence, E model dim, V vocabulary.
"""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ar2diff.errors import ConfigError, ModelError
from ar2diff.models.config import DecoderConfig
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import LoadedModel
from ar2diff.tokenizer import Tokenizer

_MASK_NAMES = ("<|mask|>", "<mask>", "[MASK]")
# Control tokens that no chat holds: declared spare, or a marker of notebook dumps.
_SPARE_NAMES = re.compile(r"<\|?(reserved|unused|extra_id|empty_output)")


def choose_mask_token(config: DecoderConfig, tokenizer: Tokenizer) -> int:
    """A row for MASK: a mask token by name, a padded row, a spare control token, or else one row more.

    Returns:
        The id; `config.vocab_size` means that the embedding has to grow.
    """
    named = [tokenizer.token_to_id(name) for name in _MASK_NAMES]
    if found := [idx for idx in named if idx is not None]:
        return found[0]
    if tokenizer.vocab_size < config.vocab_size:
        return tokenizer.vocab_size
    spare = [idx for idx in sorted(tokenizer.special_ids) if _SPARE_NAMES.match(tokenizer.id_to_token(idx) or "")]
    return spare[0] if spare else config.vocab_size


def place_mask_token(loaded: LoadedModel, mask_token_id: int | None) -> tuple[LoadedModel, int]:
    """The model with a mask row ready to train, and its id. A converted checkpoint keeps its own row as it is.

    Args:
        mask_token_id: a chosen id, or None for `choose_mask_token`.

    Raises:
        ConfigError: the id lies beyond the vocabulary, ends a turn, or is not the converted checkpoint's.
    """
    if loaded.diffusion is not None:
        own = loaded.diffusion.mask_token_id
        if mask_token_id not in (None, own):
            raise ConfigError(f"this checkpoint's mask token is {own}", given=mask_token_id, fix="Leave it out")
        return loaded, own
    chosen = choose_mask_token(loaded.config, loaded.tokenizer) if mask_token_id is None else mask_token_id
    if not 0 <= chosen <= loaded.config.vocab_size or chosen in loaded.tokenizer.eos_token_ids:
        raise ConfigError("mask_token_id is no free vocabulary row", given=chosen)
    if chosen == loaded.config.vocab_size:
        loaded = _grow_vocabulary(loaded)
    _start_row(loaded.decoder, chosen)
    return loaded, chosen


def _grow_vocabulary(loaded: LoadedModel) -> LoadedModel:
    decoder = loaded.decoder
    config = replace(loaded.config, vocab_size=loaded.config.vocab_size + 1)
    modules = [decoder.embedding] if config.tied_head else [decoder.embedding, decoder.head]
    for module in modules:
        weight = module.weight.detach()
        module.weight = nn.Parameter(torch.cat((weight, weight.new_zeros(1, weight.shape[1]))))
    decoder.embedding.num_embeddings = config.vocab_size
    decoder.config = config
    return replace(loaded, config=config)


@torch.no_grad()
def _start_row(decoder: Decoder, mask_token_id: int) -> None:
    weight_VE = decoder.embedding.weight
    others = torch.arange(len(weight_VE), device=weight_VE.device) != mask_token_id
    mean = weight_VE[others].float().mean(dim=0)
    median_norm = weight_VE[others].float().norm(dim=1).median()
    if not mean.norm() > 0:
        raise ModelError("the embedding is all zeros", fix="Fetch the model again")
    weight_VE[mask_token_id] = (mean * (median_norm / mean.norm())).to(weight_VE.dtype)


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
