"""Progress moves on a terminal and is plain lines elsewhere."""

import io
import sys

import pytest
from rich.console import Console

from ar2diff.cli import allocator
from ar2diff.cli.run_view import RunView
from ar2diff.clock import SystemClock


def watch(*, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with RunView(console) as view:
        view.stage("Fetching")
        view.download.start_file("model.gguf", 2_000_000, 500)
        view.download.advance(1_999_500)
        view.download.start_file("odd", None, 0)
        view.stage("Preparing")
        for done in range(1, 41):
            view.data("procedural:structured", done, 40)
        view.data("local:chat.jsonl", 7, None)
        view.stage("Evaluating")
        for done in range(1, 5):
            view.evaluation(done, 4, "ar")
        view.stage("Again")
        view.evaluation(4, 4, "ar")
    return console.file.getvalue()


def test_elsewhere_a_line_says_what_a_bar_would_and_no_more_than_ten_a_source():
    lines = watch(terminal=False).splitlines()
    assert lines[:4] == [
        "1. Fetching",
        "  getting model.gguf, 2,000,000 bytes, 500 of them here already",
        "  getting odd",
        "2. Preparing",
    ]
    assert [line for line in lines if "procedural" in line] == [
        f"  procedural:structured: {done} of 40" for done in range(4, 41, 4)
    ]
    assert [line for line in lines if "evaluation" in line] == [
        *(f"  evaluation: {done} of 4" for done in (1, 2, 3, 4)),
        "  evaluation: 4 of 4",
    ]
    assert "\x1b" not in "".join(lines)


def test_elsewhere_long_work_says_each_minute_how_far_it_is_and_what_is_left():
    class SteppingClock(SystemClock):
        now_s = 0.0

        def seconds(self):
            return self.now_s

    clock = SteppingClock()
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with RunView(console, clock) as view:
        for done in range(1, 8):
            clock.now_s += 20.0
            view.evaluation(done, 1000, "ar")
        clock.now_s += 200.0
        view.evaluation(107, 1000, "ar")
        view.data("web", 5, None)
    assert console.file.getvalue().splitlines() == [
        "  evaluation: 4 of 1000, 332:00 left",
        "  evaluation: 7 of 1000, 331:00 left",
        "  evaluation: 107 of 1000, 44:56 left",
    ]


def test_a_terminal_gets_bars_that_show_the_current_mode():
    text = watch(terminal=True)
    assert "\x1b" in text
    assert "model.gguf" in text
    assert "ar" in text
    assert "evaluation: " not in text


def test_freed_memory_is_kept_where_the_c_library_can(monkeypatch):
    class Library:
        def __init__(self):
            self.calls = []

        def mallopt(self, name, value):
            self.calls.append((name, value))
            return 1

    library = Library()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: library)
    assert allocator.keep_freed_memory()
    assert [name for name, _ in library.calls] == [-1, -2, -4]
    monkeypatch.setattr(Library, "mallopt", lambda self, name, value: 0)
    assert not allocator.keep_freed_memory()


@pytest.mark.parametrize("missing", ["platform", "library", "function"])
def test_nothing_is_changed_under_another_c_library(monkeypatch, missing):
    def load(_):
        if missing == "library":
            raise OSError("none")
        return object()

    monkeypatch.setattr(sys, "platform", "darwin" if missing == "platform" else "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", load)
    assert not allocator.keep_freed_memory()
