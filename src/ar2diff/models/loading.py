"""Load a model folder or a GGUF file, strictly; save one that loads back bit-equal.

Every stored tensor is used or named in an error; nothing is guessed, nothing is unpickled, no code from a model runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ar2diff.errors import ConfigError, ModelError
from ar2diff.files import read_json, write_json
from ar2diff.hashing import TensorDigest, tensor_root
from ar2diff.models.adapter_file import (
    ADAPTER_CONFIG_NAME,
    StoredAdapter,
    adapter_tensors,
    attach_adapter,
    read_adapter,
    save_adapter,
)
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.models.families.table import find_family, read_decoder_config
from ar2diff.models.gguf_file import read_gguf
from ar2diff.models.layers import rope_frequencies
from ar2diff.models.roots import digest_tensor, root_of_tensors
from ar2diff.models.safetensors_file import INDEX_NAME, SINGLE_NAME, read_tensors, write_file
from ar2diff.tokenizer import Tokenizer

DIFFUSION_KEY = "ar2diff"
_DTYPE_WORDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        diffusion: settings of a converted checkpoint; None for an autoregressive model.
        tensor_root: digest of the tensors as stored (dequantised to fp32 for GGUF), under their Hugging Face names,
            those of a mask-gated adapter included.
        hf_config: the config.json as read, or as derived from a GGUF file's metadata, without our own entry.
    """

    decoder: Decoder
    config: DecoderConfig
    tokenizer: Tokenizer
    diffusion: DiffusionConfig | None
    tensor_root: str
    hf_config: dict[str, Any]


def load_model(path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LoadedModel:
    """Load a folder of safetensors (one file or shards with an index) or a .gguf file.

    Args:
        path: the folder or the file.
        dtype: what the weights are converted to; values that overflow it are an error.
        device: where the weights go.

    Raises:
        ModelError: a tensor is missing, unexpected, mis-shaped, doubled or not finite, or a file is damaged.
        UnsupportedModelError: the model needs a feature that this version does not implement.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path, dtype, torch.device(device))
    if not path.is_dir():
        raise ModelError("no model folder or .gguf file", given=str(path), fix="Check the path")
    return _load_folder(path, dtype, torch.device(device))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder or a .gguf file, without its weights.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    path = Path(path)
    return read_gguf(path).tokenizer if path.is_file() and path.suffix == ".gguf" else Tokenizer.from_folder(path)


def save_model(
    folder: Path, loaded: LoadedModel, diffusion: DiffusionConfig | None, *, weights: Path | None = None
) -> str:
    """Write config.json, model.safetensors and the tokenizer files into `folder`; returns the tensor root.

    Args:
        weights: a safetensors file of the model's weights on the same disk, which is moved, where `loaded` does not
            have them whole.

    Tensors keep their live dtype. A mask-gated adapter goes into files of its own, and the root covers it.
    config.json is written last, so that a folder with one is complete.

    Raises:
        ModelError: the folder holds a sharded model, or an adapter where this model has none.
        SpaceError: not enough free space.
    """
    if (folder / INDEX_NAME).exists():
        raise ModelError("the folder holds a sharded model", given=str(folder), fix="Choose another folder")
    if loaded.decoder.adapter is None and (folder / ADAPTER_CONFIG_NAME).exists():
        raise ModelError("the folder holds another model's adapter", given=str(folder), fix="Choose another folder")
    if weights is None:
        tensors = named_tensors(loaded.decoder, loaded.hf_config)
        write_file(folder / SINGLE_NAME, tensors)
    else:
        weights.rename(folder / SINGLE_NAME)
        tensors = dict(read_tensors(folder))
    if loaded.decoder.adapter is not None:
        names = find_family(loaded.hf_config).tensor_names(loaded.decoder.config)
        save_adapter(folder, loaded.decoder, names, base_tensor_root=root_of_tensors(tensors))
        tensors = {**tensors, **adapter_tensors(loaded.decoder, names)}
    loaded.tokenizer.save(folder)
    write_json(folder / "config.json", saved_config(loaded, diffusion))
    return root_of_tensors(tensors)


def named_tensors(decoder: Decoder, hf_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The live weights under their Hugging Face names."""
    names = find_family(hf_config).tensor_names(decoder.config)
    return {names[ours]: tensor for ours, tensor in decoder.state_dict().items()}


def root_of_decoder(decoder: Decoder, hf_config: Mapping[str, Any]) -> str:
    """The tensor root of live weights, those of a mask-gated adapter included."""
    tensors = named_tensors(decoder, hf_config)
    if decoder.adapter is not None:
        tensors |= adapter_tensors(decoder, find_family(hf_config).tensor_names(decoder.config))
    return root_of_tensors(tensors)


def saved_config(loaded: LoadedModel, diffusion: DiffusionConfig | None) -> dict[str, Any]:
    """The config.json that `save_model` writes."""
    config = dict(loaded.hf_config)
    config.pop("torch_dtype", None)
    config["vocab_size"] = loaded.decoder.config.vocab_size
    config["dtype"] = _DTYPE_WORDS[loaded.decoder.embedding.weight.dtype]
    if diffusion is not None:
        config[DIFFUSION_KEY] = diffusion.as_json()
    return config


def build_decoder(
    config: DecoderConfig, tensors: dict[str, Tensor], *, device: torch.device | str = "cpu"
) -> Decoder:
    """A decoder that owns `tensors` (our names); nothing is initialised or copied."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(tensors, strict=True, assign=True)
    inverse = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    decoder.inverse_frequencies = inverse.to(device)
    return decoder


def _load_folder(folder: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    hf_config = read_json(folder / "config.json", error=ModelError)
    if not isinstance(hf_config, dict):
        raise ModelError("config.json is no object", given=str(folder), fix="Restore the model's own config.json")
    diffusion = _read_diffusion(hf_config.pop(DIFFUSION_KEY, None))
    adapter = read_adapter(folder)
    if adapter is not None and (diffusion is None or diffusion.mask_token_id != adapter.mask_token_id):
        raise ModelError("the adapter beside the model is of another conversion", given=str(folder))
    tokenizer = Tokenizer.from_folder(folder)
    return _assemble(
        hf_config, read_tensors(folder), tokenizer, diffusion, dtype=dtype, device=device, adapter=adapter
    )


def _load_gguf(path: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    content = read_gguf(path)
    return _assemble(content.hf_config, content.tensors(), content.tokenizer, None, dtype=dtype, device=device)


def _assemble(
    hf_config: dict[str, Any],
    stored: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    diffusion: DiffusionConfig | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    adapter: StoredAdapter | None = None,
) -> LoadedModel:
    config = read_decoder_config(hf_config)
    check_ids(config, tokenizer, diffusion)
    names = find_family(hf_config).tensor_names(config)
    tensors, digests = _place_tensors(config, names, stored, dtype, device)
    decoder = build_decoder(config, tensors, device=device)
    if adapter is not None:
        attach_adapter(adapter, decoder, names)
        digests += [digest_tensor(name, tensor) for name, tensor in adapter.tensors.items()]
    return LoadedModel(
        decoder=decoder,
        config=config,
        tokenizer=tokenizer,
        diffusion=diffusion,
        tensor_root=tensor_root(digests),
        hf_config=hf_config,
    )


def _place_tensors(
    config: DecoderConfig,
    names: dict[str, str],
    stored: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[str, Tensor], list[TensorDigest]]:
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    ours = {theirs: own for own, theirs in names.items()}
    assert set(names) == set(shapes)
    tensors: dict[str, Tensor] = {}
    digests: list[TensorDigest] = []
    spare_head: TensorDigest | None = None
    for name, tensor in stored:
        digest = digest_tensor(name, tensor)
        digests.append(digest)
        if name == "lm_head.weight" and config.tied_head:
            spare_head = digest
        elif name not in ours:
            raise ModelError(f"tensor {name} has no place in this architecture", fix="Check config.json")
        elif tensor.shape != shapes[ours[name]]:
            wanted = tuple(shapes[ours[name]])
            raise ModelError(f"tensor {name} must have shape {wanted}", given=tuple(tensor.shape))
        else:
            tensors[ours[name]] = _convert(name, tensor, dtype, device)
    if missing := sorted(names[own] for own in set(names) - set(tensors)):
        raise ModelError(f"tensor {missing[0]} is missing", given=f"{len(missing)} missing", fix="Fetch it again")
    _check_spare_head(spare_head, digests)
    return tensors, digests


def _convert(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A copy always: a mapped file may change under a running model.
    converted = tensor.to(device=device, dtype=dtype, copy=True)
    if tensor.dtype != dtype and not torch.isfinite(converted).all():
        raise ModelError(f"tensor {name} does not fit into {dtype}", given=str(tensor.dtype), fix="Use a wider dtype")
    return converted


def _check_spare_head(head: TensorDigest | None, digests: list[TensorDigest]) -> None:
    # A tied model may store its head again, but only the same bytes.
    if head is None:
        return
    embedding = next(digest for digest in digests if digest.name == "model.embed_tokens.weight")
    if embedding[1:] != head[1:]:
        raise ModelError("tensor lm_head.weight differs from the embedding that config.json ties it to")


def check_ids(config: DecoderConfig, tokenizer: Tokenizer, diffusion: DiffusionConfig | None) -> None:
    """Refuse a config whose vocabulary or context its tokenizer or its diffusion settings reach beyond.

    Raises:
        ModelError: see above.
    """
    if tokenizer.max_token_id >= config.vocab_size:
        raise ModelError(
            "the tokenizer knows more ids than the embedding has rows",
            given=f"{tokenizer.max_token_id + 1} and {config.vocab_size}",
            fix="Use the model's own tokenizer",
        )
    if diffusion is not None and diffusion.mask_token_id >= config.vocab_size:
        given = f"{diffusion.mask_token_id} of {config.vocab_size} rows"
        raise ModelError("mask_token_id is beyond the vocabulary", given=given, fix="Restore the model's config.json")
    if diffusion is not None and diffusion.trained_block_sizes[-1] > config.max_seq_len:
        raise ModelError("a block size is beyond the context", given=diffusion.trained_block_sizes[-1])


def _read_diffusion(stored: Any) -> DiffusionConfig | None:
    if stored is None:
        return None
    try:
        return DiffusionConfig.from_json(stored)
    except ConfigError as error:
        raise ModelError(f"config.json: {error.problem}", given=error.given) from None
