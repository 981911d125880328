"""What a data run is asked for: which sources, how many documents of each, and what must stay out."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from ar2diff.errors import ConfigError

PROCEDURAL_PREFIX = "procedural:"
PARENT_PREFIX = "parent:"
# The parent writes the prompts too.
SELF_PROMPTED = "parent:self"
Thinking = Literal["keep", "drop"]
# What says how a parent answers; of no meaning for other sources, and left out of their records.
ANSWER_FIELDS = ("temperature", "top_p", "max_tokens", "seed")
MAX_DIGITS = 12
# More than any benchmark has.
ALL_ROWS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """One source and how much of it.

    Args:
        source: `procedural:<task>`, `local:<path>[#sha256=<hex>]`, a fetched `hub:` or `pypi:` source, `parent:`
            before any of these for the parent's own answers to their prompts, or `parent:self`.
        count: documents to keep; None takes all of a file. Of a parent: prompts to answer.
        recipe: how rows of a file become documents, a name in `data.recipes.table`.
        thinking: keep or drop what a response begins with between thinking marks (`data.thinking`).
        start: the first problem of a procedural source, so that another run can go on where this one stops; of a
            parent, the first prompt.
        temperature, top_p, max_tokens, seed: of a parent: how it answers; temperature 0 is greedy.
    """

    source: str
    count: int | None = None
    recipe: str = "chat_jsonl"
    start: int = 0
    thinking: Thinking = "keep"
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if ":" not in self.source:
            raise ConfigError("not a source", given=self.source, fix="Write procedural:<task> or local:<path>")
        if self.count is not None and self.count < 1:
            raise ConfigError("count of a source is below 1", given=self.count, fix="Leave the source out")
        if self.is_endless and self.count is None:
            raise ConfigError("a procedural source has no end", given=self.source, fix="Say how many: count")
        if self.start < 0:
            raise ConfigError("start of a source is below 0", given=self.start, fix="Start at 0 or above")
        if self.thinking not in ("keep", "drop"):
            raise ConfigError("thinking is kept or dropped", given=self.thinking, fix="Write thinking=drop")
        if self.thinking == "drop" and self.is_procedural:
            raise ConfigError("generated problems hold no thinking", given=self.source, fix="Leave thinking out")
        self._check_answers()

    def _check_answers(self) -> None:
        fields = type(self).__dataclass_fields__
        changed = [name for name in ANSWER_FIELDS if getattr(self, name) != fields[name].default]
        if changed and not self.is_parent:
            fix = f"Write {PARENT_PREFIX}{self.source}, or leave it out"
            raise ConfigError(f"{changed[0]} is for answers of the parent", given=self.source, fix=fix)
        if not 0 <= self.temperature <= 2:
            raise ConfigError("temperature must lie in [0, 2]", given=self.temperature)
        if not 0 < self.top_p <= 1:
            raise ConfigError("top_p must lie in (0, 1]", given=self.top_p)
        if self.max_tokens < 1 or not 0 <= self.seed < 2**53:
            raise ConfigError("max_tokens or seed is out of range", given=f"{self.max_tokens}, {self.seed}")
        if self.is_parent and not self.is_self_prompted and self.prompts.is_parent:
            raise ConfigError("a parent answers prompts of a source", given=self.source, fix="Write parent: once")

    @property
    def is_procedural(self) -> bool:
        """Whether a task generates the documents."""
        return self.source.startswith(PROCEDURAL_PREFIX)

    @property
    def task_name(self) -> str:
        """The generating task's name."""
        return self.source.removeprefix(PROCEDURAL_PREFIX)

    @property
    def is_parent(self) -> bool:
        """Whether the parent model writes the responses."""
        return self.source.startswith(PARENT_PREFIX)

    @property
    def is_self_prompted(self) -> bool:
        """Whether the parent model writes the prompts too."""
        return self.source == SELF_PROMPTED

    @property
    def is_endless(self) -> bool:
        """Whether there are always more rows."""
        return self.is_procedural or self.is_self_prompted or self.source.startswith(f"{PARENT_PREFIX}procedural:")

    @property
    def prompts(self) -> "SourceShare":
        """The source whose prompts a parent answers."""
        unset: dict[str, Any] = {
            name: type(self).__dataclass_fields__[name].default for name in (*ANSWER_FIELDS, "thinking")
        }
        return replace(self, source=self.source.removeprefix(PARENT_PREFIX), **unset)

    @property
    def row_recipe(self) -> str:
        """The recipe of the files that are read: a parent's answers have one of their own."""
        return "parent" if self.is_parent else self.recipe

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, for a receipt."""
        unused = set() if self.is_parent else set(ANSWER_FIELDS)
        # Left out where nothing is dropped, as in receipts from before there was a choice.
        unused |= {"thinking"} if self.thinking == "keep" else set()
        return {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationShare:
    """A benchmark's problems that are kept out of the data, and are what is evaluated later.

    Args:
        task: a name in `tasks.table`.
        source: where the rows of a stored benchmark lie, as `SourceShare.source`; empty for generated ones.
    """

    task: str
    count: int
    start: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.count < 1 or self.start < 0:
            raise ConfigError("evaluation range is empty", given=[self.start, self.count], fix="Give a count above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """A whole data run.

    Args:
        sources: in the order of preference: of two equal prompts the earlier source keeps its own.
        evaluation: generated or stored benchmarks whose items are kept out.
        blocklist_files: chat files whose rows are kept out.
        max_document_len: tokens; longer documents are dropped.
    """

    sources: tuple[SourceShare, ...]
    evaluation: tuple[EvaluationShare, ...] = ()
    blocklist_files: tuple[str, ...] = ()
    max_document_len: int = 512

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("no sources", fix="Name at least one, such as procedural:structured")
        names = [(share.source, share.start) for share in self.sources]
        # A parent's answers are found by the source's text alone.
        parents = [share.source for share in self.sources if share.is_parent]
        if len(set(names)) != len(names) or len(set(parents)) != len(parents):
            raise ConfigError("a source is named twice", given=names, fix="Add up the counts")
        if self.max_document_len < 2:
            raise ConfigError("max_document_len is below 2", given=self.max_document_len, fix="Give more tokens")

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, for a receipt."""
        return {
            "sources": [share.as_json() for share in self.sources],
            "evaluation": [_share_json(share) for share in self.evaluation],
            "blocklist_files": list(self.blocklist_files),
            "max_document_len": self.max_document_len,
        }


def _share_json(share: EvaluationShare) -> dict[str, Any]:
    return {name: value for name, value in asdict(share).items() if name != "source" or value}


# What a first run prepares: short problems with exact scores, no network, held-out problems by other seeds.
EMBEDDED_MIXTURE = DataConfig(
    sources=(
        SourceShare(source="procedural:structured", count=400),
        SourceShare(source="procedural:reasoning", count=80),
    ),
    evaluation=(EvaluationShare(task="structured", count=200), EvaluationShare(task="reasoning", count=100)),
    max_document_len=256,
)


def parse_source_share(text: str) -> SourceShare:
    """Read `<source>[?count=N&start=N&recipe=NAME&thinking=drop]`.

    Of a parent also `temperature`, `top_p`, `max_tokens` and `seed`.

    Raises:
        ConfigError: an unknown or malformed setting.
    """
    source, settings = _split_settings(text, ("count", "start", "recipe", "thinking", *ANSWER_FIELDS))
    numbers = {name: _read_number(settings, name, text) for name in ("count", "start", "max_tokens", "seed")}
    shares = {name: _read_decimal(settings, name, text) for name in ("temperature", "top_p")}
    chosen: dict[str, Any] = {name: value for name, value in (numbers | shares).items() if value is not None}
    thinking = cast(Thinking, settings.get("thinking", "keep"))
    return SourceShare(source=source, recipe=settings.get("recipe", "chat_jsonl"), thinking=thinking, **chosen)


def parse_evaluation_share(text: str) -> EvaluationShare:
    """Read `<task>[?count=N&start=N&source=SOURCE]`; without a count all rows of a source, or 200.

    Raises:
        ConfigError: an unknown or malformed setting.
    """
    task, settings = _split_settings(text, ("count", "start", "source"))
    count = _read_number(settings, "count", text)
    start = _read_number(settings, "start", text) or 0
    source = settings.get("source", "")
    if count is None:
        count = ALL_ROWS if source else 200
    return EvaluationShare(task=task, count=count, start=start, source=source)


def _split_settings(text: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    name, mark, query = text.rpartition("?")
    if not mark:
        return text, {}
    parts = [part.partition("=")[::2] for part in query.split("&")]
    settings = dict(parts)
    if len(settings) < len(parts):
        raise ConfigError("a setting of a source or task is given twice", given=text, fix="Give it once")
    if not set(settings) <= set(known):
        raise ConfigError("unknown setting of a source or task", given=text, fix=f"Known are: {', '.join(known)}")
    return name, settings


def _read_number(settings: dict[str, str], name: str, text: str) -> int | None:
    value = settings.get(name)
    if value is not None and not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{name} is not a whole number", given=text, fix=f"Write {name}=100")
    if value is not None and len(value) > MAX_DIGITS:
        raise ConfigError(f"{name} is too large", given=text, fix=f"Write at most {MAX_DIGITS} digits")
    return int(value) if value is not None else None


def _read_decimal(settings: dict[str, str], name: str, text: str) -> float | None:
    try:
        value = float(settings[name]) if name in settings else None
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{name} is not a number", given=text, fix=f"Write {name}=0.7")
    return value
