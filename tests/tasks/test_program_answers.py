"""Programs in answers are found, outputs compared, and a machine without a sandbox is told what it lacks."""

import pytest

from ar2diff.errors import ConfigError
from ar2diff.tasks import sandbox
from ar2diff.tasks.programs import find_program, is_same_output
from ar2diff.tasks.sandbox import check_sandbox, run_program


def test_without_bubblewrap_nothing_runs_and_the_message_says_what_to_install(monkeypatch):
    check_sandbox.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="Install bubblewrap"):
        run_program("print(1)")
    check_sandbox.cache_clear()


def test_a_bubblewrap_that_makes_no_namespace_is_found_out(monkeypatch):
    check_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda _: ["false"])
    with pytest.raises(ConfigError, match="cannot make a sandbox"):
        run_program("print(1)")
    check_sandbox.cache_clear()


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 2", "1  2", True),
        ("1.0", "1", True),
        ("0.1 0.20", "0.10 0.2", True),
        ("yes ", "yes", True),
        ("yes", "Yes", False),
        ("1\n2", "1", False),
        ("1", "1\n2", False),
        ("1e2", "100", True),
        ("nan", "1", False),
        ("", "", True),
    ],
)
def test_outputs_agree_line_by_line_as_text_or_as_decimals(given, wanted, same):
    assert is_same_output(given, wanted) is same


def test_the_longest_fenced_block_is_the_program():
    assert find_program("```py\na = 1\n```\ntext\n```python\nb = 2\nc = 3\n```") == "b = 2\nc = 3\n"
    assert find_program("```python\ncut off") == "cut off"
    assert find_program("no fence") == "no fence"
