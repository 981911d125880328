"""What rooms share: a whole conversion in seconds, tiny parent and chat data on a loopback hub; and a browser."""

import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from ar2diff.testing.hub import LoopbackHub
from ar2diff.testing.models import tiny_model

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

RECIPE = """
[base]
source = "hub:tiny/parent@{model}"

[data]
max_document_len = 480
sources = [
    {{ source = "procedural:structured", count = 6 }},
    {{ source = "hub:datasets/tiny/chat@{chat}#files=data/*", recipe = "chat_jsonl" }},
]
evaluation = [{{ task = "structured", count = 4 }}, {{ task = "reasoning", count = 4 }}]

[train]
steps = {steps}
micro = 1
row_len = 512
save_every = {save_every}

[train.objective]
block_sizes = [4]

[evaluate]
problems = [{{ task = "structured", count = 2 }}, {{ task = "reasoning", count = 2 }}]
steps = [1, 2]
max_tokens = 6
bits_problems = 2
precision = "fp32"
"""


@dataclass(frozen=True)
class TinyHub:
    """A loopback hub with `tiny/parent` and `datasets/tiny/chat`."""

    hub: LoopbackHub
    endpoint: str
    model: str
    chat: str

    def recipe_text(self, *, steps: int = 3, save_every: int = 1) -> str:
        """A recipe over both repositories."""
        return RECIPE.format(model=self.model, chat=self.chat, steps=steps, save_every=save_every)

    def write_recipe(self, folder: Path, **settings: int) -> Path:
        """The recipe as a file."""
        path = folder / "tiny.toml"
        path.write_text(self.recipe_text(**settings))
        return path


@pytest.fixture(scope="session")
def tiny_parent(tmp_path_factory):
    from ar2diff.models.loading import save_model

    folder = tmp_path_factory.mktemp("parent")
    save_model(folder, tiny_model(1, max_seq_len=512), None)
    return folder


@pytest.fixture(scope="session")
def tiny_hub(tiny_parent):
    rows = [{"prompt": f"Say {name}.", "response": name} for name in ("one", "two", "three")]
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    with LoopbackHub() as hub:
        model = hub.add_repo("tiny/parent", {path.name: path.read_bytes() for path in tiny_parent.iterdir()})
        chat = hub.add_repo("tiny/chat", {"data/train.parquet": parquet.getvalue()}, dataset=True)
        yield TinyHub(hub=hub, endpoint=hub.endpoint, model=model, chat=chat)


@pytest.fixture(autouse=True)
def _own_config_home(tmp_path_factory, monkeypatch):
    # Signing keys are made there: never in the user's own folder.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config-home"))


@pytest.fixture(scope="module")
def browser():
    """A Chromium of this machine, without a window."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium is installed here (Debian and Ubuntu: apt-get install chromium)")
    sandbox = [] if os.getuid() else ["--no-sandbox"]  # Chromium refuses a sandbox to root
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, "--disable-gpu"])
        yield opened
        opened.close()
