"""Choose and initialise the mask token: a reserved row where the vocabulary has one, else a new row."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ar2diff.errors import ModelError
from ar2diff.models.config import DecoderConfig
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import LoadedModel
from ar2diff.tokenizer import Tokenizer

MASK_TEXT = "<|MASK|>"

# Rows that published block-diffusion conversions of a family use, so that their exports and ours agree.
# Valid only while the tokenizer leaves them free.
FAMILY_MASK_IDS: dict[str, int] = {"qwen2": 151665, "qwen3": 151669}

# Control tokens that mean a mask, or nothing, in order of preference. "<empty_output>" is one of the eleven control
# tokens of SmolLM2 whose rows are equal: never trained ("<repo_name>" and "<reponame>" were).
RESERVED_TEXTS: tuple[str, ...] = (
    "<|MASK|>",
    "<|mask|>",
    "<mask>",
    "[MASK]",
    "<|reserved_special_token_0|>",
    "<|reserved_0|>",
    "<unused0>",
    "<empty_output>",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskToken:
    """The row that stands for MASK.

    Attributes:
        id: its index in the embedding, after growing if `is_new_row`.
        text: how it is shown; for a row that the tokenizer does not know, `<|MASK|>`.
        is_new_row: whether embedding and head must grow by one row first.
    """

    id: int
    text: str
    is_new_row: bool


def choose_mask_token(tokenizer: Tokenizer, config: DecoderConfig, hf_config: Mapping[str, Any]) -> MaskToken:
    """The mask token of a fresh conversion, by the first rule that applies.

    1. A row that the family's published conversions use, if the tokenizer leaves it free.
    2. A control token from `RESERVED_TEXTS`, unless it ends a turn or the chat template writes it.
    3. A padded row: the first one beyond every id that the tokenizer knows.
    4. A new row at the end.
    """
    ends = {*tokenizer.eos_token_ids, *_declared_ids(hf_config)}
    family_id = FAMILY_MASK_IDS.get(config.model_type)
    if family_id is not None and family_id < config.vocab_size and tokenizer.id_to_token(family_id) is None:
        return MaskToken(id=family_id, text=MASK_TEXT, is_new_row=False)
    for text in RESERVED_TEXTS:
        idx = tokenizer.token_to_id(text)
        free = idx is not None and idx in tokenizer.special_ids and idx not in ends
        if idx is not None and free and text not in (tokenizer.chat_template or ""):
            return MaskToken(id=idx, text=text, is_new_row=False)
    first_free = tokenizer.max_token_id + 1
    return MaskToken(id=first_free, text=MASK_TEXT, is_new_row=first_free >= config.vocab_size)


def init_mask_embedding(decoder: Decoder, mask_token_id: int, *, num_real_rows: int, rescale: bool = True) -> None:
    """Set the mask's embedding row to the mean of the real rows, rescaled to their median norm.

    Only that row changes. An untied head keeps its row: the mask's logit is minus infinity everywhere.

    Args:
        decoder: changed in place.
        mask_token_id: an existing row.
        num_real_rows: rows that the tokenizer uses (`tokenizer.max_token_id + 1`); padded rows do not count.
        rescale: False keeps the plain mean, whose norm is far below that of a token.

    Raises:
        ModelError: the row does not exist, or the mean of the rows is zero.
    """
    weight = decoder.embedding.weight
    if not 0 <= mask_token_id < weight.shape[0]:
        raise ModelError("the mask token has no embedding row", given=mask_token_id, fix="Grow the vocabulary first")
    rows = _real_rows(weight, mask_token_id, num_real_rows)
    mean = rows.mean(dim=0)
    if rescale:
        norm = mean.norm()
        if not norm > 0:
            raise ModelError("the mean of the embedding rows is zero", fix="Check the weights")
        mean = mean * (rows.norm(dim=1).median() / norm)
    with torch.no_grad():
        weight[mask_token_id] = mean.to(weight.dtype)


def grow_vocabulary(decoder: Decoder, config: DecoderConfig) -> None:
    """Give embedding and head the rows of `config.vocab_size`; new rows are zero until initialised.

    `config` is the decoder's own with a larger `vocab_size`; it becomes `decoder.config`.
    """
    added = config.vocab_size - decoder.config.vocab_size
    assert added >= 0, "a vocabulary never shrinks"
    decoder.embedding.weight = nn.Parameter(_with_rows(decoder.embedding.weight, added))
    decoder.embedding.num_embeddings += added
    if not config.tied_head:
        decoder.head.weight = nn.Parameter(_with_rows(decoder.head.weight, added))
        decoder.head.out_features += added
    decoder.config = config


def add_mask_token(loaded: LoadedModel, *, rescale: bool = True) -> tuple[LoadedModel, MaskToken]:
    """A parent made ready for conversion: its mask token chosen and initialised, the vocabulary grown if need be.

    The decoder is changed in place; use the returned model, whose config knows the new size. `tensor_root` stays
    the parent's.
    """
    token = choose_mask_token(loaded.tokenizer, loaded.config, loaded.hf_config)
    config = dataclasses.replace(loaded.config, vocab_size=max(loaded.config.vocab_size, token.id + 1))
    grow_vocabulary(loaded.decoder, config)
    num_real_rows = loaded.tokenizer.max_token_id + 1
    init_mask_embedding(loaded.decoder, token.id, num_real_rows=num_real_rows, rescale=rescale)
    hf_config = {**loaded.hf_config, "vocab_size": config.vocab_size}
    return dataclasses.replace(loaded, config=config, hf_config=hf_config), token


def _with_rows(weight: Tensor, added: int) -> Tensor:
    return torch.cat((weight.detach(), weight.new_zeros(added, weight.shape[1])))


def _real_rows(weight: Tensor, mask_token_id: int, num_real_rows: int) -> Tensor:
    rows = weight.detach()[:num_real_rows].float()
    keep = torch.arange(rows.shape[0], device=rows.device) != mask_token_id
    return rows[keep]


def _declared_ids(hf_config: Mapping[str, Any]) -> set[int]:
    ids: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = hf_config.get(key)
        ids.update(idx for idx in (value if isinstance(value, list) else [value]) if isinstance(idx, int))
    return ids
