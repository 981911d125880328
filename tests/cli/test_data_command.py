"""Claims about the commands `data show` and `data report`, and `prepare` with workers and nodes."""

import json

import pytest
import tokenizers
from rich.console import Console
from tokenizers import decoders, models, pre_tokenizers

from ar2diff.cli import run
from ar2diff.cli.data import BLOCK_SIGN, draw_document
from ar2diff.data.inspect import ShownDocument
from ar2diff.hashing import sha256_file
from ar2diff.tokenizer import Tokenizer


@pytest.fixture
def model_folder(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    folder = tmp_path / "model"
    folder.mkdir()
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    Tokenizer(backend, eos_token_ids=[256], chat_template=template).save(folder)
    return folder


@pytest.fixture
def chat(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"ask {n}?", "response": "[b]abcdef"}) + "\n" for n in range(5)))
    return path


def prepare(out, model_folder, chat, *more):
    words = ["prepare", str(out), "--tokenizer", str(model_folder), "--source", f"local:{chat}"]
    return run([*words, "--evaluation", "structured?count=2", *more])


def test_documents_are_shown_with_a_line_before_each_block(tmp_path, model_folder, chat, capsys):
    out = tmp_path / "data"
    assert prepare(out, model_folder, chat) == 0
    show = ["data", "show", str(out), "--tokenizer", str(model_folder), "--start", "1", "--count", "2"]
    assert run([*show, "--block-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert f"ask 1?{BLOCK_SIGN}[b]a{BLOCK_SIGN}bcde{BLOCK_SIGN}f<|im_end|>" in shown
    assert "ask 2?" in shown
    assert "ask 3?" not in shown
    assert run(["data", "show", str(out)]) == 2


def test_prompt_and_blocks_have_different_colours():
    document = ShownDocument("a", "s", "Why?", ("one", "two"), 1, 3)
    console = Console(force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(draw_document(document))
    codes = {word: capture.get().split(word)[0].rpartition("\x1b[")[2] for word in ("Why?", "one", "two")}
    assert len(set(codes.values())) == 3


def test_the_report_lies_beside_the_folder_and_leaves_it_as_it_was(tmp_path, model_folder, chat, capsys):
    out = tmp_path / "data"
    prepare(out, model_folder, chat)
    before = {path.name: sha256_file(path) for path in out.iterdir()}
    assert run(["data", "report", str(out), "--row-len", "600"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert "rows of 600 positions" in (tmp_path / "report.html").read_text()
    assert before == {path.name: sha256_file(path) for path in out.iterdir()}


def test_nodes_make_parts_that_a_last_run_joins(tmp_path, model_folder, chat, capsys):
    out = tmp_path / "data"
    assert prepare(out, model_folder, chat, "--node", "1/2") == 0
    assert prepare(out, model_folder, chat, "--node", "0/2") == 0
    assert "1 parts made" in capsys.readouterr().err
    assert not out.exists()
    assert prepare(out, model_folder, chat) == 0
    assert (out / "COMPLETE").is_file()
    assert prepare(tmp_path / "two", model_folder, chat, "--workers", "0") == 2
