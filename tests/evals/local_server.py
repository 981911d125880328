"""A real server on the loopback, in a thread of this interpreter."""

import asyncio
import itertools
import threading
import time
from contextlib import contextmanager

from ar2diff.clock import SystemClock
from ar2diff.serve.log import JsonLog
from ar2diff.serve.server import Server, open_socket
from ar2diff.serve.service import Service


@contextmanager
def serve_engine(load, name):
    """The address of a server for the engine that `load` makes."""
    counter = itertools.count()
    service = Service(
        name,
        load,
        clock=SystemClock(),
        log=JsonLog(lambda line: None, SystemClock()),
        draw_seed=lambda: 11,
        new_id=lambda: f"id{next(counter)}",
    )
    listening = open_socket("127.0.0.1", 0)
    server = Server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    service.worker.start()
    thread.start()
    try:
        end = time.monotonic() + 60
        while not server.started or service.worker.state == "loading":
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.ask_to_stop()
        server.ask_to_stop()
        thread.join(15)
        service.worker.join(15)
        listening.close()
