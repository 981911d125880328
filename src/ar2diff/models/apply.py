"""An exported adapter put on its base again: a plain model folder that every command takes.

The folder holds what the checkpoint held that the adapter was exported from: the base's tensors with the trained mask
row, the settings, the tokenizer, and the adapter's files byte for byte as they came.
"""

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ar2diff.errors import ConfigError, ModelError
from ar2diff.files import PARTIAL_MARK, fsync_dir, write_bytes
from ar2diff.hashing import sha256_file
from ar2diff.models.adapter_file import EXPORTED_NAMES, StoredAdapter, attach_adapter, find_mask_row, read_exported
from ar2diff.models.families.table import find_family
from ar2diff.models.loading import LoadedModel, check_ids, load_model, root_of_decoder, save_model
from ar2diff.models.mask_token import grow_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedAdapter:
    """What was put together.

    Attributes:
        base_tensor_root: of the base as it is stored, before the mask's row was changed.
        tensor_root: of the result, the adapter included.
        files: SHA-256 of each of the adapter's files.
        is_new: False where the folder was there already, with just this in it.
    """

    base_tensor_root: str
    tensor_root: str
    files: dict[str, str]
    is_new: bool


def apply_adapter(base: Path, adapter: Path, out: Path, *, tensor_root: str | None = None) -> AppliedAdapter:
    """Write the model that `adapter` makes of `base` into the new folder `out`, whole or not at all.

    The base's tensors keep every value; the row of the mask alone becomes the trained one, and is added where the
    vocabulary ends before it.

    Args:
        base: a model folder or a .gguf file.
        adapter: a folder that `ar2diff export --to adapter` wrote.
        tensor_root: what the result must have; None where nobody has said.

    Raises:
        ModelError: the base is another one than the adapter was trained on, or a file is missing, damaged or foreign,
            or the result is not what `tensor_root` names.
        ConfigError: `out` is there and holds something else.
        SpaceError: not enough free space; nothing is left behind.
    """
    read_exported(adapter)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}{PARTIAL_MARK}{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        applied = _write(base, adapter, partial)
        if tensor_root not in (None, applied.tensor_root):
            raise ModelError(
                "the adapter makes another model of its base than was recorded of it",
                given=f"tensor root {applied.tensor_root}, recorded {tensor_root}",
                fix="Fetch the adapter again",
            )
        if out.exists():
            _check_same(partial, out)
            return dataclasses.replace(applied, is_new=False)
        partial.rename(out)
        fsync_dir(out.absolute().parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return applied


def _write(base: Path, adapter: Path, folder: Path) -> AppliedAdapter:
    content = {name: (adapter / name).read_bytes() for name in EXPORTED_NAMES}
    _place(content, folder)
    stored, diffusion = read_exported(folder)
    # The adapter is stored as wide as the model it was trained on.
    dtype = next(iter(stored.tensors.values())).dtype
    loaded = load_model(base, dtype=dtype)
    base_root = loaded.tensor_root
    loaded = _put_mask_row(loaded, stored)
    check_ids(loaded.config, loaded.tokenizer, diffusion)
    names = find_family(loaded.hf_config).tensor_names(loaded.config)
    attach_adapter(stored, loaded.decoder, names)
    root = save_model(folder, loaded, diffusion)
    # Not as this version writes them: digests elsewhere are of the bytes that came.
    _place(content, folder)
    files = {name: sha256_file(folder / name) for name in EXPORTED_NAMES}
    return AppliedAdapter(base_tensor_root=base_root, tensor_root=root, files=files, is_new=True)


def _place(content: dict[str, bytes], folder: Path) -> None:
    for name, raw in content.items():
        write_bytes(folder / name, raw)


@torch.no_grad()
def _put_mask_row(loaded: LoadedModel, stored: StoredAdapter) -> LoadedModel:
    """The base with the trained mask row in it, if that makes it the model under the adapter."""
    if loaded.decoder.adapter is not None:
        raise ModelError("the base has an adapter already", fix="Name the model without one")
    num_rows, mask = loaded.config.vocab_size, stored.mask_token_id
    if not 0 <= mask <= num_rows:
        raise ModelError(
            "the adapter's mask token is beyond the vocabulary",
            given=f"{mask} of {num_rows} rows",
            fix="Use the adapter's parent",
        )
    config = dataclasses.replace(loaded.config, vocab_size=max(num_rows, mask + 1))
    hf_config = {**loaded.hf_config, "vocab_size": config.vocab_size}
    row = find_mask_row(stored, find_family(hf_config).tensor_names(config))
    if row.shape != (1, config.hidden_size):
        raise ModelError(f"the mask row must have shape {(1, config.hidden_size)}", given=tuple(row.shape))
    grow_vocabulary(loaded.decoder, config)
    loaded.decoder.embedding.weight[mask] = row[0]
    if (root := root_of_decoder(loaded.decoder, hf_config)) != stored.base_tensor_root:
        raise ModelError(
            "the adapter was trained on another base",
            given=f"tensor root {root} with the adapter's mask row, {stored.base_tensor_root} under the adapter",
            fix="Name the base that the adapter was trained on",
        )
    return dataclasses.replace(loaded, config=config, hf_config=hf_config)


def _check_same(made: Path, out: Path) -> None:
    if _digests(made) != _digests(out):
        raise ConfigError("the output folder holds something else", given=str(out), fix="Name a new folder")


def _digests(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}
