"""Model and dataset repositories of a Hugging Face hub, at a commit, without an account.

Only files of known, harmless formats are downloaded: never a pickle. After the download every file is hashed and
compared with the repository's own listing: SHA-256 for large files, git blob id for small ones. The client library
alone would accept wrong bytes of the right length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ar2diff.errors import Ar2diffError, SourceError
from ar2diff.provenance.git_objects import digest_file, prove_file
from ar2diff.sources.cache import Answer, Cache, Expected, check_space_for, copy_whole
from ar2diff.sources.git_fetch import fetch_git_objects, write_git_objects
from ar2diff.sources.progress import Progress
from ar2diff.sources.receipt import FileReceipt, Receipt, TreeEntry
from ar2diff.sources.spec import HubSource, is_inside
from ar2diff.sources.transfer import Network, download, refuse_cookies, transport_errors

T = TypeVar("T")

ALLOWED_FILES = {
    "model": (
        "config.json",
        "generation_config.json",
        "*.safetensors",
        "*.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
        "LICENSE*",
        "README.md",
    ),
    "dataset": ("*.parquet", "README.md", "LICENSE*"),
}
PICKLE_FORMATS = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.pickle")
_WEIGHTS = {"model": "*.safetensors", "dataset": "*.parquet"}
# Rows as text, which some benchmarks are published in: brought where `files` ends in the same way, never by chance.
TEXT_ROWS = (".jsonl", ".jsonl.gz", ".csv")


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return text.isprintable() and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that cannot be
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A hub to fetch from; `endpoint` None is the client library's own default."""

    cache: Cache
    network: Network
    progress: Progress
    endpoint: str | None = None

    def __post_init__(self) -> None:
        from huggingface_hub import constants

        endpoint = self.endpoint or constants.ENDPOINT
        if not _is_web_address(endpoint):
            raise SourceError("not a hub's address", given=ascii(endpoint), fix="Write http://host or https://host")
        if "@" in urlsplit(endpoint).netloc:
            raise SourceError(
                "the hub's address holds a user name or password",
                fix="Give the address without them: no credentials are sent, and addresses are recorded",
            )

    def resolve(self, source: HubSource) -> str:
        """The full commit id that the source's revision means now."""
        with _in_words(source):
            info = self._ask(
                lambda api: api.repo_info(
                    source.repo_id,
                    revision=source.revision,
                    repo_type=source.repo_type,
                    timeout=self.network.timeout_s,
                )
            )
        commit = replace(source, revision=str(info.sha))
        if not commit.is_pinned or (source.is_pinned and commit.revision != source.revision):
            raise SourceError(
                f"the hub answers for another commit of {source.repo_id} than was asked for",
                given=str(info.sha),
                fix=f"Check the endpoint; {source.revision} was asked for",
            )
        return commit.revision

    def list_tree(self, source: HubSource) -> tuple[TreeEntry, ...]:
        """The repository's whole listing with git ids and LFS digests, ordered by path.

        Raises:
            SourceError: the hub cannot be reached or refuses, or a path leaves the folder.
        """
        with _in_words(source):
            listed = self._ask(
                lambda api: list(
                    api.list_repo_tree(
                        source.repo_id, revision=source.revision, repo_type=source.repo_type, recursive=True
                    )
                )
            )
        entries = tuple(sorted((_tree_entry(item) for item in listed), key=lambda entry: entry.path))
        for entry in entries:
            if not is_inside(entry.path):
                raise SourceError(f"{source} lists a path outside its folder", given=entry.path, fix="Do not use it")
        return entries

    def fetch(self, source: HubSource, out_dir: Path, *, resolved_from: str | None) -> Receipt:
        """Download the allowed files of a pinned source into `out_dir`.

        Raises:
            SourceError: names repository, revision and file, and what to do.
            SpaceError: there is not enough room; checked before the first byte.
        """
        tree = self.list_tree(source)
        wanted = choose_files(source, tree)
        self._check_space(wanted, out_dir)
        files = tuple(self._fetch_file(source, entry, out_dir) for entry in wanted)
        self._keep_git_objects(source, out_dir, files)
        return Receipt(
            source=str(source),
            kind="hub",
            revision=source.revision,
            resolved_from=resolved_from,
            files=files,
            tree=tree,
        )

    def _keep_git_objects(self, source: HubSource, out_dir: Path, files: tuple[FileReceipt, ...]) -> None:
        """Retain what proves the files up to the commit id, where the hub hands it out.

        Raises:
            SourceError: it does, and the files are not those of the commit.
        """
        from huggingface_hub import constants

        prefix = "datasets/" if source.repo_type == "dataset" else ""
        endpoint = (self.endpoint or constants.ENDPOINT).rstrip("/")
        objects = fetch_git_objects(f"{endpoint}/{prefix}{source.repo_id}", source.revision, self.network)
        if not objects:
            return
        for file in files:
            proof = prove_file(source.revision, file.path, digest_file(out_dir / file.path), objects)
            if proof.broken_at:
                raise SourceError(
                    f"{file.path} of {source} is not the commit's: the hub's listing says otherwise than its git",
                    given=proof.broken_at,
                    fix="Do not use it",
                )
        write_git_objects(out_dir, objects)

    def _ask(self, question: Callable[[Any], T]) -> T:
        from huggingface_hub import HfApi

        refuse_cookies()
        return question(HfApi(endpoint=self.endpoint, token=False))

    def _check_space(self, wanted: list[TreeEntry], out_dir: Path) -> None:
        missing = [e for e in wanted if not self.cache.path(_expected(e)).is_file()]
        absent = [e for e in wanted if not (out_dir / e.path).is_file()]
        check_space_for(self.cache.folder, _total(missing), out_dir, _total(absent))

    def _fetch_file(self, source: HubSource, entry: TreeEntry, out_dir: Path) -> FileReceipt:
        expected = _expected(entry)
        found = self.cache.find(expected)
        digest, answer = found or self._download(source, entry, expected)
        target = out_dir / entry.path
        if not target.is_file() or digest_file(target) != digest:
            copy_whole(self.cache.path(expected), target)
        return FileReceipt(
            path=entry.path,
            size_bytes=digest.size_bytes,
            sha256=digest.sha256,
            url=answer.url,
            etag=answer.etag,
            status=answer.status,
            from_cache=found is not None,
            request_headers=answer.request_headers,
        )

    def _download(self, source: HubSource, entry: TreeEntry, expected: Expected) -> tuple[Any, Answer]:
        from huggingface_hub import hf_hub_url

        size_bytes = entry.size_bytes or 0
        url = hf_hub_url(
            source.repo_id,
            entry.path,
            repo_type=source.repo_type,
            revision=source.revision,
            endpoint=self.endpoint,
        )
        with _in_words(source, entry.path), self.cache.open_partial(expected) as stream:
            if stream.tell() > size_bytes:
                stream.truncate(0)
                stream.seek(0)
            self.progress.start_file(entry.path, size_bytes, stream.tell())
            if stream.tell() == size_bytes:
                answer = self.cache.read_answer(expected)
            else:
                answer = download(url, stream, size_bytes, network=self.network, progress=self.progress)
            stream.flush()
            name = f"{entry.path} of {source}"
            return self.cache.admit(expected, self.cache.partial(expected), answer, name=name), answer


def choose_files(source: HubSource, tree: tuple[TreeEntry, ...]) -> list[TreeEntry]:
    """The entries to download, by the allow-list of the repository's type and the source's own glob.

    Raises:
        SourceError: no weights (or rows) are left in a format that is read.
    """
    files = [entry for entry in tree if entry.type == "file"]
    wanted = [entry for entry in files if _is_wanted(source, entry.path)]
    if not any(_is_content(source, entry.path) for entry in wanted):
        pickles = [e.path for e in files if any(fnmatchcase(e.path, pattern) for pattern in PICKLE_FORMATS)]
        held = f"only pickled weights, which are refused: {', '.join(pickles[:3])}" if pickles else "none"
        raise SourceError(
            f"{source} has no {source.files or _WEIGHTS[source.repo_type]} file to download",
            given=held,
            fix="Choose a repository, revision or files= that has them",
        )
    return wanted


def _is_content(source: HubSource, path: str) -> bool:
    """Whether a file holds weights or rows."""
    asked = source.files or ""
    is_text = source.repo_type == "dataset" and any(asked.endswith(end) and path.endswith(end) for end in TEXT_ROWS)
    return is_text or fnmatchcase(path, _WEIGHTS[source.repo_type])


def _is_wanted(source: HubSource, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    if source.files is not None and _is_content(source, path):
        return fnmatchcase(path, source.files)
    if not any(fnmatchcase(name, pattern) for pattern in ALLOWED_FILES[source.repo_type]):
        return False
    if source.repo_type == "dataset":
        return True
    # A model lies in the root; folders and `consolidated` files hold the same weights for other programs.
    return not folder and not fnmatchcase(name, "consolidated*")


def _total(entries: list[TreeEntry]) -> int:
    return sum(entry.size_bytes or 0 for entry in entries)


def _tree_entry(item: Any) -> TreeEntry:
    if not hasattr(item, "blob_id"):
        return TreeEntry(path=item.path, type="folder", oid=item.tree_id)
    sha256 = item.lfs.sha256 if item.lfs else None
    return TreeEntry(path=item.path, type="file", oid=item.blob_id, size_bytes=item.size, sha256=sha256)


def _expected(entry: TreeEntry) -> Expected:
    # The blob id of a large file is that of its pointer, so only the pointer's SHA-256 says what the bytes are.
    if entry.sha256 is not None:
        return Expected(sha256=entry.sha256, size_bytes=entry.size_bytes)
    return Expected(blob_id=entry.oid, size_bytes=entry.size_bytes)


@contextmanager
def _in_words(source: HubSource, path: str | None = None) -> Iterator[None]:
    """Turn the client library's errors into one line that names repository, revision and file."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except Ar2diffError as error:
        raise type(error)(_named(error.problem, source, path), given=error.given, fix=error.fix) from error
    except OfflineModeIsEnabled:
        raise SourceError(
            f"cannot fetch {source}: the hub library is in offline mode", fix="Unset HF_HUB_OFFLINE to download"
        ) from None
    except HfHubHTTPError as error:
        raise _refusal(error, source, path) from error
    except transport_errors() as error:
        raise SourceError(
            f"cannot reach the hub for {source}: {type(error).__name__}",
            given=str(error) or None,
            fix="Check the network, the proxy and the endpoint, and run the same command again",
        ) from error


def _named(problem: str, source: HubSource, path: str | None) -> str:
    what = f"{path} of {source}" if path else str(source)
    return problem if str(source) in problem else f"{what}: {problem}"


def _refusal(error: Any, source: HubSource, path: str | None) -> SourceError:
    from huggingface_hub import errors

    status = getattr(error.response, "status_code", None)
    given = f"HTTP {status}"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        fix = "Accept its terms and download it yourself, then use local: files; no credentials are sent from here"
        return SourceError(f"{source} is gated: it asks for an account", given=given, fix=fix)
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(f"{source.repo_id} has no revision {source.revision}", given=given, fix="Check the commit")
    if isinstance(error, errors.EntryNotFoundError):
        fix = "Choose another revision or report it to the repository"
        return SourceError(f"{path or 'a file'} is missing from {source}", given=given, fix=fix)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        fix = "Check the name and whether it is a dataset (hub:datasets/owner/name@...)"
        return SourceError(f"{source} does not exist or is private", given=given, fix=fix)
    return SourceError(f"the hub failed on {path or 'the listing'} of {source}", given=given, fix="Try again later")
