"""Contestants take turns on the same prompts, and the table follows from what was timed."""

import json

import pytest

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.errors import ConfigError, RequestError
from ar2diff.evals.modes import AR_MODE, VERIFIED_MODE, build_modes
from ar2diff.evals.peers import AbsentError, LlamaRacer, TransformersRacer
from ar2diff.evals.run import build_request
from ar2diff.evals.speed import EngineRacer, SpeedReport, Timing, Turn, race
from ar2diff.evals.speed_page import render_speed
from ar2diff.models.loading import save_model
from ar2diff.testing.models import END_ID, always_model, tiny_diffusion, tiny_model

LOADED = tiny_model(3, diffusion=tiny_diffusion(), max_seq_len=512)
PROMPTS = [list(f"prompt number {idx} {'x' * idx}".encode()) for idx in range(6)]
(STEPS_MODE,) = build_modes("diffusion", (2,), ())


class Scripted:
    """Notes what it is asked; each call takes as long as it is told."""

    def __init__(self, name, log, seconds=1.0):
        self.name, self._log, self._seconds = name, log, seconds

    def answer(self, prompts, max_tokens):
        self._log.append((self.name, [PROMPTS.index(prompt) for prompt in prompts], max_tokens))
        return Timing(seconds=self._seconds, first_s=0.1, num_tokens=10 * len(prompts))


def test_all_contestants_get_the_same_prompts_in_changing_order_after_a_warm_up():
    log = []
    turns = list(race([Scripted("a", log), Scripted("b", log)], PROMPTS, (1, 2), repeats=2, max_tokens=9))
    assert log[:2] == [("a", [0, 1], 8), ("b", [0, 1], 8)]
    assert log[2:] == [
        ("a", [0], 9),
        ("b", [0], 9),
        ("a", [0, 1], 9),
        ("b", [0, 1], 9),
        ("b", [1], 9),
        ("a", [1], 9),
        ("b", [2, 3], 9),
        ("a", [2, 3], 9),
    ]
    assert [(turn.name, turn.batch_size, turn.repeat) for turn in turns[-2:]] == [("b", 2, 1), ("a", 2, 1)]


def test_fewer_prompts_than_the_largest_batch_are_refused():
    with pytest.raises(ConfigError, match="fewer prompts"):
        next(race([Scripted("a", [])], PROMPTS, (7,), repeats=1, max_tokens=4))


def turn(name, size, repeat, seconds, **figures):
    timing = Timing(**{"seconds": seconds, "first_s": 0.2, "num_tokens": 10, **figures})
    return Turn(name=name, batch_size=size, repeat=repeat, timing=timing)


def report():
    turns = (
        *(turn("ar", 1, repeat, 1.0 + repeat, num_forward_passes=10) for repeat in range(3)),
        *(
            turn("fast", 1, repeat, 0.5, num_forward_passes=5, num_blocks=2, num_block_passes=3)
            for repeat in range(3)
        ),
        turn("ar", 8, 0, 1.0, num_forward_passes=10),
        turn("other", 8, 0, 2.0),
    )
    return SpeedReport(turns=turns, absent={"llama.cpp": "not here"}, about={"peers": {"other": "fp32"}, "roots": {}})


def test_rows_are_medians_and_ratios_are_taken_within_a_repeat():
    rows = {(row.name, row.batch_size): row for row in report().rows}
    assert list(rows) == [("ar", 1), ("fast", 1), ("ar", 8), ("other", 8)]
    ar, fast = rows["ar", 1], rows["fast", 1]
    assert (ar.tokens_per_s, ar.lowest, ar.highest) == (5.0, 3.333, 10.0)
    # The AR mode took 1, 2 and 3 seconds: ratios 2, 4 and 6.
    assert (fast.tokens_per_s, fast.over_ar, ar.over_ar) == (20.0, 4.0, 1.0)
    assert (fast.tokens_per_forward, fast.passes_per_block) == (2.0, 1.5)
    assert (ar.tokens_per_forward, ar.passes_per_block) == (1.0, None)
    assert rows["other", 8].tokens_per_forward is None
    assert rows["other", 8].over_ar == 0.5


def test_a_report_is_plain_json_with_every_turn():
    stored = json.loads(json.dumps(report().as_json()))
    assert len(stored["turns"]) == 8
    assert stored["turns"][0] | {} == {**report().turns[0].as_json()}
    assert stored["absent"] == {"llama.cpp": "not here"}


def test_the_page_part_shows_rows_and_who_is_absent():
    shown = render_speed(report().as_json())
    assert "<td>fast</td><td>1</td><td>20.0</td><td>4.00</td>" in shown
    assert "llama.cpp is absent: not here" in shown
    assert shown.count("data:image/png") == 1


def test_without_an_ar_mode_nothing_is_set_against_it():
    alone = SpeedReport(turns=(turn("fast", 1, 0, 1.0),), absent={}, about={"peers": {}})
    assert alone.rows[0].over_ar is None


class Held:
    """A thread setting that counts."""

    count = 0

    def __call__(self):
        return self

    def __enter__(self):
        self.count += 1

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("mode", [AR_MODE, VERIFIED_MODE, STEPS_MODE], ids=lambda mode: mode.name)
def test_a_mode_is_timed_on_the_answers_that_it_gives_alone(mode):
    engine = Engine(LOADED, clock=SystemClock(), config=EngineConfig(max_running=4))
    held = Held()
    timing = EngineRacer(engine, mode, clock=SystemClock(), hold_threads=held).answer(PROMPTS[:4], 12)
    alone = [engine.generate(build_request(mode, tuple(ids), 12)) for ids in PROMPTS[:4]]
    assert timing.num_tokens == sum(len(generation.token_ids) for generation in alone)
    assert timing.num_forward_passes == sum(generation.num_forward_passes for generation in alone)
    assert timing.num_block_passes == sum(sum(generation.passes_per_block) for generation in alone)
    assert 0 < timing.first_s <= timing.seconds
    assert held.count == 1


def test_nothing_known_of_a_prompt_is_left_from_the_turn_before():
    engine = Engine(LOADED, clock=SystemClock())
    racer = EngineRacer(engine, AR_MODE, clock=SystemClock(), hold_threads=Held())
    for _ in range(2):
        racer.answer([PROMPTS[0] * 8], 4)
    assert engine.pages.num_kept > 0
    racer.answer([PROMPTS[1] * 8], 4)
    lease = engine.pages.lease(PROMPTS[0] * 8, len(PROMPTS[0]) * 8 + 1)
    assert lease.cache.length == 0
    engine.pages.release(lease)
    engine.pages.forget_kept()
    assert (engine.pages.num_kept, engine.pages.num_used) == (0, 0)


def test_a_prompt_that_cannot_be_served_is_an_error():
    engine = Engine(LOADED, clock=SystemClock())
    with pytest.raises(RequestError):
        EngineRacer(engine, AR_MODE, clock=SystemClock(), hold_threads=Held()).answer([[9999]], 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, LOADED, LOADED.diffusion)
    return folder


def test_transformers_generates_as_many_tokens_in_a_filled_up_batch_as_our_ar_mode(folder):
    peer = TransformersRacer(folder, end_ids=[END_ID], clock=SystemClock())
    engine = Engine(LOADED, clock=SystemClock())
    timing = peer.answer(PROMPTS[:3], 10)
    ours = [engine.generate(build_request(AR_MODE, tuple(ids), 10)) for ids in PROMPTS[:3]]
    assert timing.num_tokens == sum(len(generation.token_ids) for generation in ours)
    assert 0 < timing.first_s <= timing.seconds


def test_an_end_of_turn_does_not_count_as_a_token(tmp_path):
    ends = always_model(END_ID)
    save_model(tmp_path, ends, None)
    timing = TransformersRacer(tmp_path, end_ids=[END_ID], clock=SystemClock()).answer(PROMPTS[:2], 5)
    assert (timing.num_tokens, timing.num_forward_passes) == (0, 2)


def test_what_transformers_cannot_load_is_absent_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "of-nobody"}')
    with pytest.raises(AbsentError, match="cannot load"):
        TransformersRacer(tmp_path, end_ids=[1], clock=SystemClock())


FAKE_NODE = """#!/usr/bin/env python3
import json, sys
print(json.dumps({"ready": "a processor"}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if ask["max_tokens"] == 13:
        sys.exit(3)
    count = len(ask["prompts"])
    print(json.dumps({"seconds": 2.0, "counts": [4] * count, "first_s": [0.5] * count}), flush=True)
"""


@pytest.fixture
def llama(tmp_path, monkeypatch):
    (tmp_path / "node_modules" / "node-llama-cpp").mkdir(parents=True)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    node = tmp_path / "bin" / "node"
    node.parent.mkdir()
    node.write_text(FAKE_NODE)
    node.chmod(0o755)
    monkeypatch.setenv("PATH", f"{node.parent}:/usr/bin:/bin")
    sizes = {"threads": 1, "num_sequences": 2, "num_places": 64}
    return lambda folder=tmp_path, gguf=tmp_path / "model.gguf": LlamaRacer(folder, gguf, **sizes)


def test_llama_is_asked_in_a_process_of_its_own(llama):
    racer = llama()
    assert racer.about == "a processor"
    timing = racer.answer(PROMPTS[:2], 4)
    assert (timing.num_tokens, timing.seconds, timing.first_s, timing.num_forward_passes) == (8, 2.0, 0.5, 8)
    with pytest.raises(AbsentError, match="status 3"):
        racer.answer(PROMPTS[:2], 13)
    racer.close()


def test_what_llama_lacks_is_said(llama, tmp_path, monkeypatch):
    for lacking, said in (
        ({"gguf": None}, "no GGUF"),
        ({"folder": None}, "no folder"),
        ({"folder": tmp_path / "bin"}, "holds no"),
    ):
        with pytest.raises(AbsentError, match=said):
            llama(**lacking)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AbsentError, match="node is not installed"):
        llama()
