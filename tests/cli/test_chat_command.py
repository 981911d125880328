"""`ar2diff chat`: what its commands say, Ctrl-C, and answers that are longer than the screen."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from scripted import ScriptedEngine, make_tokenizer

from ar2diff.cli.chat import Conversation, chat, read_lines
from ar2diff.cli.denoise_view import make_visible, show_steps
from ar2diff.cli.generate import load_engine
from ar2diff.engine.request import Request
from ar2diff.models.loading import save_model
from ar2diff.testing.models import byte_tokenizer, tiny_diffusion, tiny_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
LETTERS = {idx: -100.0 for idx in range(260) if not 97 <= idx <= 122}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, tiny_model(3), tiny_diffusion())
    return path


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    path = tmp_path_factory.mktemp("parent")
    save_model(path, tiny_model(3), None)
    return path


@pytest.fixture(scope="module")
def engine(folder):
    return load_engine(folder, "fp32")


def terminal(height=24):
    return Console(file=io.StringIO(), force_terminal=True, width=40, height=height, color_system=None)


def talk(engine, *lines, console=None):
    console = console or Console(file=io.StringIO(), width=80)
    conversation = Conversation(engine, console, {"max_tokens": 12, "logit_bias": LETTERS})
    conversation.run(iter(lines))
    return conversation, console.file.getvalue()


def test_settings_and_history_are_told(engine):
    lines = [
        "/mode verified",
        "/steps 3",
        "/policy factor 2",
        "/tokens 8",
        "/temperature 0.5",
        "/settings",
        "/history",
    ]
    conversation, out = talk(engine, *lines)
    assert "mode verified, steps 3, policy factor 2, tokens 8, temperature 0.5" in out
    assert "nothing was said yet" in out
    conversation, out = talk(engine, "hi", "/history")
    assert f"user: hi\nassistant: {conversation.messages[1]['content']}\n" in out


def say(engine, *lines, console=None):
    """As `talk`, with a scripted engine and room for all it says."""
    console = console or Console(file=io.StringIO(), width=80)
    conversation = Conversation(engine, console, {"max_tokens": 400})
    conversation.run(iter(lines))
    return conversation, console.file.getvalue()


def prompt_of(engine, idx=-1):
    return engine.tokenizer.decode(list(engine.requests[idx].prompt_ids))


@pytest.fixture
def tools(tmp_path):
    path = tmp_path / "my tools.json"
    path.write_text(json.dumps(TOOLS), encoding="utf-8")
    return path


def test_the_thinking_switch_reaches_the_template_and_auto_leaves_it_alone():
    engine = ScriptedEngine("hermes", "</think>\n\nyes", "no", "maybe")
    lines = ["/thinking on", "one", "/thinking off", "/reset", "two", "/thinking auto", "/reset", "three"]
    conversation, out = say(engine, *lines, "/thinking perhaps", "/thinking")
    ends = [prompt_of(engine, idx).rpartition("assistant\n")[2] for idx in range(3)]
    assert ends == ["<think>\n", "<think>\n</think>\n\n", ""]
    assert [line for line in out.splitlines() if line.startswith("thinking ")] == [
        "thinking on",
        "thinking off",
        "thinking auto",
    ]
    assert out.count("error: thinking is on, off or auto") == 2
    assert conversation.thinking is None


def test_a_model_without_a_switch_refuses_it_and_stays_as_it_was(engine):
    conversation, out = talk(engine, "/thinking on", "/settings")
    assert "error: this model's chat template has no enable_thinking" in out
    assert conversation.thinking is None


def test_thoughts_are_apart_from_the_answer_and_told_when_asked_for():
    engine = ScriptedEngine("hermes", "<think>\nhm\x1b[31m\n</think>\n\nyes", "plain")
    conversation, out = say(engine, "/thoughts", "one", "/thoughts", "/history", "two", "/thoughts")
    assert out.splitlines() == [
        "it thought nothing",
        "yes",
        "hm\x1b[31m",
        "user: one",
        "assistant: yes",
        "plain",
        "it thought nothing",
    ]
    assert conversation.messages[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm\x1b[31m"}


def test_a_terminal_folds_thoughts_into_a_line_and_obeys_nothing_in_them():
    console = terminal()
    _, out = say(
        ScriptedEngine("hermes", "<think>\nhm\x1b[31m\n</think>\n\nyes"), "one", "/thoughts", console=console
    )
    last = out.rpartition("\x1b[2K")[2]
    assert "thought for" in last
    assert "hm␛[31m" in last
    assert "\x1b[31m" not in out


def test_calls_are_told_and_the_lines_that_follow_are_what_they_give_back(tools):
    text = f"<think>\nsum\n</think>\n\nLook:\n{CALL % 1}\n{CALL % 2}"
    engine = ScriptedEngine("hermes", text, "It is 3.")
    conversation, out = say(engine, f"/tools {tools}", "sum up", "one", "two", "/history")
    lines = out.splitlines()
    assert lines[0] == "tools add"
    assert [line for line in lines if line.startswith("calls ")] == ['calls add {"a": 1}', 'calls add {"a": 2}']
    assert lines.count("what add gives back is the next line") == 2
    assert 'assistant: Look: [calls add {"a": 1}] [calls add {"a": 2}]' in lines
    ids = [call["id"] for call in conversation.messages[1]["tool_calls"]]
    assert len(set(ids)) == 2
    results = [(m["tool_call_id"], m["content"]) for m in conversation.messages if m["role"] == "tool"]
    assert results == list(zip(ids, ("one", "two"), strict=True))
    assert conversation.messages[-1] == {"role": "assistant", "content": "It is 3."}
    assert len(engine.requests) == 2
    assert json.dumps(TOOLS[0]) in prompt_of(engine, 0)
    assert "tool\none\ntool\ntwo\n" in prompt_of(engine, 1)
    assert conversation.open_calls == []


def test_a_new_conversation_waits_for_no_result_and_no_tools_are_none(tools):
    engine = ScriptedEngine("hermes", CALL % 1, "plain")
    conversation, out = say(engine, f"/tools {tools}", "sum up", "/reset", "/tools none", "hello")
    assert out.splitlines()[-3:] == ["the conversation is forgotten", "tools none", "plain"]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert "add" not in prompt_of(engine)


@pytest.mark.parametrize("written", ["{}", "[1", '[{"type": "function"}]', None])
def test_tools_that_are_none_are_refused_and_the_old_ones_stay(tools, tmp_path, written):
    wrong = tmp_path / "wrong.json"
    if written is not None:
        wrong.write_text(written, encoding="utf-8")
    conversation, out = say(ScriptedEngine("hermes", ""), f"/tools {tools}", f"/tools {wrong}", "/tools")
    assert out.count("error: ") == 2
    assert conversation.tools == TOOLS


def test_a_pipe_gives_commands_and_gets_their_answers_without_colours(tmp_path, tools):
    model = replace(tiny_model(3, vocab_size=300), tokenizer=make_tokenizer("hermes"))
    save_model(tmp_path / "model", model, tiny_diffusion())
    lines = [
        "/thoughts",
        "/thinking off",
        f"/tools {tools}",
        "/thinking x",
        "/tokens 8",
        "hi",
        "/history",
        "/quit",
        "/help",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "ar2diff", "chat", str(tmp_path / "model"), "--precision", "fp32"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[:3] == ["it thought nothing", "thinking off", "tools add"]
    assert said[3].startswith("error: thinking is on, off or auto")
    assert said[4] == "tokens 8"
    assert "user: hi" in said
    assert "\x1b[" not in done.stdout
    assert "/mode" not in done.stdout  # nothing after /quit


def test_numbers_that_no_answer_can_have_are_refused_and_change_nothing(engine):
    conversation, out = talk(engine, "/tokens 0", "/tokens x", "/temperature 3", "/temperature", "/policy factor -1")
    assert out.count("error: ") == 5
    assert conversation.asked["max_tokens"] == 12


def test_a_model_that_is_not_converted_talks_in_ar_mode(parent, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/settings\n/mode diffusion\n/settings\n"))
    chat(parent, max_tokens=5)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("mode ar,")
    assert out[1].startswith("error: this model is not converted to diffusion")
    assert out[2] == out[0]


def test_a_run_directory_means_its_newest_checkpoint(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ar2diff.cli.serve.find_model", lambda path: folder if path == tmp_path else path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/settings\n"))
    chat(tmp_path)
    assert "mode diffusion" in capsys.readouterr().out


class Interrupted:
    """An engine whose first answer is stopped by the keyboard after some passes."""

    def __init__(self, engine, after):
        self.loaded, self._engine, self._after, self.left = engine.loaded, engine, after, False

    def stream(self, request):
        try:
            for idx, step in enumerate(self._engine.stream(request)):
                if idx == self._after:
                    self._after = -1
                    raise KeyboardInterrupt
                yield step
        finally:
            self.left = True


@pytest.mark.parametrize("console", [terminal(), Console(file=io.StringIO(), width=80)], ids=["terminal", "pipe"])
def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(engine, console):
    stopped = Interrupted(engine, 7)
    conversation, out = talk(stopped, "hi", "more", console=console)
    assert stopped.left
    assert "stopped" in out
    kept = conversation.messages[1]["content"]
    assert kept
    assert kept in out
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user", "assistant"]


def test_ctrl_c_before_the_first_word_leaves_no_turn(engine):
    assert talk(Interrupted(engine, 0), "hi")[0].messages == []


def test_ctrl_c_at_the_prompt_leaves(monkeypatch):
    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", type("Keyboard", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", interrupt)
    assert list(read_lines()) == []


def test_an_answer_longer_than_the_screen_shows_its_end_and_stays_whole(engine):
    console = terminal(height=5)
    request = Request(prompt_ids=tuple(b"hello"), max_tokens=200, policy="top_k", logit_bias=LETTERS | {10: 2.0})
    got = show_steps(console, engine.loaded.tokenizer, engine.stream(request))
    pictures = console.file.getvalue().split("\x1b[2K")
    assert max(picture.count("\n") for picture in pictures[:-1]) < 5
    assert any("░" in picture for picture in pictures[len(pictures) // 2 :])
    assert "".join(pictures[-1].split()).endswith("".join(got.text.split()))


def test_what_a_terminal_would_obey_is_shown_instead():
    assert make_visible("a\x1b[31m\x07\x9b\r\n\tb\x7f") == "a␛[31m␇\ufffd␍\n\tb␡"
    tokenizer = byte_tokenizer()
    assert make_visible(tokenizer.decode([27, 65])) == "␛A"
