import pytest

from ar2diff.sources.cache import Cache
from ar2diff.sources.fetch import fetch
from ar2diff.sources.progress import SilentProgress
from ar2diff.sources.spec import HubSource, parse_source
from ar2diff.sources.transfer import Network
from ar2diff.testing.hub import LoopbackHub

WEIGHTS = bytes(range(256)) * 400
MODEL_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b'{"version": "1.0"}',
    "README.md": "# Café\n".encode(),
    "extra/notes.txt": b"not downloaded",
    "extra/adapter.safetensors": b"adapter",
    "pytorch_model.bin": b"\x80\x04 pickle",
}


class FixedClock:
    """Time stands still, so that equal runs write equal ledgers."""

    def utc(self):
        from datetime import UTC, datetime

        return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def seconds(self):
        return 0.0


@pytest.fixture
def hub():
    with LoopbackHub() as running:
        yield running


@pytest.fixture
def model(hub):
    """A pinned model repository on the loopback hub."""
    return HubSource(repo_id="owner/name", revision=hub.add_repo("owner/name", MODEL_FILES))


@pytest.fixture
def fetch_here(tmp_path, hub):
    """Fetch a source into tmp_path/base with a cache in tmp_path/cache, impatiently."""

    def fetch_source(spec, *, out="base", **options):
        if isinstance(spec, str):
            spec = parse_source(spec, allow_branch=options.get("allow_branch", False))
        defaults = {"ledger": None, "progress": None, "network": Network(num_retries=2, retry_wait_s=0, timeout_s=5)}
        places = {"cache_dir": tmp_path / "cache", "clock": FixedClock(), "endpoint": hub.endpoint}
        return fetch(spec, tmp_path / out, **(places | defaults | options))

    return fetch_source


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def silent():
    return SilentProgress()
