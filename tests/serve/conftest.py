"""Real servers on the loopback, in a thread of this interpreter, over tiny models; engines that wait for the test."""

import asyncio
import itertools
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2
import pytest

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.serve.keys import Keys
from ar2diff.serve.limits import Limits
from ar2diff.serve.log import JsonLog
from ar2diff.serve.server import Server, open_socket
from ar2diff.serve.service import Service
from ar2diff.testing.models import tiny_diffusion, tiny_model

NAME = "tiny"
WAIT_MS = 30_000
LOADED = tiny_model(3, diffusion=tiny_diffusion())


class GatedEngine:
    """A real engine that runs one request at a time; every pass waits for a permit. Counts passes and leavers."""

    def __init__(self, loaded, permits=0):
        self.loaded = loaded
        self._scheduler = Engine(loaded, clock=SystemClock(), config=EngineConfig(max_running=1)).scheduler
        self._permits = threading.Semaphore(permits)
        self.num_passes = self.num_left = self.num_started = 0
        self.crash = None

    @property
    def scheduler(self):
        return self

    @property
    def capacity(self):
        return self._scheduler.capacity

    @property
    def kv_use(self):
        return self._scheduler.kv_use

    def allow(self, count):
        self._permits.release(count)

    def add(self, key, request):
        self.num_started += 1
        self._scheduler.add(key, request)

    def remove(self, key):
        self.num_left += 1
        self._scheduler.remove(key)

    def step(self):
        results = self._scheduler.step()
        for _ in results:
            assert self._permits.acquire(timeout=600)
            if self.crash is not None:
                raise self.crash
            self.num_passes += 1
        return results


class Running:
    """A running server and a client for it."""

    def __init__(self, service, server, port):
        self.service, self.server, self.port = service, server, port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, timeout=20)
        self.lines = []

    def chat(self, **fields):
        return self.http.post("/v1/chat/completions", json=chat_body(**fields))

    def complete(self, **fields):
        return self.http.post("/v1/completions", json={"model": NAME, "prompt": "hello", "max_tokens": 6, **fields})

    def raw(self, data, *, timeout=10.0, more=()):
        """What comes back for raw bytes, until the server closes or falls silent for a moment."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            connection.sendall(data)
            for pause, piece in more:
                time.sleep(pause)
                connection.sendall(piece)
            return read_all(connection)


def read_all(connection):
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
            head, _, body = received.partition(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if length and len(body) >= int(length[0].split(b":")[1]):
                break
    except ConnectionResetError:
        pass
    return received


def chat_body(**fields):
    return {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, **fields}


def wait_for(holds, timeout=60.0):
    # Looks are counted, not seconds: a machine that was suspended meanwhile has not waited.
    for _ in range(int(timeout / 0.005)):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("it does not happen")


@contextmanager
def running(engine=None, *, keys=(), limits=None, wait=True, log=None, **settings):
    lines, counter = [], itertools.count()
    make = engine if callable(engine) else lambda: engine or Engine(LOADED, clock=SystemClock())
    service = Service(
        NAME,
        make,
        clock=SystemClock(),
        log=log or JsonLog(lines.append, SystemClock()),
        draw_seed=lambda: 11,
        new_id=lambda: f"id{next(counter)}",
        keys=Keys(list(keys)),
        limits=Limits(**(limits or {})),
        **settings,
    )
    listening = open_socket("127.0.0.1", 0)
    server = Server(service)
    port = listening.getsockname()[1]
    found = Running(service, server, port)
    found.lines = lines

    async def serve():
        found.loop = asyncio.get_running_loop()
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    service.worker.start()
    thread.start()
    try:
        wait_for(lambda: server.started and not (wait and service.worker.state == "loading"))
        yield found
    finally:
        found.http.close()
        server.ask_to_stop()
        server.ask_to_stop()
        if isinstance(engine, GatedEngine):
            engine.allow(10_000)
        thread.join(15)
        service.worker.join(15)
        listening.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def kit():
    return SimpleNamespace(
        running=running,
        gated=lambda permits=0: GatedEngine(LOADED, permits),
        loaded=LOADED,
        chat_body=chat_body,
        wait_for=wait_for,
        name=NAME,
        direct=Engine(LOADED, clock=SystemClock()),
        read_all=read_all,
        clock=SystemClock(),
    )


@pytest.fixture(scope="session")
def shared(kit):
    """A server that outlives every bad request sent to it."""
    with running() as found:
        yield found
        assert found.chat().status_code == 200


@pytest.fixture
def visit(browser):
    """Opens the page of a server; at the end no request has left for elsewhere and the console is clean."""

    @contextmanager
    def open_page(server, *, errors=(), **settings):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **settings})
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.asked, page.said = [], []

        def note_request(request):
            page.asked.append(request)

        context.on("request", note_request)
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto(f"{server.url}/")
        yield page
        assert {request.url.split("/")[2] for request in page.asked} == {f"127.0.0.1:{server.port}"}
        assert [line for line in page.said if not any(part in line for part in errors)] == []
        context.close()

    return open_page
