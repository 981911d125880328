"""After a stop nothing of a server is left: no thread, no child process, no open connection."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from ar2diff.models.loading import save_model
from ar2diff.testing.models import tiny_diffusion, tiny_model

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds children in /proc")
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "maxItems": 3}}}


def list_children(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def list_group(group):
    """Processes of a group that still run."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # gone meanwhile
            continue
        if int(its_group) == group and state != "Z":
            found.add(int(entry.parent.name))
    return found


def test_a_graceful_stop_leaves_no_thread_child_or_descriptor(kit):
    threads, children = set(threading.enumerate()), list_children(os.getpid())
    with kit.running() as server:
        assert server.chat(response_format=FORM).status_code == 200
        assert server.chat(stream=True).text.endswith("data: [DONE]\n\n")
        connection = socket.create_connection(("127.0.0.1", server.port))
        port = server.port
        assert {thread.name for thread in set(threading.enumerate()) - threads} >= {"engine"}
        server.server.ask_to_stop()
        kit.wait_for(lambda: server.service.worker.state == "stopped")
        kit.wait_for(lambda: not set(threading.enumerate()) - threads)
    assert list_children(os.getpid()) <= children
    assert connection.recv(10) == b""
    connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_leaves_no_process_even_in_the_middle_of_a_compilation(tmp_path, times):
    save_model(tmp_path / "tiny", tiny_model(3), tiny_diffusion())
    command = [sys.executable, "-m", "ar2diff", "serve", str(tmp_path / "tiny"), "--port", "0", "--precision", "fp32"]
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        url = next(line.split()[1] for line in program.stdout if line.startswith("address"))
        asking = threading.Thread(target=ask_for_a_bomb, args=(url,))
        asking.start()
        deadline = time.monotonic() + 60
        while not list_children(program.pid):
            assert time.monotonic() < deadline, "no form is compiled"
            time.sleep(0.001)
        for _ in range(times):
            program.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert program.wait(40) == 0
        asking.join(40)
        assert not asking.is_alive()
        assert list_group(program.pid) == set()
    finally:
        program.kill()
        program.communicate()


def ask_for_a_bomb(url):
    form = {**FORM, "json_schema": {"name": "x", "schema": {"type": "integer", "multipleOf": 1_234_567}}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": form}
    with suppress(httpx2.HTTPError):  # the server may be gone before it answers
        httpx2.post(f"{url}/chat/completions", json=body, timeout=30)
