"""What a server says of itself: metrics by name, and a stream's end even where the mistake is ours."""

import json
from concurrent.futures import ThreadPoolExecutor

from ar2diff.serve.bodies import AnswerHead


def test_a_stream_that_our_own_mistake_ends_says_so(kit, monkeypatch):
    with kit.running() as server:
        monkeypatch.setattr(AnswerHead, "final", lambda self, idx, generation, trace: 1 / 0)
        got = server.chat(stream=True)
        assert got.status_code == 200
        assert json.loads(got.text.rstrip().rpartition("data: ")[2])["error"]["code"] == "internal_error"
        monkeypatch.undo()
        kit.wait_for(lambda: server.service.worker.is_idle)
        assert server.chat(stream=True).text.endswith("data: [DONE]\n\n")


def test_metrics_tell_what_a_server_does(kit):
    engine = kit.gated()
    with kit.running(engine) as server, ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.chat)
        kit.wait_for(lambda: engine.num_started == 1)

        def read():
            lines = server.http.get("/metrics").text.splitlines()
            return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

        kit.wait_for(lambda: float(read()["ar2diff_kv_use"]) > 0)
        assert float(read()["ar2diff_running"]) == 1
        engine.allow(1000)
        held.result()
        server.chat(n=0)
        kit.wait_for(lambda: float(read()["ar2diff_kv_use"]) == 0)
        found = read()
        assert found["ar2diff_time_to_first_token_seconds_count"] == "1.0"
        assert found["ar2diff_token_seconds_count"] == "1.0"
        assert found["ar2diff_tokens_per_forward_count"] == "1.0"
        assert found['ar2diff_rejected_total{reason="invalid_value"}'] == "1.0"
