"""Claims about looking at a data folder: what is shown is what is trained on, and the page cannot be spoiled."""

import html.parser
import json
import re

import pytest

from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare
from ar2diff.data.inspect import read_documents
from ar2diff.data.pipeline import prepare
from ar2diff.data.report import build_histogram, build_report
from ar2diff.data.shards import TokenShard
from ar2diff.data.stream import RowStream
from ar2diff.errors import ConfigError, DataError
from ar2diff.tokenizer import Tokenizer

QUESTION = "Which <script>alert(1)</script> of the seven bridges & rivers did Euler cross on that one day?"
TEXT = " ".join(f"word{n}" for n in range(60))


@pytest.fixture
def folder(tmp_path, byte_tokenizer):
    rows = [{"prompt": f"ask {n}", "response": "ünïcode" * n or "x"} for n in range(12)]
    rows += [
        {"id": "<b>hit</b>", "prompt": QUESTION, "response": "None & none."},
        {"prompt": TEXT, "response": "a"},
        {"id": "twin", "prompt": TEXT.replace("word3 ", "xyz "), "response": "a"},
        {"prompt": "long", "response": "y" * 2000},
    ]
    chat, gsm8k = tmp_path / "chat.jsonl", tmp_path / "gsm8k.jsonl"
    chat.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gsm8k.write_text(json.dumps({"question": QUESTION + " Then?", "answer": "#### 2"}) + "\n")
    config = DataConfig(
        sources=(SourceShare(source=f"local:{chat}"),),
        evaluation=(EvaluationShare(task="gsm8k", count=9, source=f"local:{gsm8k}"),),
        max_document_len=900,
    )
    prepare(config, byte_tokenizer, tmp_path / "data", ledger=None, progress=None)
    return tmp_path / "data"


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_blocks_join_to_the_response_and_begin_where_training_cuts(folder, byte_tokenizer, block_size):
    shard = TokenShard(folder)
    shown = list(read_documents(folder, byte_tokenizer, block_size=block_size))
    assert len(shown) == len(shard) == 13
    for index, document in enumerate(shown):
        begin, end = shard.document_offsets[index : index + 2]
        tokens = shard.token_ids[begin:end].tolist()
        prompt_len = shard.prompt_lens[index]
        assert (document.num_tokens, document.prompt_len) == (len(tokens), prompt_len)
        assert document.prompt == byte_tokenizer.decode(tokens[:prompt_len], skip_special=False)
        assert len(document.blocks) == -(-(len(tokens) - prompt_len) // block_size)
        for place, block in enumerate(document.blocks):
            at = prompt_len + place * block_size
            assert block == byte_tokenizer.decode(tokens[at : at + block_size], skip_special=False)
    assert shown[5:] == list(read_documents(folder, byte_tokenizer, block_size=block_size, start=5))
    assert shown[0].source.endswith("chat.jsonl#1")


def test_what_cannot_be_shown_is_refused(folder, byte_tokenizer):
    for options in ({"block_size": 0}, {"block_size": 8, "start": 13}, {"block_size": 8, "start": -1}):
        with pytest.raises(ConfigError):
            next(read_documents(folder, byte_tokenizer, **options))
    other = Tokenizer(byte_tokenizer._backend, eos_token_ids=[256], chat_template=None)
    with pytest.raises(DataError, match="another tokenizer"):
        next(read_documents(folder, other, block_size=8))


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)
        self.text = "".join(self.words)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_accounts_for_rows_and_shows_both_texts_of_a_hit(folder):
    page = Page(build_report(folder))
    assert "13 documents" in page.text
    for words in ("evaluation item1", "near duplicate1", "longer than max_document_len1"):
        assert words in page.text
    assert f"{QUESTION}\nNone & none." in page.text
    assert f"{QUESTION} Then?" in page.text
    assert "twinrow-14" in page.text
    assert "gsm8ksft-strict-v18-gram1" in page.text
    fill = RowStream(folder, row_len=1000, seed=1).fill
    assert f"{fill:.2%}" in Page(build_report(folder, row_len=1000)).text


def test_text_of_the_data_never_becomes_markup(folder):
    text = build_report(folder)
    tags = Page(text).tags
    assert not {"script", "b", "link", "img", "iframe"} & set(tags)
    assert "http" not in text.replace("https://www.w3.org", "")


def test_the_bars_of_the_histogram_count_every_document(folder):
    lens = TokenShard(folder).document_lens
    drawn = build_histogram(lens)
    assert sum(int(n) for n in re.findall(r"tokens: (\d+)</title>", drawn)) == len(lens)
    assert f">{lens.min():.0f}</text>" in drawn
    assert f">{lens.max():.0f} tokens</text>" in drawn
    build_histogram(lens[:1])


def test_a_folder_that_is_not_finished_has_no_page(tmp_path):
    with pytest.raises(DataError, match="not a finished data folder"):
        build_report(tmp_path)
