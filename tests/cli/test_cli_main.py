"""The command line says what went wrong in one line, and its exit code says whose fault it was."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from cyclopts import App

from ar2diff import __version__
from ar2diff.cli import app, build_app, run
from ar2diff.cli.help_text import build_cli_page
from ar2diff.cli.table import COMMANDS
from ar2diff.errors import Ar2diffError, ConfigError


def parser_of(command: Callable[..., object]) -> App:
    built = build_app()
    built.command(command, name="probe")
    return built


def test_version_flag_names_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"ar2diff {__version__}\n"


def test_version_command_names_the_libraries_that_shape_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"ar2diff {__version__}"
    assert any(line.startswith("torch 2.") for line in lines)


def test_version_command_survives_a_library_that_is_absent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ar2diff.cli.version"], "LIBRARIES", ("no-such-library",))
    run(["version"])
    assert "no-such-library not installed" in capsys.readouterr().out


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "Usage: ar2diff COMMAND" in capsys.readouterr().out


def test_help_shows_every_command_with_the_first_words_of_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert command.__doc__, name
        assert f"{name} " in text
        assert " ".join(command.__doc__.split()[:4]) in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["versoin"], 'Did you mean "version"'),
        (["version", "--no-such-flag"], "Unknown option: --no-such-flag"),
        (["--no-such-flag"], "--no-such-flag"),
        (["probe", "--count", "many"], 'Invalid value for --count: "many" is no whole number; write it in digits'),
        (["probe", "--count", "1.5"], '"1.5" is no whole number'),
        (["probe", "--count", "1e3"], '"1e3" is no whole number'),
        (["probe", "--cuont", "3"], "Did you mean --count"),
        (["probe"], "--count"),
        (["probe", "--count", "3", "4"], "too many words (given: 4); write an option that takes several values once"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_two(
    tokens: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe(*, count: int) -> None:
        raise AssertionError(count)

    assert run(tokens, parser=parser_of(probe)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err


def whole_number_flags() -> list[tuple[str, str]]:
    found = [(name, arg) for name in COMMANDS for arg in app[name].assemble_argument_collection()]
    return [(name, arg.name) for name, arg in found if arg.hint is int or int in get_args(arg.hint)]


def required_words(command: str) -> list[str]:
    required = [arg for arg in app[command].assemble_argument_collection() if arg.required]
    choices = {arg.name: get_args(arg.hint) for arg in required if get_origin(arg.hint) is Literal}
    return [word for arg in required for word in (arg.name, choices.get(arg.name, ["x"])[0])]


def test_every_whole_number_flag_of_every_command_is_among_those_that_are_tried() -> None:
    assert {("train", "--steps"), ("train", "--seed"), ("bench", "--steps"), ("serve", "--port")} <= set(
        whole_number_flags()
    )


@pytest.mark.parametrize(("command", "flag"), whole_number_flags())
def test_a_whole_number_flag_refuses_a_fraction_and_names_flag_value_and_remedy(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, *required_words(command), flag, "1.5"]) == (3 if command == "audit" else 2)
    said = f'error: Invalid value for {flag}: "1.5" is no whole number; write it in digits alone, such as 100\n'
    assert capsys.readouterr().err == said


def test_other_values_are_read_as_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    def probe(
        *paths: Path, count: int | None = None, share: float = 0.0, kind: Literal["a", "b"] = "a", on: bool = True
    ) -> None:
        print(paths, count, share, kind, on)

    parser = parser_of(probe)
    assert run(["probe", "x", "y", "--count=-3", "--share", "1e-3", "--kind", "b", "--no-on"], parser=parser) == 0
    assert capsys.readouterr().out == f"{(Path('x'), Path('y'))} -3 0.001 b False\n"
    assert run(["probe", "--kind", "c"], parser=parser) == 2
    assert 'Invalid value "c" for --kind. Choose from: "a", "b"' in capsys.readouterr().err


def test_a_user_error_is_one_line_with_problem_given_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    def probe() -> None:
        raise ConfigError("block_size must be a power\nof two", given=3, fix="Choose 4")

    assert run(["probe"], parser=parser_of(probe)) == ConfigError.exit_code
    assert capsys.readouterr().err == "error: block_size must be a power of two (given: 3). Choose 4\n"


def test_the_exit_code_is_the_errors_own() -> None:
    class OddError(Ar2diffError):
        exit_code = 7

    def probe() -> None:
        raise OddError("odd")

    assert run(["probe"], parser=parser_of(probe)) == 7


def test_ctrl_c_exits_with_130_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def probe() -> None:
        raise KeyboardInterrupt

    assert run(["probe"], parser=parser_of(probe)) == 130
    assert capsys.readouterr().err == "error: stopped by Ctrl-C\n"


def test_our_own_mistakes_keep_their_traceback() -> None:
    def probe() -> None:
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        run(["probe"], parser=parser_of(probe))


def test_a_commands_integer_result_is_the_exit_code() -> None:
    def probe() -> int:
        return 3

    assert run(["probe"], parser=parser_of(probe)) == 3


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "ar2diff", "version"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    with child.stderr as stderr:
        assert stderr.read() == b""
    assert child.wait(timeout=60) == 141


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ar2diff", "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith('error: Unknown command "trian".')


def test_the_command_reference_is_what_the_help_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text() == build_cli_page(), "run 'make docs'"
    assert all(f"## ar2diff {name}" in page.read_text() for name in COMMANDS)
    assert app.name == ("ar2diff",)


def test_a_word_that_is_no_unicode_is_refused_before_anything_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    # How Python shows a file name with the byte FF in it.
    assert run(["train", "--out", "run\udcff"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: not valid UTF-8 on the command line")
    assert shown.count("\n") == 1


def test_what_the_operating_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def read() -> None:
        Path("n" * 5000).read_bytes()

    assert run(["probe"], parser=parser_of(read)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: File name too long (given: nnn")
    assert shown.count("\n") == 1
