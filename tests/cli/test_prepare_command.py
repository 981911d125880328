"""Claims about the command `prepare`."""

import json
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from ar2diff.cli.prepare import build_config, prepare, read_fetched_source
from ar2diff.data.config import EMBEDDED_MIXTURE
from ar2diff.errors import DataError
from ar2diff.tokenizer import Tokenizer


@pytest.fixture
def model_folder(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|im_end|>"])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder = tmp_path / "model"
    folder.mkdir()
    Tokenizer(backend, eos_token_ids=[256], chat_template=template).save(folder)
    return folder


def test_prepare_shows_what_became_of_the_rows(tmp_path, model_folder, capsys):
    chat = tmp_path / "chat.jsonl"
    rows = [{"prompt": "a b c", "response": "d"}, {"prompt": "a b c", "response": "e"}]
    chat.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (f"local:{chat}", "procedural:structured?count=3")
    out = tmp_path / "data"
    prepare(out, tokenizer=model_folder, source=sources, evaluation=("structured?count=4",), max_document_len=600)
    shown = capsys.readouterr().err
    assert "4 documents" in shown
    assert (out / "receipt.json").is_file()
    assert (tmp_path / "ledger.jsonl").is_file()


def test_without_flags_the_embedded_mixture_is_meant():
    assert build_config((), (), (), None) == EMBEDDED_MIXTURE


def test_a_fetched_folder_is_known_by_its_receipt(tmp_path):
    (tmp_path / "receipt.json").write_text('{"source": "hub:a/b@c"}')
    assert read_fetched_source(tmp_path) == "hub:a/b@c"
    (tmp_path / "receipt.json").write_text("[]")
    with pytest.raises(DataError, match="not the receipt of a fetch"):
        read_fetched_source(tmp_path)


def test_the_command_is_imported_without_heavy_libraries():
    heavy = "{'torch', 'numpy', 'tokenizers', 'pyarrow', 'rich', 'reasoning_gym'}"
    code = f"import sys, ar2diff.cli.prepare; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
