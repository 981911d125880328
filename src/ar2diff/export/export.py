"""Write a converted model in a target's format, and verify any folder against one."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ar2diff.errors import ConfigError, ModelError
from ar2diff.export import adapter, fast_dllm_v2, gguf, hf, llada2_dense, sdar, stable_diffcoder
from ar2diff.export.layout import Layout, base_facts, render_readme
from ar2diff.export.matrix import TARGETS, list_closed_reasons, list_open_targets
from ar2diff.export.source import EXPORT_DTYPES, ExportSource
from ar2diff.export.verify import Check, Finding, run_checks
from ar2diff.export.write import write_tensors
from ar2diff.files import PARTIAL_MARK, fsync_dir, write_json, write_text

LAYOUTS: dict[str, Callable[[ExportSource], Layout]] = {
    "sdar": sdar.lay_out,
    "fast-dllm-v2": fast_dllm_v2.lay_out,
    "stable-diffcoder": stable_diffcoder.lay_out,
    "llada2-dense": llada2_dense.lay_out,
    "hf": hf.lay_out,
}
CHECKS: dict[str, Mapping[str, Check]] = {
    "sdar": sdar.CHECKS,
    "fast-dllm-v2": fast_dllm_v2.CHECKS,
    "stable-diffcoder": stable_diffcoder.CHECKS,
    "llada2-dense": llada2_dense.CHECKS,
    "hf": hf.CHECKS,
}
MASK_TEXT = "<|MASK|>"
_GGUF_BODY = """
`llama.cpp` runs `{name}` as an autoregressive model. Block diffusion needs a binding that sets attention inside the
open block to non-causal; the `ar2diff.*` metadata says how: block size, shift, the attention of committed blocks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How to export.

    Attributes:
        dtype: of the tensors, a name in `EXPORT_DTYPES`; None keeps the stored one.
        quantisation: of a GGUF file.
        merge: merge a mask-gated adapter into the weights: the AR mode is then no longer the parent's.
    """

    dtype: str | None = None
    quantisation: str = "f16"
    merge: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in EXPORT_DTYPES:
            raise ConfigError("unknown dtype", given=self.dtype, fix=f"Use {', '.join(EXPORT_DTYPES)}")
        if self.quantisation not in gguf.KINDS:
            fix = f"Use {', '.join(gguf.KINDS)}"
            raise ConfigError("unknown GGUF quantisation", given=self.quantisation, fix=fix)


def export_model(model: Path, target: str, out: Path, options: ExportOptions) -> None:
    """Write `model` into the new folder `out` and verify it; `out` appears only once it is whole and verified.

    Args:
        model: a checkpoint or release folder of this project.
        target: a name in `TARGETS`.

    Raises:
        ConfigError: no such target, the target is closed to this model (with every reason), or `out` is not new.
        ModelError: the model is damaged.
        SpaceError: not enough free space; nothing is left behind.
    """
    check_target(target)
    if out.exists():
        raise ConfigError("the output folder exists", given=str(out), fix="Name a new folder")
    dtype = None if options.dtype is None else EXPORT_DTYPES[options.dtype]
    source = ExportSource(model, dtype=dtype, merge=options.merge)
    check_open(source, target)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}{PARTIAL_MARK}{os.getpid()}")
    try:
        partial.mkdir()
        _write(source, target, partial, options)
        if findings := verify_export(partial, target):
            raise ModelError("the export does not pass its own verifier", given=findings[0].one_line())
        partial.rename(out)
        fsync_dir(out.absolute().parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def verify_export(folder: Path, target: str) -> list[Finding]:
    """What is wrong with an exported folder, ours or not; empty where nothing is.

    Raises:
        ConfigError: no such target or folder.
        ModelError: the folder's config or weights cannot be read at all.
    """
    check_target(target)
    if target in CHECKS:
        return run_checks(folder, CHECKS[target])
    if not folder.is_dir():
        raise ConfigError("no exported folder", given=str(folder), fix="Check the path")
    found, reasons = (
        (gguf.check_gguf(folder / gguf.FILE_NAME), gguf.REASONS)
        if target == "gguf"
        else (adapter.check_adapter(folder), adapter.REASONS)
    )
    return [Finding(check=name, found=text, reason=reasons[name]) for name, text in found]


def check_target(target: str) -> None:
    """Refuse a word that is no target.

    Raises:
        ConfigError: names the known ones.
    """
    if target not in TARGETS:
        raise ConfigError("unknown export target", given=target, fix=f"Use one of {', '.join(TARGETS)}")


def check_open(source: ExportSource, target: str) -> None:
    """Refuse a target that is closed to a model.

    Raises:
        ConfigError: every reason, and the targets that are open.
    """
    reasons = list_closed_reasons(target, source.config, source.diffusion)
    if reasons:
        fits = ", ".join(list_open_targets(source.config, source.diffusion))
        given = f"{source.config.model_type}: {'; '.join(reasons)}"
        raise ConfigError(f"this model cannot become {target}", given=given, fix=f"Open to it: {fits}")
    if source.adapter is not None and not source.is_merged and TARGETS[target].needs_merge:
        fix = "Add --merge (the AR mode is then no longer the parent's), or export to adapter"
        raise ConfigError(f"{target} knows no mask-gated adapter", given=str(source.folder), fix=fix)


def _write(source: ExportSource, target: str, folder: Path, options: ExportOptions) -> None:
    if target == "adapter":
        adapter.write_adapter(source, folder)
    elif target == "gguf":
        gguf.write_gguf(source, folder / gguf.FILE_NAME, options.quantisation)
        body = _GGUF_BODY.format(name=gguf.FILE_NAME)
        write_text(folder / "README.md", render_readme("Block diffusion as GGUF", base_facts(source), body))
    else:
        _write_layout(source, LAYOUTS[target](source), folder)


def _write_layout(source: ExportSource, layout: Layout, folder: Path) -> None:
    write_tensors(folder, layout.tensors, source.dtype)
    _write_tokenizer(source, layout, folder)
    generation = {
        "eos_token_id": list(source.tokenizer.eos_token_ids),
        "pad_token_id": layout.config["pad_token_id"],
        "do_sample": False,
    }
    write_json(folder / "generation_config.json", generation)
    for name, text in layout.files.items():
        write_text(folder / name, text)
    write_text(folder / "README.md", layout.readme)
    write_json(folder / "config.json", layout.config)


def _write_tokenizer(source: ExportSource, layout: Layout, folder: Path) -> None:
    """The tokenizer's files, the mask declared as a special token under the format's id."""
    source.tokenizer.save(folder)
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    mask = layout.mask_token_id
    text = source.tokenizer.id_to_token(mask) or MASK_TEXT
    kept = [token for token in stored["added_tokens"] if token["id"] != mask]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    stored["added_tokens"] = sorted([*kept, {"id": mask, "content": text, **flags}], key=lambda token: token["id"])
    # An id beyond a gap is only kept where the vocabulary itself has it.
    stored["model"]["vocab"][text] = mask
    write_json(folder / "tokenizer.json", stored)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", {**config, "mask_token": text})
