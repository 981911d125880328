"""What a base allows, before anything is trained: family, mask row, export targets, memory, speed, chat template."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ar2diff.clock import Clock
from ar2diff.errors import ModelError, RequestError
from ar2diff.export.matrix import TARGETS, list_closed_reasons
from ar2diff.files import read_json
from ar2diff.models.adapters import AdapterConfig
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.families.table import find_family, read_decoder_config
from ar2diff.models.gguf_file import read_gguf
from ar2diff.models.loading import DIFFUSION_KEY, check_ids
from ar2diff.models.mask_token import MaskToken, choose_mask_token
from ar2diff.models.safetensors_file import read_tensors
from ar2diff.tokenizer import Tokenizer
from ar2diff.train.config import TrainConfig
from ar2diff.train.estimates import (
    MemoryEstimate,
    count_parameters,
    estimate_memory,
    flops_per_token,
    measure_speed,
)

# Below this share of the median an embedding row was hardly ever trained.
NEAR_ZERO_SHARE = 0.1
SAMPLE_TEXT = "How are you?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A model as far as the doctor reads it: everything but its weights, of which one matrix is read."""

    path: Path
    hf_config: dict[str, Any]
    config: DecoderConfig
    tokenizer: Tokenizer
    diffusion: DiffusionConfig | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFacts:
    """The mask row of a conversion.

    Attributes:
        is_new_row: whether the vocabulary grows by it.
        row_norm: as stored; None for a new row.
        median_norm: of the rows that the tokenizer uses.
    """

    id: int
    text: str
    is_new_row: bool
    row_norm: float | None
    median_norm: float

    @property
    def is_near_zero(self) -> bool:
        """Whether the stored row would make gradients explode; conversion gives it a new value."""
        return self.row_norm is not None and self.row_norm < NEAR_ZERO_SHARE * self.median_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """The chat template: whether there is one, what ends a turn, and whether answers begin with thinking."""

    found: bool
    end_ids: tuple[int, ...]
    end_texts: tuple[str, ...]
    thinks: bool
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """An export target for one conversion: open where `reasons` is empty.

    Attributes:
        is_checked: as of `export.matrix.Target`.
    """

    name: str
    engines: str
    is_checked: bool
    reasons: tuple[str, ...]

    @property
    def is_open(self) -> bool:
        """Whether the conversion can be exported so."""
        return not self.reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """Training speed; `tokens_per_s` counts computed positions of all streams, None where nothing was measured."""

    flops_per_token: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings about one model and one training."""

    path: str
    config: DecoderConfig
    diffusion: DiffusionConfig | None
    num_parameters: int
    shift_logits: bool
    clean_attention: str
    mask: MaskFacts
    targets: tuple[TargetState, ...]
    micro: int
    row_len: int
    precision: str
    full: MemoryEstimate
    adapter: MemoryEstimate
    speed: SpeedFacts
    template: TemplateFacts

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        content = asdict(self)
        content["mask"]["is_near_zero"] = self.mask.is_near_zero
        for name, memory in (("full", self.full), ("adapter", self.adapter)):
            content[name]["total"] = memory.total
        for entry, target in zip(content["targets"], self.targets, strict=True):
            entry["open"] = target.is_open
        return content


def read_base(path: Path) -> Base:
    """Read a model folder or a .gguf file without its weights.

    Raises:
        ModelError, UnsupportedModelError: as `load_model`, as far as they concern config and tokenizer.
    """
    if path.is_file() and path.suffix == ".gguf":
        content = read_gguf(path)
        hf_config, tokenizer = content.hf_config, content.tokenizer
    elif path.is_dir():
        hf_config = read_json(path / "config.json", error=ModelError)
        if not isinstance(hf_config, dict):
            raise ModelError("config.json is no object", given=str(path), fix="Restore the model's own config.json")
        tokenizer = Tokenizer.from_folder(path)
    else:
        raise ModelError("no model folder or .gguf file", given=str(path), fix="Check the path")
    stored = hf_config.pop(DIFFUSION_KEY, None)
    diffusion = None if stored is None else DiffusionConfig.from_json(stored)
    config = read_decoder_config(hf_config)
    check_ids(config, tokenizer, diffusion)
    return Base(path=path, hf_config=hf_config, config=config, tokenizer=tokenizer, diffusion=diffusion)


def examine(
    path: Path, train: TrainConfig, *, clock: Clock, device: str = "cpu", measure: bool = True, limit_s: float = 10.0
) -> Diagnosis:
    """Say what a base allows.

    Args:
        train: the training that is meant: objective, rows, precision, adapter.
        measure: time a short trial on this machine, for about `limit_s` seconds.

    Raises:
        ModelError, UnsupportedModelError: as `read_base`, or the embedding is missing or damaged.
    """
    base = read_base(path)
    mask = _examine_mask(base)
    settings = base.diffusion or _build_settings(train, mask.id)
    return Diagnosis(
        path=str(path),
        config=base.config,
        diffusion=base.diffusion,
        num_parameters=count_parameters(base.config).total,
        shift_logits=settings.shift_logits,
        clean_attention=settings.clean_attention,
        mask=mask,
        targets=_list_targets(base.config, settings),
        micro=train.micro,
        row_len=train.row_len,
        precision=train.precision,
        full=estimate_memory(base.config, train, adapter=None),
        adapter=estimate_memory(base.config, train, adapter=train.adapter or AdapterConfig()),
        speed=_examine_speed(base, train, mask.id, clock=clock, device=device, measure=measure, limit_s=limit_s),
        template=examine_template(base.tokenizer),
    )


def list_base_targets(path: Path, train: TrainConfig) -> tuple[TargetState, ...]:
    """The export targets of a conversion of this base by this training; errors as `read_base`."""
    base = read_base(path)
    mask_token_id = base.diffusion.mask_token_id if base.diffusion else _choose_mask(base).id
    return _list_targets(base.config, _build_settings(train, mask_token_id))


def _build_settings(train: TrainConfig, mask_token_id: int) -> DiffusionConfig:
    objective = train.objective
    return DiffusionConfig(
        block_size=objective.block_sizes[-1],
        trained_block_sizes=objective.block_sizes,
        shift_logits=objective.shift_logits,
        mask_token_id=mask_token_id,
        clean_attention=objective.clean_attention,
        anchor=objective.anchor,
    )


def _list_targets(config: DecoderConfig, settings: DiffusionConfig) -> tuple[TargetState, ...]:
    return tuple(
        TargetState(
            name=name,
            engines=target.engines,
            is_checked=target.is_checked,
            reasons=tuple(list_closed_reasons(name, config, settings)),
        )
        for name, target in TARGETS.items()
    )


def examine_template(tokenizer: Tokenizer) -> TemplateFacts:
    """Render one question as a chat and look at what the template adds."""
    template, problem, opened = tokenizer.chat_template or "", None, ""
    try:
        opened = tokenizer.render_chat([{"role": "user", "content": SAMPLE_TEXT}], add_generation_prompt=True)
    except RequestError as error:
        problem = error.one_line()
    # A template that leaves thinking out by default closes it before the answer.
    answer = opened.rpartition(SAMPLE_TEXT)[2]
    return TemplateFacts(
        found=tokenizer.chat_template is not None,
        end_ids=tokenizer.eos_token_ids,
        end_texts=tuple(tokenizer.id_to_token(idx) or "" for idx in tokenizer.eos_token_ids),
        thinks="<think>" in template and "</think>" not in answer and problem is None,
        problem=problem,
    )


def _choose_mask(base: Base) -> MaskToken:
    return choose_mask_token(base.tokenizer, base.config, base.hf_config)


def _examine_mask(base: Base) -> MaskFacts:
    embedding_VE = _read_embedding(base)
    norms_V = embedding_VE.float().norm(dim=1)
    token = _choose_mask(base)
    mask_id = base.diffusion.mask_token_id if base.diffusion else token.id
    text = base.tokenizer.id_to_token(mask_id) or token.text
    real_V = norms_V[: base.tokenizer.max_token_id + 1]
    keep = torch.arange(len(real_V)) != mask_id
    exists = mask_id < len(norms_V)
    return MaskFacts(
        id=mask_id,
        text=text,
        is_new_row=not exists,
        row_norm=float(norms_V[mask_id]) if exists else None,
        median_norm=float(real_V[keep].median()),
    )


def _read_embedding(base: Base) -> Tensor:
    name = find_family(base.hf_config).tensor_names(base.config)["embedding.weight"]
    stored: Iterable[tuple[str, Tensor]]
    stored = read_gguf(base.path).tensors() if base.path.is_file() else read_tensors(base.path)
    found = next((tensor for stored_name, tensor in stored if stored_name == name), None)
    if found is None:
        raise ModelError("the embedding is not among the weights", given=name, fix="Fetch the model again")
    if tuple(found.shape) != (wanted := (base.config.vocab_size, base.config.hidden_size)):
        raise ModelError(f"the embedding has shape {tuple(found.shape)}", given=f"config.json says {wanted}")
    return found


def _examine_speed(
    base: Base,
    train: TrainConfig,
    mask_token_id: int,
    *,
    clock: Clock,
    device: str,
    measure: bool,
    limit_s: float,
) -> SpeedFacts:
    speed = None
    if measure:
        speed = measure_speed(
            base.config, train, mask_token_id=mask_token_id, clock=clock, device=device, limit_s=limit_s
        )
    return SpeedFacts(flops_per_token=flops_per_token(base.config), tokens_per_s=speed)
