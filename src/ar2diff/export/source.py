"""The model to export: its settings in memory, its tensors read one at a time from the safetensors files.

An adapter's draft mode is merged while a tensor is read, so that the whole model is never in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ar2diff.errors import ConfigError, ModelError
from ar2diff.files import read_json
from ar2diff.models.adapter_file import StoredAdapter, read_adapter
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.families.table import find_family, read_decoder_config
from ar2diff.models.loading import DIFFUSION_KEY
from ar2diff.models.safetensors_file import DTYPES, check_header, list_shards
from ar2diff.tokenizer import Tokenizer

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of an export: its name and shape, and how to make it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    build: Callable[[], Tensor]


class ExportSource:
    """A converted model folder, opened for export.

    Args:
        folder: a checkpoint or release of this project.
        dtype: what exported tensors are converted to; None keeps the stored one.
        merge: merge the mask-gated adapter into the weights where there is one.

    Raises:
        ModelError: the folder is no converted model, or is damaged.
        ConfigError: `merge` without an adapter.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype | None = None, merge: bool = False) -> None:
        stored = read_json(folder / "config.json", error=ModelError)
        if not isinstance(stored, dict) or DIFFUSION_KEY not in stored:
            raise ModelError("this is no converted model", given=str(folder), fix="Convert it first: ar2diff train")
        self.folder = folder
        self.diffusion = DiffusionConfig.from_json(stored.pop(DIFFUSION_KEY))
        self.hf_config: dict[str, Any] = stored
        self.config: DecoderConfig = read_decoder_config(stored)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.adapter: StoredAdapter | None = read_adapter(folder)
        if merge and self.adapter is None:
            raise ConfigError("there is no adapter to merge", given=str(folder), fix="Leave --merge out")
        self.is_merged = merge
        self._names = find_family(stored).tensor_names(self.config)
        self._places = self._find_places()
        self.dtype = dtype or self._stored_dtype()

    @property
    def names(self) -> dict[str, str]:
        """Our tensor names to the family's."""
        return self._names

    def shape(self, ours: str) -> tuple[int, ...]:
        """The shape of a tensor, by our name."""
        return self._places[self._names[ours]][1]

    def read(self, ours: str) -> Tensor:
        """A tensor by our name, merged where asked, in the export's dtype.

        Raises:
            ModelError: it holds values that are not finite, before or after the conversion.
        """
        name = self._names[ours]
        with safe_open(self._places[name][0], framework="pt") as stream:
            tensor: Tensor = stream.get_tensor(name)
        if self.is_merged:
            tensor = self._merge(ours, tensor)
        converted = tensor.to(self.dtype)
        if not torch.isfinite(converted).all():
            raise ModelError(f"tensor {name} is not finite in {self.dtype}", fix="Export in a wider dtype")
        return converted

    def plan(self, ours: str, name: str | None = None) -> PlannedTensor:
        """A tensor as it is, under another name if one is given."""
        return PlannedTensor(name=name or self._names[ours], shape=self.shape(ours), build=lambda: self.read(ours))

    def plan_all(self) -> Iterator[PlannedTensor]:
        """Every tensor as it is, under the family's names."""
        for ours in self._names:
            yield self.plan(ours)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros in the export's dtype."""
        return torch.zeros(shape, dtype=self.dtype)

    def head_rows(self) -> Tensor:
        """The output matrix: the embedding's values where the head is tied."""
        return self.read("embedding.weight" if self.config.tied_head else "head.weight")

    def _find_places(self) -> dict[str, tuple[Path, tuple[int, ...], str]]:
        places = {
            name: (shard, tuple(entry["shape"]), entry["dtype"])
            for shard in list_shards(self.folder)
            for name, entry in check_header(shard).items()
        }
        if missing := sorted(set(self._names.values()) - set(places)):
            raise ModelError(f"tensor {missing[0]} is missing", given=str(self.folder), fix="Use a whole checkpoint")
        return places

    def _stored_dtype(self) -> torch.dtype:
        return DTYPES[self._places[self._names["embedding.weight"]][2]]

    def _merge(self, ours: str, tensor: Tensor) -> Tensor:
        assert self.adapter is not None
        wide = tensor.float()
        prefix = f"base_model.model.{self._names[ours].removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in self.adapter.tensors:
            down_RE = self.adapter.tensors[f"{prefix}.lora_A.weight"].float()
            up_FR = self.adapter.tensors[f"{prefix}.lora_B.weight"].float()
            return wide + self.adapter.config.alpha / self.adapter.config.rank * (up_FR @ down_RE)
        row = self.adapter.tensors.get(f"{prefix}.token_adapter.trainable_tokens_delta")
        if row is not None:
            wide[self.adapter.mask_token_id] = row[0].float()
        return wide
