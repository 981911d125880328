"""`ar2diff generate` and `ar2diff chat` on a tiny saved model, at a pipe and at a terminal."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from ar2diff.cli import run
from ar2diff.cli.chat import Conversation, chat, read_lines
from ar2diff.cli.denoise_view import DenoiseView, colour_of, describe_speed, show_steps
from ar2diff.cli.generate import generate, load_engine
from ar2diff.engine.request import Request
from ar2diff.errors import RequestError
from ar2diff.models.loading import save_model
from ar2diff.testing.models import tiny_diffusion, tiny_model

ANSI = re.compile("\x1b\\[")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, tiny_model(3), tiny_diffusion())
    return path


@pytest.fixture(scope="module")
def engine(folder):
    return load_engine(folder, "fp32")


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")


def test_the_json_answer_is_the_engines_answer(folder, engine, capsys):
    generate(folder, prompt="hello", max_tokens=9, raw=True, json=True, mode="verified")
    printed = json.loads(capsys.readouterr().out)
    got = engine.generate(Request(prompt_ids=tuple(b"hello"), max_tokens=9, mode="verified"))
    assert (printed["text"], printed["token_ids"]) == (got.text, list(got.token_ids))
    assert printed["tokens_per_forward"] == len(got.token_ids) / printed["num_forward_passes"]


def test_the_settings_reach_the_request(folder, capsys):
    asked = {"max_tokens": 8, "raw": True, "json": True, "policy": "top_k"}
    generate(folder, prompt="hello", steps=1, **asked)
    generate(folder, prompt="hello", steps=3, **asked)
    one, three = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one["passes_per_block"] == [1, 1]
    assert three["passes_per_block"] == [3, 3]
    with pytest.raises(RequestError, match="confidence_threshold"):
        generate(folder, prompt="hello", threshold=7.0)


def test_a_pipe_gets_the_text_without_escape_codes(folder, engine, capsys):
    generate(folder, prompt="hello", max_tokens=9, precision="fp32")
    out, err = capsys.readouterr()
    ids = engine.loaded.tokenizer.encode_chat([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert out == engine.generate(Request(prompt_ids=tuple(ids), max_tokens=9)).text + "\n"
    assert "forward passes" in err


def test_a_terminal_sees_masks_and_then_the_answer(engine):
    console = terminal()
    request = Request(prompt_ids=tuple(b"hello"), max_tokens=9, policy="top_k")
    got = show_steps(console, engine.loaded.tokenizer, engine.stream(request))
    assert "░" in console.file.getvalue()
    assert got.token_ids == engine.generate(request).token_ids
    assert "9 tokens" in describe_speed(got)


def test_the_view_shows_every_token_once_it_is_revealed(engine):
    view = DenoiseView(engine.loaded.tokenizer)
    request = Request(prompt_ids=tuple(b"hello"), max_tokens=12, policy="top_k")
    for step in engine.stream(request):
        picture = view.advance(step).plain
        assert picture.count("░") == (0 if step.generation else step.token_ids.count(None))
    assert picture == engine.generate(request).text


def test_surer_tokens_have_another_colour():
    assert [colour_of(value) for value in (0.1, 0.6, 0.9, 0.99, 1.0)] == ["red", "yellow", "cyan", "green", "green"]


def talk(engine, *lines, console=None):
    console = console or Console(file=io.StringIO(), width=80)
    conversation = Conversation(engine, console, {"max_tokens": 6})
    conversation.run(iter(lines))
    return conversation, console.file.getvalue()


def test_a_chat_remembers_and_resets(engine):
    conversation, _ = talk(engine, "hi", "", "again\n")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user", "assistant"]
    conversation, _ = talk(engine, "hi", "/reset")
    assert conversation.messages == []


def test_slash_commands_change_the_next_answer_and_refuse_nonsense(engine):
    conversation, out = talk(
        engine,
        "/mode ar",
        "/steps 2",
        "/policy entropy 0.4",
        "/mode fast",
        "/steps x",
        "/policy top_k 3",
        "/what",
        "/policy",
        "/help",
        "/quit",
        "never reached",
    )
    asked = conversation.asked
    assert (asked["mode"], asked["denoising_steps"], asked["policy"]) == ("ar", 2, "entropy")
    assert asked["policy_parameter"] == 0.4
    assert out.count("error: ") == 5
    assert "/reset" in out
    assert conversation.messages == []
    assert talk(engine, "/steps 2", "/steps auto")[0].asked["denoising_steps"] is None


def test_a_chat_over_a_pipe_writes_no_escape_codes_and_on_a_terminal_the_speed(engine):
    assert not ANSI.search(talk(engine, "hi")[1])
    assert "forward passes" in ANSI.sub("", talk(engine, "hi", console=terminal())[1])


def test_the_chat_command_answers_lines_from_standard_input(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/quit\n"))
    chat(folder, max_tokens=5)
    out = capsys.readouterr().out
    assert out
    assert not ANSI.search(out)


def test_lines_come_from_the_keyboard_until_its_end(monkeypatch):
    class Keyboard(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Keyboard("a\nb\n"))
    assert list(read_lines()) == ["a", "b"]


def test_the_command_modules_load_neither_torch_nor_the_engine():
    program = (
        "import sys, ar2diff.cli.generate, ar2diff.cli.chat; print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "absent", "--prompt", "x"], "no model folder or .gguf file"),
        (["chat", "absent"], "no model folder or .gguf file"),
        (["chat", "MODEL", "--temperature", "nan"], "temperature must lie in [0, 2]"),
        (["chat", "MODEL", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["chat", "MODEL", "--seed", "1" + "0" * 30], "seed must fit in 64 bits"),
        (["generate", "MODEL", "--prompt", "x", "--steps", "-1"], "denoising_steps must be at least 1"),
        (["generate", "MODEL", "--prompt", "x", "--policy", "best"], "best"),
        (["generate", "MODEL", "--prompt", "", "--raw"], "the prompt is empty"),
        (["generate", "MODEL", "--prompt", "x", "--mode", "fast"], "fast"),
        (["generate", "DAMAGED", "--prompt", "x"], "model.safetensors"),
    ],
)
def test_a_wrong_request_is_one_line(folder, tmp_path, capsys, words, said):
    shutil.copytree(folder, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    places = {"MODEL": str(folder), "DAMAGED": str(tmp_path / "damaged")}
    assert run([places.get(word, word) for word in words]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert said in shown.err


def test_a_chat_as_its_own_program_takes_commands_over_a_pipe(folder):
    command = [sys.executable, "-m", "ar2diff", "chat", str(folder), "--max-tokens", "5"]
    lines = "hi\n/mode ar\n/mode fast\nagain\n/quit\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    assert "mode ar\n" in done.stdout
    assert "error: mode is one of" in done.stdout
    assert not ANSI.search(done.stdout + done.stderr)


def test_more_lanes_than_a_block_has_tokens_cost_no_memory(folder, capsys):
    words = ["generate", str(folder), "--prompt", "hi", "--max-tokens", "6", "--mode", "verified", "--json"]
    answers = []
    for lanes in ("4", "1000000000000"):
        assert run([*words, "--draft-lanes", lanes]) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert answers[0] == answers[1]
