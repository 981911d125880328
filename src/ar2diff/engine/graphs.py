"""Forward passes with fixed shapes, which a GPU replays as one recorded graph instead of hundreds of launches.

A pass is filled up to a shape from a short list: so many rows, sequences, rows of a sequence, and keys. What differs
between two passes of a shape lies in buffers that are written before a replay: ids, positions, where keys are stored,
which pages are read and who sees whom. Attention reads the pages of a store where they lie. Off a GPU the same code
runs without a recording; the slow twin is `engine/runner.py`.

Shape letters: R rows, B sequences, S rows of a sequence, M keys, H query heads, K kv heads, D head dim, E model dim.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ar2diff.attention.kv_cache import CacheAttend, JoinedAttend, KVStore
from ar2diff.engine.runner import Runner
from ar2diff.models.decoder import Decoder
from ar2diff.models.layers import Attend

MAX_ROWS = 256
MAX_SEQUENCES = 64
KEYS_STEP = 256

Shape = tuple[int, int, int, int]


@dataclass(kw_only=True)
class _Buffers:
    """What one recorded pass reads and writes; `hidden_RE` is None before its first run."""

    ids_R: Tensor
    positions_R: Tensor
    stored_R: Tensor
    slot_of_row_R: Tensor
    row_of_slot_BS: Tensor
    places_BM: Tensor
    bias_BSM: Tensor
    graph: "torch.cuda.CUDAGraph | None" = field(default=None)
    hidden_RE: Tensor | None = field(default=None)


class GraphRunner(Runner):
    """A `Runner` that replays recorded passes where a shape of its list fits, and runs as its parent elsewhere.

    Prefill chunks and passes with gated rows run as the parent's.

    Attributes:
        num_recorded: shapes that have been recorded so far.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        # Recorded passes hold the tables' addresses, so they must never move.
        super().reserve(decoder.config.max_seq_len)
        self._recorded: dict[tuple[Shape, int, torch.Size], _Buffers] = {}
        self._captures = self.device.type == "cuda"

    @property
    def num_recorded(self) -> int:
        """Shapes that have been recorded so far."""
        return len(self._recorded)

    def reserve(self, num_positions: int) -> None:
        """Have rotary tables ready; recorded passes are forgotten where the tables must grow."""
        if num_positions > self._cos.shape[0]:
            self._recorded.clear()
            super().reserve(num_positions)

    def forward(self, ids_L: Tensor, positions_L: Tensor, attend: Attend, gate_L: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, shape (L, E)."""
        parts = _list_parts(attend, len(ids_L))
        shape = choose_shape(parts) if gate_L is None else None
        if shape is None:
            return super().forward(ids_L, positions_L, attend, gate_L)
        store = parts[0][1].cache.store
        # A store may lie where another one lay that is gone.
        key = (shape, store.keys.data_ptr(), store.keys.shape)
        buffers = self._recorded.get(key) or self._open_buffers(shape)
        _fill(buffers, ids_L, positions_L, parts)
        if buffers.graph is not None:
            buffers.graph.replay()
        elif key in self._recorded or not self._captures:
            buffers.hidden_RE = self._run(buffers, store)
        else:
            self._record(buffers, store)
        self._recorded[key] = buffers
        assert buffers.hidden_RE is not None
        return buffers.hidden_RE[: len(ids_L)].clone()

    def _record(self, buffers: _Buffers, store: KVStore) -> None:
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(
            side
        ):  # libraries choose kernels and take memory in a first run, which is not recorded
            self._run(buffers, store)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            buffers.hidden_RE = self._run(buffers, store)
        buffers.graph = graph
        graph.replay()

    def _run(self, buffers: _Buffers, store: KVStore) -> Tensor:
        attend = _FixedAttend(buffers, store, groups=self.config.num_heads // self.config.num_kv_heads)
        return super().forward(buffers.ids_R, buffers.positions_R, attend)

    def _open_buffers(self, shape: Shape) -> _Buffers:
        rows, sequences, size, keys = shape

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=self.device)

        return _Buffers(
            ids_R=zeros(rows),
            positions_R=zeros(rows),
            stored_R=zeros(rows),
            slot_of_row_R=zeros(rows),
            row_of_slot_BS=zeros(sequences, size),
            places_BM=zeros(sequences, keys),
            bias_BSM=torch.zeros(sequences, size, keys, dtype=self.dtype, device=self.device),
        )


def choose_shape(parts: list[tuple[int, CacheAttend]]) -> Shape | None:
    """The smallest listed shape (R, B, S, M) that holds a pass, or None where it is too wide to be recorded."""
    rows, sizes = sum(length for length, _ in parts), [length for length, _ in parts]
    keys = max(attend.cache.length + length for length, attend in parts)
    if rows > MAX_ROWS or len(parts) > MAX_SEQUENCES or len({id(attend.cache.store) for _, attend in parts}) > 1:
        return None
    return _power(rows), _power(len(parts)), _power(max(sizes)), -(-keys // KEYS_STEP) * KEYS_STEP


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _list_parts(attend: Attend, length: int) -> list[tuple[int, CacheAttend]]:
    if isinstance(attend, JoinedAttend):
        return list(attend.parts)
    assert isinstance(attend, CacheAttend), "fixed shapes need a cache"
    return [(length, attend)]


def _fill(buffers: _Buffers, ids_L: Tensor, positions_L: Tensor, parts: list[tuple[int, CacheAttend]]) -> None:
    """Write one pass into its buffers. Rows that fill up repeat the last one, so they store what it stores."""
    rows, size, keys = len(buffers.ids_R), *buffers.bias_BSM.shape[1:]
    stored, slots, places = list[int](), list[int](), list[Tensor]()
    row_of_slot = [[0] * size for _ in buffers.places_BM]
    buffers.bias_BSM.zero_()
    for idx, (length, attend) in enumerate(parts):
        cache = attend.cache
        cache.check_room(length)
        start, page_size = cache.length, cache.store.page_size
        row_of_slot[idx][:length] = range(len(stored), len(stored) + length)
        slots += range(idx * size, idx * size + length)
        stored += [cache.pages[p // page_size] * page_size + p % page_size for p in range(start, start + length)]
        num_pages = -(-(start + length) // page_size)
        pages = torch.tensor(cache.pages[:num_pages])[:, None] * page_size + torch.arange(page_size)
        # What fills up is read too, though masked: a place of its own, since another's may hold what is not finite.
        filling = cache.pages[0] * page_size
        places.append(F.pad(pages.flatten()[:keys], (0, max(0, keys - num_pages * page_size)), value=filling))
        bias_SM = buffers.bias_BSM[idx, :length]
        bias_SM[:, start + length :] = float("-inf")
        if attend.mask_LL is not None:
            bias_SM[:, start : start + length].masked_fill_(~attend.mask_LL, float("-inf"))
    padding = rows - len(stored)
    _write(buffers.stored_R, torch.tensor(stored + stored[-1:] * padding))
    _write(buffers.slot_of_row_R, torch.tensor(slots + slots[-1:] * padding))
    _write(buffers.row_of_slot_BS, torch.tensor(row_of_slot))
    _write(buffers.places_BM[: len(parts)], torch.stack(places))
    for buffer, values in ((buffers.ids_R, ids_L), (buffers.positions_R, positions_L)):
        buffer[: len(values)].copy_(values)
        buffer[len(values) :] = values[-1]


def _write(buffer: Tensor, values: Tensor) -> None:
    buffer.copy_(values.pin_memory() if buffer.is_cuda else values, non_blocking=True)


class _FixedAttend:
    """Attention over pages of a store, with everything that varies in buffers."""

    def __init__(self, buffers: _Buffers, store: KVStore, *, groups: int) -> None:
        self._buffers, self._store, self._groups = buffers, store, groups
        self._bias = buffers.bias_BSM[:, None].repeat(1, 1, groups, 1)

    def __call__(self, layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        """The attended values, shape (1, R, H, D)."""
        buffers = self._buffers
        keys, values = (
            self._read(kept[layer_idx], new[0])
            for kept, new in ((self._store.keys, k_BLKD), (self._store.values, v_BLKD))
        )
        sequences, size = buffers.row_of_slot_BS.shape
        num_kv_heads, head_dim = k_BLKD.shape[2:]
        q = q_BLHD[0].index_select(0, buffers.row_of_slot_BS.flatten())
        folded = q.view(sequences, size, num_kv_heads, self._groups, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=self._bias, scale=self._store.softmax_scale
        )
        unfolded = out.view(sequences, num_kv_heads, self._groups, size, head_dim).permute(0, 3, 1, 2, 4)
        slots_NHD = unfolded.reshape(sequences * size, num_kv_heads * self._groups, head_dim)
        return slots_NHD.index_select(0, buffers.slot_of_row_R)[None]

    def _read(self, kept_KPD: Tensor, new_RKD: Tensor) -> Tensor:
        """Store new rows, then all keys or values that the pass reads, shape (B, K, M, D)."""
        kept_KPD.index_copy_(1, self._buffers.stored_R, new_RKD.transpose(0, 1))
        places_BM = self._buffers.places_BM
        read = kept_KPD.index_select(1, places_BM.flatten())
        return read.view(len(read), *places_BM.shape, read.shape[-1]).transpose(0, 1)
