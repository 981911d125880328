"""Limits that no other file reaches, and the page that lists them all."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from scripted import ScriptedEngine

from ar2diff.serve.guard import MAX_LOGGED_PATH
from ar2diff.serve.limits import Limits
from ar2diff.serve.schemas import MAX_PROMPTS, MAX_TOOLS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "most"), [("prompt", MAX_PROMPTS), ("tools", MAX_TOOLS)])
def test_lists_are_taken_to_their_limit_and_not_beyond(kit, name, most):
    def send(server, count):
        if name == "prompt":
            return server.complete(prompt=["a"] * count)
        tools = [{"type": "function", "function": {"name": f"f{idx}"}} for idx in range(count)]
        return server.chat(tools=tools)

    with kit.running(ScriptedEngine("hermes", "yes")) as server:
        beyond = send(server, most + 1)
        assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, name)
        assert send(server, most).json().get("error", {}).get("code") in (None, "context_length_exceeded")


def test_a_long_path_is_cut_in_the_log(kit):
    with kit.running() as server:
        assert server.http.get("/" + "a" * 1000).status_code == 404
        kit.wait_for(lambda: any('"/aaa' in line for line in server.lines))  # it is written after the answer
        line = next(line for line in server.lines if '"/aaa' in line)
    assert "a" * (MAX_LOGGED_PATH - 1) in line
    assert "a" * MAX_LOGGED_PATH not in line


def test_the_page_has_a_row_for_every_limit_and_every_test_it_names_is_there():
    assert [field.name for field in fields(Limits) if f"| `{field.name}` |" not in PAGE] == []
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "serve").glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in sources] == []
    assert [path for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE) if not (ROOT / path).exists()] == []
