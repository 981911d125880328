"""API keys: only their digests are kept, compared in constant time."""

import hashlib
import hmac
from pathlib import Path

from ar2diff.errors import ConfigError

MIN_KEY_LEN = 8
_SCHEME = b"bearer "


class Keys:
    """The keys that open a server; without any, it is open to all who reach it."""

    def __init__(self, keys: list[str]) -> None:
        if any(len(key) < MIN_KEY_LEN for key in keys):
            raise ConfigError(f"an API key is shorter than {MIN_KEY_LEN} characters", fix="Use long random keys")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: Path | None, environment: str | None) -> "Keys":
        """Keys from a file, one a line with # comments, and from an environment variable, separated by blanks.

        Raises:
            ConfigError: the file cannot be read, or a source that is named holds no key.
        """
        found = [] if environment is None else environment.split()
        if path is not None:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the key file cannot be read: {type(error).__name__}", given=str(path)) from None
            found += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found and (path is not None or environment is not None):
            raise ConfigError("no API key is in the place that is named for them", fix="Add one, or name no place")
        return cls(found)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def open_for(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether these raw headers carry exactly one authorization, with a known key."""
        if not self._digests:
            return True
        given = [value for name, value in headers if name.lower() == b"authorization"]
        if len(given) != 1 or given[0][: len(_SCHEME)].lower() != _SCHEME:
            return False
        digest = hashlib.sha256(given[0][len(_SCHEME) :].strip()).digest()
        # All are compared, so that time tells nothing about which one came close.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0
