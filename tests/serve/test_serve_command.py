"""`ar2diff serve` as a program: what it prints works, and signals end it in an orderly way."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from ar2diff.cli.serve import build_service, find_model, serve
from ar2diff.errors import ConfigError, ModelError
from ar2diff.models.loading import save_model
from ar2diff.serve.limits import Limits
from ar2diff.testing.models import tiny_diffusion, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "tiny-v1.5"
    save_model(path, tiny_model(3, max_seq_len=8192), tiny_diffusion())
    return path


@pytest.fixture
def start():
    started = []

    def run(*words, **environment):
        started.append(Program(*words, **environment))
        return started[-1]

    yield run
    for program in started:
        program.end(0.1 if program.run.poll() is None else None)


class Program:
    def __init__(self, *words, **environment):
        command = [sys.executable, "-m", "ar2diff", "serve", *map(str, words)]
        self.run = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.printed, self.err = [], ""
        for line in self.run.stdout:
            self.printed.append(line.rstrip())
            if line.startswith("curl"):
                break

    @property
    def url(self):
        return next(line for line in self.printed if line.startswith("address")).split()[1]

    def end(self, timeout):
        try:
            self.err += self.run.communicate(timeout=timeout)[1]
        except subprocess.TimeoutExpired:
            self.run.kill()
            self.run.communicate()
        except ValueError:  # ended before, its pipes are closed
            pass
        return self.run.returncode, self.err


def stream_in_background(url, key=None, **fields):
    found = []
    headers = {"authorization": f"Bearer {key}"} if key else {}

    def read():
        body = {"model": "tiny-v1.5", "prompt": "x", "stream": True, "logit_bias": {"257": -100}, **fields}
        with httpx2.stream("POST", f"{url}/completions", json=body, headers=headers, timeout=60) as response:
            for line in response.iter_lines():
                found.append(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found, thread


def test_the_printed_line_works_and_a_second_sigterm_ends_it_at_once(start, folder):
    program = start(folder, "--port", 0, "--precision", "fp32", AR2DIFF_API_KEYS="key-from-environment")
    printed = "\n".join(program.printed)
    assert "tiny-v1.5" in printed
    assert tiny_model(3, max_seq_len=8192).tensor_root in printed
    page = next(line for line in program.printed if line.startswith("playground")).split()[1]
    assert httpx2.get(page).text.startswith("<!doctype html>")
    curl = shlex.split(program.printed[-1].replace("$KEY", "key-from-environment"))
    body = {**json.loads(curl[-1]), "max_tokens": 4}
    headers = dict(word.split(": ", 1) for word in curl if ": " in word and not word.startswith("{"))
    got = httpx2.post(curl[1], json=body, headers=headers, timeout=20)
    assert got.json()["usage"]["completion_tokens"] <= 4
    found, thread = stream_in_background(program.url, "key-from-environment", max_tokens=8000)
    program.run.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert program.run.poll() is None
    started = time.monotonic()
    program.run.send_signal(signal.SIGTERM)
    code, err = program.end(20)
    assert time.monotonic() - started < 12  # under 4 on a machine with nothing else to do; draining takes up to 30
    assert code == 0
    thread.join(5)
    last = next(line for line in reversed(found) if line.startswith("data: "))
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert all(json.loads(line) for line in err.splitlines())
    assert "key-from-environment" not in err + printed


def test_one_sigterm_lets_a_running_answer_finish(start, folder):
    program = start(folder, "--port", 0)
    found, thread = stream_in_background(program.url, max_tokens=300)
    program.run.send_signal(signal.SIGTERM)
    code, err = program.end(30)
    thread.join(5)
    assert code == 0, err
    assert "data: [DONE]" in found
    assert any('"finish_reason":"length"' in line for line in found)


def test_an_address_in_use_is_an_error_for_the_user(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        serve(folder, port=taken.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(folder, port=99999)


def test_a_model_that_cannot_be_loaded_ends_the_program_with_its_error(folder, tmp_path, capsys):
    with pytest.raises(ModelError, match="no model folder"):
        serve(tmp_path / "absent", port=0)
    with pytest.raises(ModelError, match="another tensor root"):
        serve(folder, port=0, require_provenance="0" * 64)
    assert "curl" not in capsys.readouterr().out


def test_hosts_are_checked_on_this_machine_only():
    def hosts(host):
        return build_service("m", lambda: None, host, None, Limits(), None).allowed_hosts

    assert "localhost" in hosts("127.0.0.1")
    assert "127.0.0.2" in hosts("127.0.0.2")
    assert hosts("0.0.0.0") is None


def test_a_run_directory_means_its_newest_checkpoint(tmp_path):
    assert find_model(tmp_path) == tmp_path
    for step in (1, 2):
        newest = tmp_path / "checkpoints" / f"step-{step:06d}"
        newest.mkdir(parents=True)
        (newest / "COMPLETE").write_text("x")
    assert find_model(tmp_path) == newest
