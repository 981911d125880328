"""`ar2diff chat`: what its commands say, Ctrl-C, and answers that are longer than the screen."""

import io
import sys

import pytest
from rich.console import Console

from ar2diff.cli.chat import Conversation, chat, read_lines
from ar2diff.cli.denoise_view import make_visible, show_steps
from ar2diff.cli.generate import load_engine
from ar2diff.engine.request import Request
from ar2diff.models.loading import save_model
from ar2diff.testing.models import byte_tokenizer, tiny_diffusion, tiny_model

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
