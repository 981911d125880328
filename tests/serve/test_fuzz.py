"""A small share of `make fuzz-serve`: random requests, none of which is a fault of the server."""

import pytest
from fuzz_requests import CHAT, PATHS, Fuzz, build_engine

NUM_CASES = 100


@pytest.fixture(scope="module")
def server(kit):
    with kit.running(build_engine) as found:
        yield found


@pytest.mark.filterwarnings("default")  # of the makers of requests
@pytest.mark.parametrize("maker", ["change", "describe"])
def test_random_requests_are_answered_or_refused_and_the_engine_lives(server, maker):
    fuzz = Fuzz(server.url)
    with fuzz.http:
        getattr(fuzz, maker)(NUM_CASES, 3)
        assert fuzz.statuses.total() >= NUM_CASES
        assert {200, 400} <= fuzz.statuses.keys()
        assert fuzz.http.post(PATHS[0], json=CHAT).status_code == 200
    assert server.service.worker.state == "ready"
    assert not [line for line in server.lines if "internal_error" in line]
