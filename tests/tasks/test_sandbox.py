"""Programs of a model run behind walls: hostile ones harm nothing, slow ones end, and without walls none runs."""

import os
import time

import pytest

from ar2diff.errors import ConfigError
from ar2diff.tasks.programs import passes_cases, passes_tests
from ar2diff.tasks.sandbox import Limits, check_sandbox, run_program
from ar2diff.tasks.table import TASKS

SHORT = Limits(seconds=3.0)


@pytest.fixture(autouse=True)
def _walls():
    try:
        check_sandbox()
    except ConfigError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def test_a_program_reads_its_input_and_its_output_comes_back():
    outcome = run_program("print(input()[::-1])", stdin="abc\n")
    assert (outcome.why, outcome.exit_code, outcome.stdout) == ("exit", 0, "cba\n")


def test_a_fork_bomb_ends_and_leaves_no_process():
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    started = time.monotonic()
    assert run_program(bomb, limits=SHORT).why == "time"
    assert time.monotonic() - started < 30
    assert run_program("print(1)").stdout == "1\n"


def test_ten_gigabytes_are_refused():
    assert "MemoryError" in run_program("x = bytearray(10_000_000_000)", limits=SHORT).stderr


def test_an_endless_loop_is_killed_at_its_limit():
    started = time.monotonic()
    outcome = run_program("while True: pass", limits=Limits(seconds=1.0))
    assert outcome.why == "time"
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("path", ["/usr/evil", "/evil", "/etc/evil", "/proc/sys/kernel/hostname"])
def test_nothing_outside_can_be_written(path):
    outcome = run_program(f"open({path!r}, 'w').write('x'); print('done')", limits=SHORT)
    assert "done" not in outcome.stdout or not os.path.exists(path)  # noqa: PTH110 - a path of the other side
    assert not os.path.exists("/evil")  # noqa: PTH110


def test_files_of_this_machine_are_not_there(tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    outcome = run_program(f"print(open({str(tmp_path / 'secret')!r}).read())", limits=SHORT)
    assert "s3cret" not in outcome.stdout
    assert "FileNotFoundError" in outcome.stderr


def test_there_is_no_network():
    program = "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run_program(program.format(port=server.getsockname()[1]), limits=SHORT)
    assert "connected" not in outcome.stdout
    assert outcome.exit_code != 0


def test_other_processes_can_be_neither_killed_nor_read(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "s3cret")
    program = (
        f"import os, signal\ntry:\n    os.kill({os.getpid()}, signal.SIGKILL)\n"
        "except OSError as error:\n    print(error)\n"
        "print(dict(os.environ))\n"
        "for name in os.listdir('/proc'):\n"
        "    if name.isdigit():\n        print(open(f'/proc/{name}/environ').read())\n"
    )
    outcome = run_program(program, limits=SHORT)
    assert "No such process" in outcome.stdout
    assert "s3cret" not in outcome.stdout + outcome.stderr


def test_huge_output_is_cut_and_ends_the_program():
    outcome = run_program("while True: print('x' * 1000)", limits=Limits(seconds=20.0, output_bytes=10_000))
    assert outcome.why == "output"
    assert len(outcome.stdout) == 10_000


def test_a_folder_in_memory_may_be_written_within_bounds():
    assert run_program("open('/tmp/a', 'w').write('x'); print(open('/tmp/a').read())").stdout == "x\n"
    assert run_program("open('/tmp/a', 'wb').write(bytes(100_000_000))", limits=SHORT).exit_code != 0


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def double(x):\n    '''Twice x.'''\n",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("```python\ndef double(x):\n    return 2 * x\n```", True),
        ("Here:\n```\ndef double(x):\n    return x + x\n```\nDone.", True),
        ("def double(x):\n    return x << 1", True),
        ("```python\ndef double(x):\n    return 3 * x\n```", False),
        ("```python\nimport os\nos._exit(0)\n```", False),
        ("```python\nimport sys\ndef double(x): sys.exit(0)\n```", False),
        ("def double(x)\n", False),
        ("", False),
    ],
)
def test_a_function_is_right_where_its_tests_run_to_their_end(answer, right):
    problem = TASKS["humaneval"].read_problem(HUMANEVAL, 1)
    assert TASKS["humaneval"].score(problem, answer) is right


def test_mbpp_answers_are_scored_by_their_listed_tests():
    row = {
        "task_id": 3,
        "text": "Add.",
        "code": "def add(a, b): return a + b",
        "test_list": ["assert add(1, 2) == 3"],
    }
    problem = TASKS["mbpp"].read_problem(row, 1)
    assert passes_tests(problem, row["code"])
    assert not passes_tests(problem, "def add(a, b): return a - b")


def livecode(cases, function=None):
    import json

    row = {
        "question_id": "q",
        "question_content": "Do it.",
        "starter_code": "",
        "public_test_cases": json.dumps(cases),
        "metadata": json.dumps({"func_name": function} if function else {}),
    }
    return TASKS["livecodebench"].read_problem(row, 1)


def test_programs_are_scored_by_what_they_print_for_each_input():
    problem = livecode([{"input": f"{n}\n", "output": f"{n * n}\n", "testtype": "stdin"} for n in (2, 5)])
    assert passes_cases(problem, "n = int(input())\nprint(n * n)")
    assert not passes_cases(problem, "print(4)")
    assert not passes_cases(problem, "import time\nprint(4 if input() == '2' else time.sleep(60))")


def test_methods_are_called_with_each_line_as_an_argument():
    problem = livecode([{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}], "join")
    right = (
        "class Solution:\n    def join(self, values, more):\n        print('aside')\n        return values + [more]"
    )
    assert passes_cases(problem, right)
    assert not passes_cases(problem, right.replace("[more]", "[]"))
