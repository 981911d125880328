"""Claims about thinking sections: kept as they are, or dropped with nothing else."""

import json

import pytest

from ar2diff.data.config import DataConfig, SourceShare, parse_source_share
from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.locate import locate_files, read_source
from ar2diff.data.pipeline import prepare
from ar2diff.data.shards import TokenShard
from ar2diff.data.thinking import drop_thinking, without_thinking
from ar2diff.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>\nhm\n</think>\n\nFour.", "Four."),
        ("  <think></think>Four.", "Four."),
        ("<think>a</think><think>b</think> Four.", "Four."),
        ("hm, 2 + 2 ...\n</think>\nFour.", "Four."),
        ("[THINK]hm[/THINK]Four.", "Four."),
        ("<|begin_of_thought|>hm<|end_of_thought|>\nFour.", "Four."),
        ("<thinking>hm</thinking>Four.", "Four."),
        ("Four.", "Four."),
        (" Four.\n", " Four.\n"),
        ("", ""),
        ("The mark <think> opens and </think> closes.", "The mark <think> opens and </think> closes."),
        ("<think>hm</think>Write <think> and </think>.", "Write <think> and </think>."),
        ("<think>never ends", None),
        ("<think>a</think><think>b", None),
        ("<think>hm</think>", ""),
    ],
)
def test_only_what_a_response_begins_with_is_dropped(text, left):
    assert drop_thinking(text) == left


@pytest.fixture
def read(write_jsonl):
    def read_with(setting, *rows):
        path = write_jsonl("chat.jsonl", rows)
        share = parse_source_share(f"local:{path}?thinking={setting}")
        return list(read_source(share, locate_files(share.source, {})))

    return read_with


ROW = {"prompt": "2 + 2?", "response": "<think>hm</think>\nFour."}


def test_a_flag_of_the_source_keeps_or_drops_thinking(read):
    assert read("keep", ROW)[0].response == ROW["response"]
    assert read("drop", ROW)[0].response == "Four."


def test_thinking_in_a_field_of_its_own_is_kept_or_dropped_alike(read):
    turns = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>easy</think>Two.", "reasoning_content": "not learnt"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "hm"},
    ]
    (kept,) = read("keep", {"messages": turns})
    assert kept.response == "<think>\nhm\n</think>\n\nFour."
    (dropped,) = read("drop", {"messages": turns})
    assert dropped.response == "Four."
    assert [turn["content"] for turn in dropped.prompt] == ["1 + 1?", "Two.", "2 + 2?"]


@pytest.mark.parametrize(
    ("response", "reason"),
    [("<think>and so on", "unfinished thinking"), ("<think>hm</think> \n", "nothing but thinking")],
)
def test_a_response_without_an_answer_is_dropped_with_its_reason(read, response, reason):
    (row,) = read("drop", ROW | {"response": response})
    assert row == DroppedRow(id="row-1", source=row.source, reason=reason)
    assert isinstance(read("keep", ROW | {"response": response})[0], Document)


def test_a_dropped_row_keeps_its_first_reason():
    row = DroppedRow(id="a", source="s", reason="empty response")
    assert without_thinking(row) is row


def test_folders_from_before_there_was_a_choice_still_match_their_config():
    assert "thinking" not in SourceShare(source="local:a").as_json()
    assert SourceShare(source="local:a", thinking="drop").as_json()["thinking"] == "drop"
    parent = SourceShare(source="parent:procedural:structured", count=3, thinking="drop")
    assert parent.prompts == SourceShare(source="procedural:structured", count=3)


@pytest.mark.parametrize("text", ["local:a?thinking=maybe", "procedural:structured?count=1&thinking=drop"])
def test_a_choice_that_cannot_be_meant_is_refused(text):
    with pytest.raises(ConfigError, match="thinking"):
        parse_source_share(text)


def test_only_the_flag_decides_what_the_shard_holds(tmp_path, byte_tokenizer, write_jsonl):
    path = write_jsonl("chat.jsonl", [ROW])
    for setting, text in (("keep", ROW["response"]), ("drop", "Four.")):
        share = SourceShare(source=f"local:{path}", thinking=setting)
        prepare(DataConfig(sources=(share,)), byte_tokenizer, tmp_path / setting, ledger=None, progress=None)
        shard = TokenShard(tmp_path / setting)
        assert byte_tokenizer.decode(shard.token_ids[shard.prompt_lens[0] :].tolist()) == text
    assert json.loads((tmp_path / "drop" / "receipt.json").read_text())["config"]["sources"][0]["thinking"] == "drop"
