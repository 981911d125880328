"""A recipe: one TOML file that names a base, its data, its training and its evaluation. States what differs.

Sections and keys are those of the configs they fill; an unknown key is an error that names the nearest known one.
"""

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pydantic

from ar2diff.data.config import DataConfig, EvaluationShare
from ar2diff.data.recipes.table import RECIPES
from ar2diff.diffusion.unmask import build_policy
from ar2diff.engine.loading import LoadPrecision, check_precision
from ar2diff.errors import ConfigError
from ar2diff.evals.modes import build_modes
from ar2diff.sources.shipped import SHIPPED_PREFIX
from ar2diff.sources.spec import parse_source
from ar2diff.tasks.table import find_task
from ar2diff.train.config import MAX_COUNT, TrainConfig

MAX_BATCH = 256
RECIPE_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseConfig:
    """The model to convert.

    Attributes:
        source: a pinned source, or `embedded:smollm2-135m` for the model inside a package of the package index.
        adapter: a stored mask-gated adapter of it to train on: `shipped:NAME`, or `local:PATH` for a folder that
            `ar2diff export --to adapter` wrote. None begins at the base itself.
    """

    source: str
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None and not self.adapter.startswith((SHIPPED_PREFIX, "local:")):
            raise ConfigError("an adapter is shipped:NAME or local:PATH", given=self.adapter)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; without an adapter those that a recipe had before there was a choice."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """What is measured at the end.

    Attributes:
        problems: which held-out problems are asked; each lies within a range that the data section keeps out.
        modes: comma-separated out of parent, ar, verified, verified+copies, diffusion.
        steps: denoising steps of the top_k diffusion modes.
        thresholds: confidence thresholds of the threshold diffusion modes.
        max_tokens: answers that reach it count as truncated.
        minutes: problems are asked until this time is spent; None asks all of them.
        bits_problems: how many of the problems bits per token are measured on.
        precision: what both engines compute in: fp32, bf16, int8, or auto.
        batch_size: problems asked together; speed is then that of a batch. In int8 answers are the same at every
            size; elsewhere matrix kernels round by the number of rows, so that a near tie may fall otherwise.
    """

    problems: tuple[EvaluationShare, ...] = ()
    modes: str = "parent,ar,verified,verified+copies,diffusion"
    steps: tuple[int, ...] = (1, 2, 4, 8)
    thresholds: tuple[float, ...] = (0.9,)
    max_tokens: int = 128
    minutes: float | None = None
    bits_problems: int = 24
    precision: LoadPrecision = "auto"
    batch_size: int = 1

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if not 1 <= self.batch_size <= MAX_BATCH:
            raise ConfigError(f"batch_size must lie between 1 and {MAX_BATCH}", given=self.batch_size)
        if self.bits_problems < 0:
            raise ConfigError("bits_problems must not be negative", given=self.bits_problems)
        if self.max_tokens < 1:
            raise ConfigError("max_tokens must be at least 1", given=self.max_tokens)
        for share in self.problems:
            find_task(share.task)
        build_modes(self.modes, self.steps, self.thresholds)
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ConfigError("evaluation minutes must be above 0 and finite", given=self.minutes)
        if any(number >= 2**53 for number in (self.max_tokens, self.bits_problems, *self.steps)):
            raise ConfigError(
                "a number of the evaluation is beyond 53 bits", given=f"{self.max_tokens}, {self.steps}"
            )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, for a report and the ledger."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyConfig:
    """Training on the states of the model's own decoding, after the conversion.

    Attributes:
        rounds: times to decode and train.
        prompts: prompts a round, drawn from the prepared data.
        steps: optimizer steps a round.
        max_tokens: of an answer.
        policy, policy_parameter, denoising_steps: how blocks are decoded, as of a request.
        temperature: of the answers; 0 is greedy.
        lr: peak learning rate of a round.
        distill_weight: of the divergence from the frozen base at the same tokens.
        diffusion_weight: of the cross-entropy with the model's own tokens.
        ar_weight: of the clean stream's loss on the model's own tokens; 0 with an adapter.
    """

    rounds: int = 1
    prompts: int = 64
    steps: int = 20
    max_tokens: int = 128
    policy: str = "threshold"
    policy_parameter: float | None = None
    denoising_steps: int | None = None
    temperature: float = 0.0
    lr: float = 2e-5
    distill_weight: float = 1.0
    diffusion_weight: float = 0.0
    ar_weight: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rounds", "prompts", "steps", "max_tokens"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise ConfigError(
                    f"{name} of on_policy must lie between 1 and {MAX_COUNT}", given=getattr(self, name)
                )
        if self.denoising_steps is not None and self.denoising_steps < 1:
            raise ConfigError("denoising_steps must be at least 1", given=self.denoising_steps)
        if not 0 <= self.temperature <= 2:
            raise ConfigError("temperature must lie in [0, 2]", given=self.temperature)
        build_policy(self.policy, self.policy_parameter)
        if not self.distill_weight > 0:
            raise ConfigError("on-policy rounds learn from the base", fix="Set distill_weight above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole conversion, as asked for."""

    base: BaseConfig
    data: DataConfig
    train: TrainConfig
    on_policy: OnPolicyConfig | None = None
    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        _check_sources(self)
        if self.on_policy is not None and self.train.objective.anchor == "last":
            # A decoded block begins S - 1 tokens behind the one before it, a trained one S: traces do not fit.
            fix = "Set train.objective.anchor to predicted, or leave on_policy out"
            raise ConfigError("on-policy rounds are not made for blocks that begin with the last token", fix=fix)
        if self.base.adapter is not None and self.train.adapter is None:
            fix = "Add [train.adapter] with the settings of the stored adapter"
            raise ConfigError("a stored adapter is trained on as an adapter", given=self.base.adapter, fix=fix)
        for share in self.data.evaluation:
            find_task(share.task)
        for share in self.evaluate.problems:
            if not any(_covers(kept_out, share) for kept_out in self.data.evaluation):
                raise ConfigError(
                    "problems would be evaluated that the data section does not keep out of training",
                    given=f"{share.task} {share.start} to {share.start + share.count - 1}",
                    fix="Add them to data.evaluation",
                )

    def as_json(self) -> dict[str, Any]:
        """The whole recipe as plain JSON values."""
        content = {"base": self.base.as_json(), "data": self.data.as_json(), "train": self.train.as_json()}
        if self.on_policy is not None:
            content["on_policy"] = asdict(self.on_policy)
        return {**content, "evaluate": self.evaluate.as_json()}


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises:
        ConfigError: no such file, not TOML, an unknown key (with the nearest known one), a wrong type or value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such recipe", given=str(path), fix="Check the path") from None
    # Beside its own error the parser lets through those of endless numbers and of deep nesting.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the recipe is not readable TOML: {error}", given=str(path)) from None
    return parse_recipe(content)


def parse_recipe(content: Mapping[str, Any]) -> Recipe:
    """A recipe from the parsed TOML document; errors as in `load_recipe`."""
    _check_keys(content, Recipe, "")
    for name, section in (("base", BaseConfig), ("data", DataConfig), ("train", TrainConfig)):
        if name not in content:
            raise ConfigError(f"the recipe has no section [{name}]", fix=f"Add it; it takes {_known(section)}")
    try:
        return _ADAPTER.validate_json(_as_json(content), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        given = first["input"] if not isinstance(first["input"], dict) else None
        raise ConfigError(f"recipe key {place}: {first['msg']}", given=given) from None


# Reading JSON lets arrays fill tuples while numbers, texts and booleans stay strict.
_ADAPTER = pydantic.TypeAdapter(Recipe)


def _check_sources(recipe: Recipe) -> None:
    """Find what can be wrong about a source's text before anything is fetched; branches may yet be resolved."""
    parse_source(recipe.base.source, allow_branch=True)
    for named in recipe.data.sources:
        if named.is_self_prompted:
            continue
        share = named.prompts if named.is_parent else named
        if share.is_procedural:
            find_task(share.task_name)
        else:
            parse_source(share.source, allow_branch=True)
            if share.recipe not in RECIPES:
                raise ConfigError("unknown recipe", given=share.recipe, fix=f"Use one of: {', '.join(RECIPES)}")


def _covers(outer: EvaluationShare, inner: EvaluationShare) -> bool:
    starts_inside = outer.start <= inner.start
    return outer.task == inner.task and starts_inside and inner.start + inner.count <= outer.start + outer.count


def _as_json(content: Mapping[str, Any]) -> bytes:
    return pydantic.TypeAdapter(dict[str, Any]).dump_json(dict(content))


def _known(section: type) -> str:
    return ", ".join(entry.name for entry in fields(section))


def _check_keys(content: object, section: Any | None, place: str) -> None:
    """Refuse unknown keys and endless numbers in `content`, following the dataclass fields of `section`."""
    if isinstance(content, list):
        for item in content:
            _check_keys(item, section, place)
    elif isinstance(content, dict) and section is not None:
        known = {entry.name: entry.type for entry in fields(section)}
        for key, value in content.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
                raise ConfigError("unknown recipe key", given=f"{place}{key}", fix=f"The nearest known key is {near}")
            _check_keys(value, _inner_dataclass(known[key]), f"{place}{key}.")
    elif isinstance(content, str) and "\x00" in content:
        raise ConfigError(f"recipe key {place.rstrip('.')} holds a null character", given=ascii(content))
    elif isinstance(content, int) and abs(content) >= 2**53:
        # The ledger's JSON holds no larger ones.
        raise ConfigError(f"recipe key {place.rstrip('.')} is beyond 53 bits", given=content)
    elif isinstance(content, float) and not math.isfinite(content):
        raise ConfigError(f"recipe key {place.rstrip('.')} is not a finite number", given=content)


def _inner_dataclass(annotation: Any) -> Any | None:
    """The dataclass that a field holds, or holds a tuple of; None for plain values."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if hasattr(c, "__dataclass_fields__")), None)


def find_recipe(name: str) -> Path:
    """The path of a shipped recipe, in an installed package or a checkout.

    Raises:
        ConfigError: there is no recipe of that name; the message lists those there are.
    """
    package = Path(__file__).parents[1]
    folders = (package / "recipes", package.parents[1] / "recipes")
    shipped = {path.stem: path for folder in folders for path in sorted(folder.glob(f"*{RECIPE_SUFFIX}"))}
    if name not in shipped:
        raise ConfigError("no such recipe", given=name, fix=f"Name a .toml file, or one of {', '.join(shipped)}")
    return shipped[name]
