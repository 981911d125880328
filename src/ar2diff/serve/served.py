"""The model that a server answers for, with what proves which one it is."""

import platform
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ar2diff import __version__
from ar2diff.errors import ModelError
from ar2diff.models.loading import LoadedModel, root_of_decoder
from ar2diff.serve.reading.dialect import Dialect
from ar2diff.serve.worker import Scheduler


class ModelEngine(Protocol):
    """An engine that says which model it runs, and runs requests together."""

    @property
    def loaded(self) -> LoadedModel:
        """The model."""
        ...

    @property
    def scheduler(self) -> Scheduler:
        """Who runs when."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A loaded model under the name that requests ask for.

    Attributes:
        precision: what the forward passes compute in, and why.
        live_tensor_root: digest of the tensors in memory, those of an adapter included, computed from them and not
            from the files; equals the stored root where loading changed no dtype and no tied head is stored twice.
        created: when it was loaded, Unix seconds.
        dialect: how the model writes calls and thinking.
    """

    name: str
    loaded: LoadedModel
    precision: str
    live_tensor_root: str
    created: int
    dialect: Dialect

    @classmethod
    def measure(
        cls, name: str, loaded: LoadedModel, *, created: int, required_root: str | None, precision: str = "unknown"
    ) -> "ServedModel":
        """Digest the live weights.

        Raises:
            ModelError: the stored tensors have another root than the required one.
        """
        if required_root is not None and loaded.tensor_root != required_root:
            raise ModelError("the model has another tensor root", given=loaded.tensor_root, fix="Fetch it again")
        live = root_of_decoder(loaded.decoder, loaded.hf_config)
        dialect = Dialect(loaded.tokenizer)
        return cls(
            name=name, loaded=loaded, precision=precision, live_tensor_root=live, created=created, dialect=dialect
        )

    @property
    def default_mode(self) -> str:
        """What a request without a mode gets."""
        return "ar" if self.loaded.diffusion is None else "diffusion"

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of answers."""
        return f"ar2diff-{self.live_tensor_root[:16]}"

    def card(self) -> dict[str, Any]:
        """The entry of `/v1/models`."""
        context = self.loaded.config.max_seq_len
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "ar2diff",
            "max_model_len": context,
        }

    def provenance(self) -> dict[str, Any]:
        """The body of `/v1/provenance`."""
        loaded = self.loaded
        return {
            "model": self.name,
            "tensor_root": loaded.tensor_root,
            "live_tensor_root": self.live_tensor_root,
            "precision": self.precision,
            "dtype": str(loaded.decoder.embedding.weight.dtype).removeprefix("torch."),
            "model_type": loaded.config.model_type,
            "diffusion": None if loaded.diffusion is None else loaded.diffusion.as_json(),
            "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }
