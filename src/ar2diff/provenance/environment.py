"""What a run ran in: names (never values) of credential-like variables, digests of the code, library versions."""

import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import ar2diff
from ar2diff.hashing import sha256_file, sha256_json

SESSION_EVENT = "session_started"
STAGE_EVENT = "stage_surroundings"
# Before each of these events the ledger says what the process has around it at that moment.
# A stored adapter was put on the base, and training began at what came out.
APPLIED_EVENT = "adapter_applied"
STAGES = frozenset(
    {
        "fetch",
        APPLIED_EVENT,
        "prepare",
        "train_started",
        "train_finished",
        "train_interrupted",
        "evaluate",
        "harness",
        "bench",
    }
)
CODE_EVENT = "code"
LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "huggingface-hub", "pyarrow", "gguf", "rapidfuzz")

_CREDENTIAL = re.compile(
    r"(^|_)(TOKEN|API_?KEY|SECRET|SECRET_KEY|ACCESS_KEY|ACCESS_KEY_ID|PASSWORD|PASSWD|CREDENTIALS?|PRIVATE_KEY)(_|$)"
)
_PROVIDER_URL = re.compile(
    r"^(OPENAI|AZURE_OPENAI|ANTHROPIC|GEMINI|GOOGLE|MISTRAL|COHERE|GROQ|TOGETHER|DEEPSEEK|OPENROUTER|XAI|OLLAMA|LITELLM)"
    r"_(API_BASE|API_BASE_URL|BASE_URL|API_URL|ENDPOINT|HOST)$"
)


def describe_session(environ: Mapping[str, str]) -> dict[str, Any]:
    """The data of a `session_started` event: which credential-like variables and provider addresses are set.

    Values are not looked at, but for being empty.
    """
    names = sorted(name for name, value in environ.items() if value)
    return {
        "credential_names": [name for name in names if _CREDENTIAL.search(name.upper())],
        "provider_url_names": [name for name in names if _PROVIDER_URL.match(name.upper())],
        "python": platform.python_version(),
    }


def describe_stage(environ: Mapping[str, str], unpickled: list[str]) -> dict[str, Any]:
    """The data of a `stage_surroundings` event: variables by name, and the classes unpickled so far."""
    session = describe_session(environ)
    names = {name: session[name] for name in ("credential_names", "provider_url_names")}
    return {**names, "unpickled": unpickled}


def describe_code() -> dict[str, Any]:
    """The data of a `code` event: SHA-256 of every imported file of this package, and library versions."""
    package = Path(str(ar2diff.__file__)).parent
    files = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if (name == "ar2diff" or name.startswith("ar2diff.")) and path is not None and Path(path).is_file():
            files[Path(path).relative_to(package).as_posix()] = sha256_file(Path(path))
    libraries = {name: found for name in LIBRARIES if (found := describe_library(name)) is not None}
    return {"root": sha256_json(files), "files": files, "versions": read_versions(), "libraries": libraries}


def describe_library(name: str) -> dict[str, str] | None:
    """What identifies an installed wheel: version, platform tags, and a digest over the hashes that it lists.

    None where it is absent or was installed without a list of its files.
    """
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    hashes = {str(file): file.hash.value for file in installed.files or [] if file.hash and _is_of_wheel(str(file))}
    tags = sorted(re.findall(r"^Tag: (.+)$", installed.read_text("WHEEL") or "", re.MULTILINE))
    if not hashes:
        return None
    return {"version": installed.version, "tags": ",".join(tags), "files_sha256": sha256_json(hashes)}


def _is_of_wheel(path: str) -> bool:
    # Installers add files of their own: compiled modules, scripts outside the package, notes about themselves.
    own_notes = path.endswith((".dist-info/INSTALLER", ".dist-info/REQUESTED", ".dist-info/direct_url.json"))
    return not path.startswith("..") and not path.endswith(".pyc") and not own_notes


def read_versions() -> dict[str, str | None]:
    """Versions of this package and of the libraries that decide bytes; None for one that is absent."""
    versions: dict[str, str | None] = {"ar2diff": ar2diff.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
