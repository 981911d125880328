"""`ar2diff fetch` downloads, logs and documents; a second call says that nothing was downloaded."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from ar2diff.cli import run
from ar2diff.cli.download_bar import DownloadBar
from ar2diff.cli.fetch import default_cache_dir, fetch
from ar2diff.errors import SourceError
from ar2diff.provenance.documents import DOWNLOADS_NAME
from ar2diff.provenance.ledger import LEDGER_NAME, find_events


def test_the_command_downloads_logs_and_documents(hub, model, tmp_path, capsys):
    options = {"out": tmp_path / "run/base", "endpoint": hub.endpoint, "cache": tmp_path / "cache"}
    fetch(str(model), **options)
    assert "downloaded and verified" in " ".join(capsys.readouterr().err.split())
    fetch("hub:owner/name@main", resolve=True, **options)
    assert "nothing had to be downloaded" in " ".join(capsys.readouterr().err.split())
    assert len(find_events(tmp_path / "run" / LEDGER_NAME, "fetch")) == 2
    assert "Resolved from `main`" in (tmp_path / "run" / DOWNLOADS_NAME).read_text()


def test_a_branch_is_refused_before_anything_is_created(tmp_path):
    with pytest.raises(SourceError, match="--resolve"):
        fetch("hub:owner/name@main", out=tmp_path / "run/base")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_follows_the_xdg_rule(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "ar2diff/downloads"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home/.cache/ar2diff/downloads"


@pytest.mark.parametrize("module", ["ar2diff.cli.fetch", "ar2diff.sources.fetch", "ar2diff.provenance.documents"])
def test_importing_loads_neither_torch_nor_the_hub_library(module):
    heavy = ("torch", "transformers", "huggingface_hub", "httpx2", "numpy")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_bar_appears_with_a_file_and_can_begin_anew():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with DownloadBar(console, transient=True) as bar:
        assert console.file.getvalue() == ""
        for name in ("first.safetensors", "second.safetensors"):
            bar.start_file(name, 100, 40)
            bar.advance(60)
            bar.stop()
            assert name in console.file.getvalue()
    assert bar.num_files == 2


@pytest.mark.parametrize(
    "endpoint", ["x", "http://", "http://[::1", "http://host:99999", "ftp://host", "file:///etc", "http://a\tb"]
)
def test_an_address_that_is_no_hub_is_one_line(tmp_path, capsys, endpoint):
    source = "hub:owner/name@" + "0" * 40
    words = ["fetch", source, "--out", str(tmp_path / "base"), "--cache", str(tmp_path / "cache")]
    assert run([*words, "--endpoint", endpoint]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: not a hub's address")
    assert shown.count("\n") == 1
