"""What drafts promise with more training: known laws are found again, and nothing is promised from too little."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ar2diff.engine.draft_plan import PassCosts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "acceptance.py"
FLAT = PassCosts({1: 1.0, 8: 1.0})
POSITIONS = [1e5, 3e5, 1e6, 2e6]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("acceptance_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(("scale", "exponent"), [(20.0, 0.3), (1.5, 0.05), (0.01, -0.2)])
def test_a_known_power_law_is_found_again(script, scale, exponent):
    law = script.fit_law(POSITIONS, [1 - scale * n**-exponent for n in POSITIONS])
    assert (law.scale, law.exponent) == (pytest.approx(scale), pytest.approx(exponent))
    assert law.chance(5e6) == pytest.approx(1 - scale * 5e6**-exponent)
    assert script.Law(20.0, 0.3).chance(10) == 0.0


@pytest.mark.parametrize(
    ("positions", "chances"),
    [
        ([1e5, 1e6], [0.5, 0.6]),
        (POSITIONS, [0.5, None, 0.6, None]),
        (POSITIONS, [0.5, 0.6, 1.0, 1.0]),
        ([1e5, 1e5, 1e6], [0.5, 0.5, 0.6]),
    ],
)
def test_fewer_than_three_points_have_no_law(script, positions, chances):
    assert script.fit_law(positions, chances) is None


def test_the_promise_is_that_of_the_best_length(script):
    # Two passes for 1 + 0.9 + 0.81 + 0.729 tokens; a place that is never right adds nothing.
    assert script.promise(FLAT, [0.9, 0.9, 0.9, 0.0]) == (3, pytest.approx((1 + 0.9 + 0.81 + 0.729) / 2))
    assert script.promise(FLAT, [0.5, 0.5]) == (0, 1.0)
    steep = PassCosts({1: 1.0, 2: 1.1, 8: 7.1})
    assert script.promise(steep, [1.0, 1.0]) == (0, 1.0)
    dear = PassCosts({1: 1.0, 2: 0.8, 8: 6.8})
    assert script.promise(dear, [1.0, 1.0]) == (1, pytest.approx(2 / 1.6))


def test_the_positions_at_the_bar_are_those_where_the_laws_reach_it(script):
    laws = [script.Law(20.0, 0.3)] * 7
    found = script.find_positions(FLAT, laws, [0.5] * 7, 1e5)
    before, after = (script.promise(FLAT, [law.chance(n) for law in laws])[1] for n in (found * 0.98, found * 1.01))
    assert before < script.BAR <= after
    assert script.find_positions(FLAT, laws, [0.5] * 7, found * 3) == float(f"{found * 3:.3g}")
    assert script.find_positions(FLAT, [script.Law(0.9, 0.01)] * 7, [0.5] * 7, 1e5) == "not within 1000 times"
    assert script.find_positions(FLAT, [None] * 7, [0.9] * 7, 1e5) == "no fit"


def test_a_place_without_a_law_keeps_its_chance(script):
    first = [script.Law(20.0, 0.3), *[None] * 6]
    assert isinstance(script.find_positions(FLAT, first, [0.5, *[0.9] * 6], 1e5), float)
    assert script.find_positions(FLAT, first, [0.5, *[None] * 6], 1e5) == "not within 1000 times"


def test_positions_are_those_of_all_steps_up_to_the_checkpoint(script, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": n, "num_tokens": 10 * n}) + "\n" for n in (1, 2, 4)))
    assert script.count_positions(metrics, 2) == 30
    with pytest.raises(SystemExit, match="no step 3"):
        script.count_positions(metrics, 4)


def test_the_quick_run_prints_its_document_last_and_the_ar_answers(tmp_path, library_dir):
    out = tmp_path / "acceptance.json"
    line = [sys.executable, str(SCRIPT), "--quick", "--library-dir", str(library_dir), "--out", str(out)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert document["model"]["mask_gated"]
    assert set(document["domains"]) == {"structured", "reasoning"}
    for found in document["domains"].values():
        assert [len(one["reached"]) for one in found["checkpoints"]] == [7, 7]
        assert found["checkpoints"][0]["reached"][0] > 0
        assert found["laws"] == [None] * 7
        assert found["positions_at_1.5x"] == "no fit"
    equal, _ = document["bars"]
    if document["precision"].startswith("int8"):
        assert (equal["value"], equal["holds"]) == (1.0, True)
