"""Servers on the loopback: the real one passes, and no other that claims to be it."""

import copy
import errno
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
import torch
from tampering import checkpoint

from ar2diff.audit.live.probes import MAX_TOKENS, StillClock
from ar2diff.audit.live.server import LiveServer
from ar2diff.audit.live.server_probes import ServerProbes
from ar2diff.audit.report import render_text
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import AuditUsageError
from ar2diff.audit.verify import audit_run
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.models.loading import load_model
from ar2diff.serve.bodies import describe_cost
from ar2diff.serve.served import ServedModel
from ar2diff.serve.trace import Trace

OTHER = "0" * 64
FP32 = "float32: as loaded"


class FakeServer:
    """Answers what the two functions say; a fault of theirs is an HTTP 400."""

    def __init__(self, provenance: dict[str, Any] | None, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.provenance, self.answer = provenance, answer

    def respond(self, path: str, body: dict[str, Any] | None) -> Any:
        if path == "/v1/provenance" and self.provenance is not None:
            return self.provenance
        if path == "/v1/models":
            return {"data": [{"id": "tiny"}]}
        if path == "/v1/completions" and body is not None:
            return {"choices": [self.answer(body)]}
        raise LookupError(path)


@contextmanager
def running(fake: FakeServer):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self._answer(None)

        def do_POST(self):
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body):
            try:
                status, content = 200, json.dumps(fake.respond(self.path, body)).encode()
            except Exception as error:
                status, content = 400, json.dumps({"error": str(error)}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Genuine(NamedTuple):
    """The run's checkpoint and what an honest server says of it."""

    loaded: Any
    provenance: dict[str, Any]

    def diffusion(self, body):
        """What the real server answers."""
        return self.tell(self.generate(body, "diffusion"))

    def generate(self, body, mode, loaded=None):
        """An answer of the engine."""
        options = body.get("diffusion", {})
        request = Request(
            prompt_ids=tuple(body["prompt"]),
            max_tokens=body["max_tokens"],
            mode=mode,
            policy=options["policy"],
            denoising_steps=options.get("denoising_steps") if mode == "diffusion" else None,
            trace=True,
        )
        return Engine(loaded or self.loaded, clock=StillClock()).generate(request)

    def tell(self, generation):
        """A choice of the answer's body."""
        trace = Trace(self.loaded.tokenizer)
        passes = [trace.describe(step) for step in generation.passes]
        return {"text": generation.text, "diffusion": {**describe_cost(generation), "passes": passes}}


@pytest.fixture(scope="module")
def genuine(made_run):
    loaded = load_model(checkpoint(made_run.folder))
    served = ServedModel.measure("tiny", loaded, created=0, required_root=None, precision=FP32)
    return Genuine(loaded, served.provenance())


def audit(run, url, *claims):
    return audit_run(run, only=claims, server=url)


def test_a_server_that_the_audit_starts_holds_the_weights_and_denoises(made_run):
    report = audit(made_run.folder, "auto", "A13", "A14")
    assert report.verdict == "pass", render_text(report)
    assert [claim.level for claim in report.claims] == ["a server started by this audit", "engine and server"]


def test_an_honest_server_at_an_address_passes(made_run, genuine):
    with running(FakeServer(genuine.provenance, genuine.diffusion)) as url:
        report = audit(made_run.folder, f"{url}/v1/", "A13", "A14")
    assert report.verdict == "pass", render_text(report)


def test_an_honest_server_in_another_precision_passes_the_probes_that_are_left(made_run, genuine):
    def coarse(body):
        told = genuine.diffusion(body)
        for step in told["diffusion"]["passes"]:
            for reveal in step["reveals"]:
                reveal["logprob"] += 0.05 * step["pass_idx"] - 0.1
        return told

    provenance = genuine.provenance | {"precision": "int8: asked for"}
    with running(FakeServer(provenance, coarse)) as url:
        report = audit(made_run.folder, url, "A14")
    assert report.verdict == "pass", render_text(report)


def test_a_server_in_bf16_is_known_by_the_rounded_weights(made_run):
    loaded = load_model(checkpoint(made_run.folder), dtype=torch.bfloat16)
    served = ServedModel.measure("tiny", loaded, created=0, required_root=None, precision="bfloat16: as loaded")
    with running(FakeServer(served.provenance(), lambda body: None)) as url:
        assert audit(made_run.folder, url, "A13").verdict == "pass"


def test_the_averaged_model_may_be_served(made_run):
    loaded = load_model(made_run.folder / "averaged")
    served = ServedModel.measure("tiny", loaded, created=0, required_root=None, precision=FP32)
    with running(FakeServer(served.provenance(), lambda body: None)) as url:
        assert audit(made_run.folder, url, "A13").verdict == "pass"


ROOT_FORGERIES = {
    "another model": lambda p: p.update(tensor_root=OTHER, live_tensor_root=OTHER),
    "the right files beside other weights": lambda p: p.update(live_tensor_root=OTHER),
    "the right weights under another name": lambda p: p.update(tensor_root=OTHER),
    "weights of no known kind": lambda p: p.update(dtype="float8"),
    "other diffusion settings": lambda p: p["diffusion"].update(block_size=2),
    "no word of the roots": lambda p: p.clear(),
}


@pytest.mark.parametrize("name", ROOT_FORGERIES)
def test_a_server_of_other_weights_fails_a13(made_run, genuine, name):
    provenance = copy.deepcopy(genuine.provenance)
    ROOT_FORGERIES[name](provenance)
    with running(FakeServer(provenance, genuine.diffusion)) as url:
        assert audit(made_run.folder, url, "A13").verdict == "fail"


def test_a_server_without_provenance_and_none_at_all_fail_a13(made_run, genuine):
    with running(FakeServer(None, genuine.diffusion)) as url:
        assert audit(made_run.folder, url, "A13").verdict == "fail"
    assert audit(made_run.folder, url, "A13").verdict == "fail"


def refuse(genuine, body):
    """A public server that knows no such field."""
    raise ValueError("unknown field diffusion")


def ignore(genuine, body):
    """A plain AR server that leaves out what it does not know."""
    return {"text": genuine.generate(body, "ar").text}


def paint(genuine, body, *, noise=0.0):
    """Tokens decoded one by one, with a trace painted over them: blocks, masks and passes as they should be."""
    generation = genuine.generate(body, "ar")
    size, shift = genuine.loaded.diffusion.block_size, genuine.loaded.diffusion.shift_logits
    per_pass = size if body["diffusion"].get("denoising_steps") == 1 else 1
    reveals = [r for step in generation.passes for r in step.reveals][: body["max_tokens"] // size * size]
    passes = []
    for start in range(0, len(reveals), size):
        groups = [range(start, start + 1)] if shift else []
        rest = start + len(groups)
        groups += [range(at, min(at + per_pass, start + size)) for at in range(rest, start + size, per_pass)]
        known: dict[int, int] = {}
        for idx, group in enumerate(groups):
            known |= {at: reveals[at].token_id for at in group}
            told = [
                {
                    "position": at,
                    "token_id": known[at],
                    "logprob": reveals[at].logprob + noise * (1 + idx) * (at % 3 - 1),
                }
                for at in group
            ]
            block = [known.get(at) for at in range(start, start + size)]
            passes.append(
                {
                    "block_idx": start // size,
                    "pass_idx": idx,
                    "start": start,
                    "token_ids": block,
                    "reveals": told,
                }
            )
    return {"text": generation.text, "diffusion": {"num_forward_passes": len(passes), "passes": passes}}


def paint_with_noise(genuine, body):
    """The same, with probabilities that move."""
    return paint(genuine, body, noise=0.3)


def swap_tokens(genuine, body):
    """The real trace, with other tokens."""
    told = genuine.diffusion(body)
    for step in told["diffusion"]["passes"]:
        for reveal in step["reveals"]:
            reveal["token_id"] = (reveal["token_id"] + 1) % genuine.loaded.config.vocab_size
    return told


def never_unmask(genuine, body):
    """A trace whose blocks are never done."""
    told = genuine.diffusion(body)
    told["diffusion"]["passes"][-1]["token_ids"][-1] = None
    return told


def undercount(genuine, body):
    """Fewer forwards than passes."""
    told = genuine.diffusion(body)
    told["diffusion"]["num_forward_passes"] = 1
    return told


@pytest.mark.parametrize(
    "act", [refuse, ignore, paint, paint_with_noise, swap_tokens, never_unmask, undercount], ids=lambda a: a.__name__
)
@pytest.mark.parametrize("precision", [FP32, "int8: asked for"], ids=["fp32", "int8"])
def test_an_autoregressive_server_dressed_up_as_one_that_denoises_fails_a14(made_run, genuine, act, precision):
    provenance = genuine.provenance | {"precision": precision}
    with running(FakeServer(provenance, lambda body: act(genuine, body))) as url:
        report = audit(made_run.folder, url, "A14")
    assert report.verdict == "fail", render_text(report)


def test_painting_alone_is_caught_without_looking_at_the_weights(made_run, genuine):
    with running(FakeServer(genuine.provenance, lambda body: paint(genuine, body))) as url:
        claim = audit(made_run.folder, url, "A14").find("A14")
    failed = [check.what for check in claim.checks if check.verdict == "fail"]
    assert "server: a token revealed in a later pass depends on what was revealed before it" in failed
    assert not [what for what in failed if "masked count" in what or "same trace" in what], failed


END, MASK = "end", None


@pytest.mark.parametrize(
    ("blocks", "verdict"),
    [
        ([[5, 6, 7, 8], [5, END, MASK, 8]], "pass"),
        ([[5, 6, 7, 8], [5, MASK, END, 8]], "fail"),  # what ends the answer is not known yet
        ([[5, 6, 7, 8], [5, 6, MASK, 8]], "fail"),
        ([[5, END, MASK, 8], [5, 6, 7, 8]], "fail"),  # an answer that goes on has not ended
    ],
)
def test_masks_may_stay_only_behind_the_end_of_the_answer(made_run, blocks, verdict):
    loaded = load_model(checkpoint(made_run.folder))
    end = loaded.tokenizer.eos_token_ids[0]
    passes = [
        {"block_idx": index, "token_ids": [end if token == END else token for token in block], "reveals": []}
        for index, block in enumerate(blocks)
    ]
    result = ClaimResult(id="A14", title="")
    ServerProbes(LiveServer("http://127.0.0.1:1"), loaded, result).check_masks(passes)
    assert result.verdict == verdict


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ([1, 2, MASK, MASK], "pass"),
        ([1, MASK, 2, MASK], "fail"),  # a gap
        ([1, MASK, MASK, MASK], "fail"),  # a token short
    ],
)
def test_masks_may_stay_behind_the_last_token_that_was_asked_for(made_run, last, verdict):
    loaded = load_model(checkpoint(made_run.folder))
    blocks = [[1] * (MAX_TOKENS - 2), last]
    passes, position = [], 0
    for index, block in enumerate(blocks):
        known = [token for token in block if token is not MASK]
        reveals = [{"position": position + idx} for idx in range(len(known))]
        position += len(known)
        passes.append({"block_idx": index, "token_ids": block, "reveals": reveals})
    result = ClaimResult(id="A14", title="")
    ServerProbes(LiveServer("http://127.0.0.1:1"), loaded, result).check_masks(passes)
    assert result.verdict == verdict


def test_a_server_that_answers_differently_each_time_fails_a14(made_run, genuine):
    count = iter(range(100))

    def shuffle(body):
        told = genuine.diffusion(body)
        if next(count) % 2:
            told["diffusion"]["passes"][0]["reveals"][0]["token_id"] += 1
        return told

    with running(FakeServer(genuine.provenance, shuffle)) as url:
        claim = audit(made_run.folder, url, "A14").find("A14")
    assert "server: the same request has the same trace" in [c.what for c in claim.checks if c.verdict == "fail"]


def test_a_machine_without_a_loopback_lacks_evidence_and_contradicts_nothing(made_run, monkeypatch):
    def unreachable(*_, **__):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", unreachable)
    report = audit_run(made_run.folder, only=("A13", "A14"), server="auto")
    assert [claim.verdict for claim in report.claims] == ["evidence missing"] * 2
    assert "ip link set lo up" in report.find("A13").checks[0].found


def test_no_server_is_asked_unless_it_is_wanted(made_run):
    assert audit(made_run.folder, "none", "A13").find("A13").verdict == "not claimed"
    with pytest.raises(AuditUsageError, match="address"):
        audit(made_run.folder, "localhost", "A13")


def test_a_checkpoint_that_cannot_be_served_fails_a13(copied):
    (checkpoint(copied) / "config.json").unlink()
    (checkpoint(copied) / "config.json").write_text('{"model_type": "unknown"}')
    assert audit(copied, "auto", "A13").verdict == "fail"
