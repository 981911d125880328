"""What the tests of this room share: a byte tokenizer with a chat template, and documents in one line."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ar2diff.data.documents import Document
from ar2diff.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPO = Path(__file__).resolve().parents[2]


def build_byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, eos_token_ids=[257], chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def byte_tokenizer():
    return build_byte_tokenizer()


@pytest.fixture
def make_document():
    def make(prompt, response="fine", **fields):
        values = {"id": "d", "source": "local:x#1", **fields}
        return Document(prompt=({"role": "user", "content": prompt},), response=response, **values)

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    def write(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def shared_data():
    places = [folder / "shared" / "data" for folder in (REPO, REPO.parent, REPO.parent.parent)]
    found = [place for place in places if place.is_dir()]
    if not found:
        pytest.skip("the shared data folder is not beside the checkout")
    return found[0]
