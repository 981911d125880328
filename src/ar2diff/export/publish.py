"""Push a verified export to a hub, with a card in front, under a token that was given for this alone."""

import io
import re
from pathlib import Path

from ar2diff.errors import ConfigError, ModelError, SourceError
from ar2diff.export.export import verify_export

# Licences that let a changed model be passed on, by the hub's own names.
OPEN_LICENSES = (
    "apache-2.0",
    "mit",
    "bsd-2-clause",
    "bsd-3-clause",
    "cc-by-4.0",
    "cc-by-sa-4.0",
    "cc0-1.0",
    "gemma",
    "llama2",
    "llama3",
    "llama3.1",
    "llama3.2",
    "openrail",
)
_REPO_ID = re.compile(r"hub:([A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)")
_UPLOADED = (".safetensors", ".json", ".jinja", ".md", ".py", ".gguf", ".txt")


def parse_repo(text: str) -> str:
    """`hub:OWNER/NAME` as `OWNER/NAME`.

    Raises:
        ConfigError: it is no such address.
    """
    found = _REPO_ID.fullmatch(text)
    if found is None:
        raise ConfigError("not an address to publish to", given=text, fix="Write hub:OWNER/NAME")
    return found[1]


def publish_export(
    folder: Path,
    target: str,
    repo_id: str,
    *,
    token: str,
    license_id: str,
    endpoint: str | None = None,
    private: bool = True,
) -> str:
    """Upload every file of an export in one commit; returns the commit id.

    Args:
        folder: an export of `target`; it is verified first.
        token: sent to this hub with this upload alone; never stored, never logged.
        license_id: the base's licence, which must allow a changed model to be passed on.

    Raises:
        ConfigError: no token, or a licence that does not allow it.
        ModelError: the folder does not pass its verifier, or holds a file that no export has.
        SourceError: the hub refuses.
    """
    if not token.strip() or not token.isprintable():
        raise ConfigError("no token is given", fix="Give a file that holds it: --token-file")
    if license_id not in OPEN_LICENSES:
        fix = f"It must be one of {', '.join(OPEN_LICENSES)}"
        raise ConfigError("this licence of the base does not allow publishing", given=license_id, fix=fix)
    if findings := verify_export(folder, target):
        raise ModelError(
            f"the folder is no valid {target} export", given=findings[0].one_line(), fix="Export it anew"
        )
    return _upload(folder, _list_files(folder), repo_id, token, license_id, target, endpoint, private=private)


def _list_files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir())
    odd = [path.name for path in paths if not path.is_file() or path.is_symlink() or path.suffix not in _UPLOADED]
    if odd:
        raise ModelError("the folder holds a file that no export has", given=odd[0], fix="Remove it, or export anew")
    return paths


def _upload(
    folder: Path,
    paths: list[Path],
    repo_id: str,
    token: str,
    license_id: str,
    target: str,
    endpoint: str | None,
    *,
    private: bool,
) -> str:
    # Imported here: the library is slow to load and reads its settings from the environment.
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    # Plain uploads to this address alone; the client's other protocol asks further servers for further tokens.
    constants.HF_HUB_DISABLE_XET = True
    card = _front_matter(license_id, target).encode() + (folder / "README.md").read_bytes()
    operations = [
        CommitOperationAdd(path.name, io.BytesIO(card) if path.name == "README.md" else path) for path in paths
    ]
    api = HfApi(endpoint=endpoint, token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.create_commit(repo_id, operations, commit_message=f"{target} export by ar2diff")
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).replace(token, "***")
        raise SourceError(
            f"the hub refuses the upload: {reason}", given=repo_id, fix="Check token and name"
        ) from None
    return str(commit.oid)


def _front_matter(license_id: str, target: str) -> str:
    tags = ["block-diffusion", "ar2diff", target]
    library = "gguf" if target == "gguf" else "peft" if target == "adapter" else "transformers"
    lines = [f"license: {license_id}", f"library_name: {library}", "pipeline_tag: text-generation", "tags:"]
    return "\n".join(["---", *lines, *(f"- {tag}" for tag in tags), "---", "", ""])
