"""The decoder: token ids and positions in, hidden states and logits out. Single-device, mask-agnostic.

Who attends to whom is the `Attend` argument's business, so training, cached decoding and tests share this one
file. Shape letters: B batch, L sequence, E model dim, V vocabulary.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ar2diff.models.config import DecoderConfig
from ar2diff.models.layers import MLP, Attend, Attention, Rerun, RMSNorm, rope_frequencies, rope_tables

if TYPE_CHECKING:
    from ar2diff.models.adapters import GatedAdapter


class DecoderLayer(nn.Module):
    """Attention and MLP with residual connections; norms before ("pre"), after ("post") or both ("sandwich").

    Attributes:
        rerun: runs a function so that a backward pass computes its inner values again; None keeps them.
    """

    rerun: Rerun | None = None

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer_idx)
        self.mlp = MLP(config)
        self.residual_scale = config.residual_scale
        for name in ("attention_in", "mlp_in") if config.norm_placement != "post" else ():
            self.add_module(f"{name}_norm", RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset))
        for name in ("attention_out", "mlp_out") if config.norm_placement != "pre" else ():
            self.add_module(f"{name}_norm", RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset))

    def forward(self, x_BLE: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The residual stream after this layer, shape (B, L, E)."""
        if self.rerun is None or not torch.is_grad_enabled():
            return self._run(x_BLE, cos, sin, attend)
        return self.rerun(self._run, x_BLE, cos, sin, attend)

    def _run(self, x_BLE: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        attended = self.attention(self._norm("attention_in", x_BLE), cos, sin, attend)
        x_BLE = self._add(x_BLE, self._norm("attention_out", attended))
        expanded = self.mlp(self._norm("mlp_in", x_BLE))
        return self._add(x_BLE, self._norm("mlp_out", expanded))

    def _norm(self, place: str, x: Tensor) -> Tensor:
        norm = self._modules.get(f"{place}_norm")
        return x if norm is None else cast(Tensor, norm(x))

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch if self.residual_scale == 1.0 else x + branch * self.residual_scale


class Decoder(nn.Module):
    """A decoder-only transformer of any supported family.

    Attributes:
        adapter: a mask-gated adapter that hangs on it, see `models/adapters.py`; its weights are not in `state_dict`.
    """

    inverse_frequencies: Tensor
    adapter: "GatedAdapter | None"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.adapter = None
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, idx) for idx in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        if not config.tied_head:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        inverse = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix, shape (V, E): the embedding itself where the head is tied."""
        return self.embedding.weight if self.config.tied_head else self.head.weight

    def embed(self, token_ids_BL: Tensor) -> Tensor:
        """Scaled token embeddings, shape (B, L, E)."""
        x: Tensor = self.embedding(token_ids_BL)
        # The scale is rounded to the working precision first, as the families' own code does.
        return x if self.config.embedding_scale == 1.0 else x * torch.tensor(self.config.embedding_scale).to(x)

    def forward(self, token_ids_BL: Tensor, position_ids_BL: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, shape (B, L, E)."""
        x = self.embed(token_ids_BL)
        cos, sin = rope_tables(position_ids_BL, self.inverse_frequencies, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        out: Tensor = self.final_norm(x)
        return out

    def logits(self, hidden_E: Tensor) -> Tensor:
        """Logits over the vocabulary for hidden states of any leading shape, in the weights' dtype."""
        logits = F.linear(hidden_E, self.head_weight)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale
