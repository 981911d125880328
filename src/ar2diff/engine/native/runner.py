"""Forward passes in int8: the surface of `engine/runner.py`, computed by the C code beside this file.

A row's result is the same bits whatever other rows share its pass, however many there are and however many threads
run: verified decoding is therefore the autoregressive path itself, only wider. The slow twin is the decoder over the
unpacked weights. Shape letters: L new tokens, N chosen rows, E model dim, V vocabulary.
"""

import ctypes
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ar2diff.attention.kv_cache import CacheAttend, JoinedAttend, KVStore
from ar2diff.engine.native.build import build_library
from ar2diff.engine.native.library import ACTIVATION_CODES, TILE, Layer, Matrix, Model, Pass, Segment, load_library
from ar2diff.engine.native.pack import Arena, interleave, linear_parts, pad_vector, update_parts
from ar2diff.errors import UnsupportedModelError
from ar2diff.models.adapters import GatedAdapter
from ar2diff.models.config import DecoderConfig
from ar2diff.models.decoder import Decoder, DecoderLayer
from ar2diff.models.layers import Attend, RMSNorm, rope_tables

MAX_LAYERS = 400  # what the thread pool's table of phases holds
MAX_HEAD_DIM = 1024  # with head norms, as in csrc/native.h


class NativeRunner(nn.Module):
    """Forward passes for any number of sequences; a module, so that a forward hook can count them.

    Attributes:
        rows_are_independent: a row's bits do not depend on the row count, so passes need no filling up.
        weight_bytes: of the int8 weights, head included, with their scales.
        is_accelerated: whether the compiled code uses byte products of this processor.
        dtype: of hidden states and of the cache it needs; the weights are int8.
        has_gate: whether rows of noisy blocks must be gated: the decoder has a mask-gated adapter.

    Args:
        decoder: the weights; later changes to all but the embedding are not seen.
        cache_dir: where the compiled library is kept.
        num_threads: one for each physical core is best.
        portable: without this processor's special instructions; same results, much slower.

    Raises:
        UnsupportedModelError: the C code lacks a feature of this architecture.
        BuildError: the C code cannot be compiled on this machine.
    """

    rows_are_independent: ClassVar[bool] = True

    def __init__(self, decoder: Decoder, *, cache_dir: Path, num_threads: int, portable: bool = False) -> None:
        super().__init__()
        check_native_support(decoder)
        self.config, self.has_gate = decoder.config, decoder.adapter is not None
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._library = load_library(build_library(cache_dir, portable=portable))
        self._embedding = decoder.embedding.weight.detach()
        self._embedding_scale = torch.tensor(decoder.config.embedding_scale, dtype=self._embedding.dtype).float()
        self._inverse = decoder.inverse_frequencies
        self._cos = self._sin = torch.empty(0)
        self._arena = Arena()
        self._model, self._layers = _build_model(decoder, self._arena)
        self.weight_bytes = self._arena.num_bytes
        self.is_accelerated = bool(self._library.ar2_uses_byte_products())
        self._lock = threading.Lock()
        self._context = self._library.ar2_open(ctypes.byref(self._model), num_threads)
        if not self._context:
            raise MemoryError("no memory or threads for the native runner")
        weakref.finalize(self, self._library.ar2_close, self._context)

    def forward(self, ids_L: Tensor, positions_L: Tensor, attend: Attend, gate_L: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, fp32, shape (L, E).

        Args:
            attend: of caches in one store, in fp32 on the CPU; pages and masks are used in place.
            gate_L: True at the rows of noisy blocks, which get the adapter's updates; all other rows are the base's.
        """
        parts = attend.parts if isinstance(attend, JoinedAttend) else [(len(ids_L), attend)]
        segments, masks, store = _list_segments(parts)
        x = F.embedding(ids_L, self._embedding).float()
        if self.config.embedding_scale != 1.0:
            x *= self._embedding_scale
        x = self._pad(x)
        cos, sin = self._cos[positions_L], self._sin[positions_L]
        gate = gate_L.contiguous() if gate_L is not None and self.has_gate else None
        work = Pass(
            num_rows=len(ids_L),
            num_segments=len(segments),
            segments=segments,
            x=x.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            gate=None if gate is None else gate.data_ptr(),
            keys=store.keys.data_ptr(),
            values=store.values.data_ptr(),
            capacity=store.keys.shape[2],
            page_size=store.page_size,
        )
        with self._lock:
            self._check(self._library.ar2_forward(self._context, ctypes.byref(work)))
        del masks  # until here the C code reads them
        return x[:, : self.config.hidden_size]

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits in fp32, shape (N, V)."""
        hidden = self._pad(hidden_NE.float())
        out = torch.empty(len(hidden), self.config.vocab_size)
        with self._lock:
            self._check(self._library.ar2_logits(self._context, hidden.data_ptr(), len(hidden), out.data_ptr()))
        return out

    def reserve(self, num_positions: int) -> None:
        """Have rotary tables for positions 0 .. num_positions - 1 ready."""
        if num_positions <= self._cos.shape[0]:
            return
        cos, sin = rope_tables(torch.arange(num_positions)[None], self._inverse, torch.float32)
        half = self.config.head_dim // 2
        self._cos, self._sin = (table[0, :, 0, :half].contiguous() for table in (cos, sin))

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, -x.shape[1] % TILE)).contiguous()

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise MemoryError("no memory for a forward pass")


def _list_segments(parts: Sequence[tuple[int, Attend]]) -> tuple[ctypes.Array[Segment], list[Tensor | None], KVStore]:
    """The C form of a pass's sequences, the masks that it points at, and the store that they share."""
    segments, masks, first_row = (Segment * len(parts))(), list[Tensor | None](), 0
    stores = set[KVStore]()
    for segment, (length, attend) in zip(segments, parts, strict=True):
        assert isinstance(attend, CacheAttend), "the native runner reads the cache itself"
        attend.cache.check_room(length)
        mask = None if attend.mask_LL is None else attend.mask_LL.contiguous()
        masks.append(mask)
        stores.add(attend.cache.store)
        segment.first_row, segment.num_rows, segment.prefix_len = first_row, length, attend.cache.length
        segment.mask = None if mask is None else mask.data_ptr()
        segment.pages = attend.cache.table.data_ptr()
        first_row += length
    (store,) = stores
    assert store.keys.dtype == torch.float32
    return segments, masks, store


def check_native_support(decoder: Decoder) -> None:
    """Refuse what the C code does not compute.

    Raises:
        UnsupportedModelError: names the feature.
    """
    config = decoder.config
    missing = {
        "norms after the sublayers": config.norm_placement != "pre",
        "one norm over all query heads": config.qk_norm == "flat",
        f"more than {MAX_LAYERS} layers": config.num_layers > MAX_LAYERS,
        f"norms of heads wider than {MAX_HEAD_DIM}": bool(config.qk_norm) and config.head_dim > MAX_HEAD_DIM,
        "weights that are not on the CPU": decoder.embedding.weight.device.type != "cpu",
    }
    for feature, is_needed in missing.items():
        if is_needed:
            raise UnsupportedModelError(
                f"int8 decoding does not know {feature}", given=config.model_type, fix="Choose another precision"
            )


def _build_model(decoder: Decoder, arena: Arena) -> tuple[Model, ctypes.Array[Layer]]:
    config = decoder.config
    matrices = [
        _pack_layer(cast(DecoderLayer, layer), f"layers.{idx}", decoder.adapter, arena)
        for idx, layer in enumerate(decoder.layers)
    ]
    head = arena.add(decoder.head_weight, None)
    arena.close()
    layers = (Layer * config.num_layers)()
    for idx, layer in enumerate(decoder.layers):
        _fill_layer(layers[idx], matrices[idx], cast(DecoderLayer, layer), arena)
    return _fill_model(config, layers, head, _keep_norm(decoder.final_norm, arena)), layers


def _fill_model(config: DecoderConfig, layers: ctypes.Array[Layer], head: Matrix, final_norm: int) -> Model:
    sizes = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size")
    return Model(
        layers=layers,
        head=head,
        final_norm=final_norm,
        **{name: getattr(config, name) for name in sizes},
        activation=ACTIVATION_CODES[config.activation],
        norm_eps=config.norm_eps,
        softmax_scale=config.softmax_scale,
        residual_scale=config.residual_scale,
        logit_scale=config.logit_scale,
    )


def _pack_layer(layer: DecoderLayer, name: str, adapter: GatedAdapter | None, arena: Arena) -> dict[str, Matrix]:
    attention, mlp = layer.attention, layer.mlp
    gate, up = linear_parts(mlp.gate_proj), linear_parts(mlp.up_proj)
    bias = None if gate[1] is None or up[1] is None else interleave(gate[1], up[1])
    weights = {
        "qkv": linear_parts(attention.q_proj, attention.k_proj, attention.v_proj),
        "output": linear_parts(attention.o_proj),
        "gate_up": (interleave(gate[0], up[0]), bias),
        "down": linear_parts(mlp.down_proj),
    }
    matrices = {}
    for place, (weight, bias_N) in weights.items():
        maps = {f"{name}.{part}": cast(nn.Linear, layer.get_submodule(part)).out_features for part in _MAPS[place]}
        if (update := update_parts(adapter, list(maps), list(maps.values()))) is None:
            matrices[place] = arena.add(weight, bias_N)
            continue
        down_RK, up_NR = update
        matrices[place] = arena.add(weight, bias_N, interleave(*up_NR.chunk(2)) if place == "gate_up" else up_NR)
        matrices[f"{place}_update"] = arena.add(down_RK, None)
    return matrices


_MAPS = {
    "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "output": ("attention.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _fill_layer(into: Layer, matrices: dict[str, Matrix], layer: DecoderLayer, arena: Arena) -> None:
    for name, matrix in matrices.items():
        setattr(into, name, matrix)
    into.attention_norm = _keep_norm(cast(RMSNorm, layer.attention_in_norm), arena)
    into.mlp_norm = _keep_norm(cast(RMSNorm, layer.mlp_in_norm), arena)
    if layer.attention.qk_norm is not None:
        into.q_norm = _keep_norm(layer.attention.q_norm, arena)
        into.k_norm = _keep_norm(layer.attention.k_norm, arena)
    into.rotary = layer.attention.rotary


def _keep_norm(norm: RMSNorm, arena: Arena) -> int:
    return arena.keep(pad_vector(norm.weight.detach().float() + norm.offset))
