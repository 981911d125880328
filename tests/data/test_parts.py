"""Claims about who makes the parts: any number of workers or nodes, killed or not, give the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ar2diff.data import parts
from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare
from ar2diff.data.locate import locate_files
from ar2diff.data.parts import plan_parts
from ar2diff.data.pipeline import prepare, prepare_parts
from ar2diff.data.receipt import Node
from ar2diff.data.scale import MakeParts, make_parts_on_ray
from ar2diff.errors import ConfigError, DataError, RunError
from ar2diff.hashing import sha256_file

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from conftest import build_byte_tokenizer
from test_parts import build_config
from ar2diff.data import parts
from ar2diff.data.pipeline import prepare
parts.PART_ROWS = 300
if __name__ == "__main__":
    prepare(
        build_config(Path({chat!r})), build_byte_tokenizer(), Path({out!r}), ledger=None, progress=None,
        num_workers={workers},
    )
    assert "torch" not in sys.modules, "torch was loaded"
"""


def build_config(chat):
    return DataConfig(
        sources=(
            SourceShare(source=f"local:{chat}", count=1000),
            SourceShare(source="procedural:structured", count=80),
        ),
        evaluation=(EvaluationShare(task="structured", count=20),),
        max_document_len=900,
    )


@pytest.fixture(scope="module", autouse=True)
def _small_parts():
    """Workers get their rows from here, so this is the only place that must know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_ROWS", 300)
        yield


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """1,200 rows in four parts: different ones, exact repeats, near repeats within and across parts."""
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    with path.open("w") as stream:
        for n in range(1200):
            kind, number = n % 4, n - 600 if n % 4 == 3 and n > 600 else n
            words = " ".join(f"w{number * 31 + step}" for step in range(40))
            prompt = {0: words, 1: words, 2: f"again {n % 50}", 3: f"{words} end{n}"}[kind]
            stream.write(json.dumps({"prompt": prompt, "response": "fine"}) + "\n")
    return path


def digests(folder):
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def expected(chat, tmp_path_factory, byte_tokenizer):
    out = tmp_path_factory.mktemp("expected") / "data"
    receipt = prepare(build_config(chat), byte_tokenizer, out, ledger=None, progress=None)
    assert [entry.name for entry in out.parent.iterdir()] == ["data"]
    assert receipt.content["sources"][0]["dropped"]["near duplicate"] > 100
    assert receipt.content["sources"][0]["dropped"]["repeated prompt"] > 100
    return digests(out)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_write_the_same_bytes(tmp_path, byte_tokenizer, chat, expected, num_workers):
    calls = []
    prepare(
        build_config(chat),
        byte_tokenizer,
        tmp_path / "data",
        ledger=None,
        progress=lambda *call: calls.append(call),
        num_workers=num_workers,
    )
    assert digests(tmp_path / "data") == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    assert calls[-1] == ("procedural:structured", 80, 80)


def test_two_nodes_and_a_join_write_the_same_bytes(tmp_path, byte_tokenizer, chat, expected, monkeypatch):
    config, out, made = build_config(chat), tmp_path / "data", []
    for index in (1, 0):
        node = Node(index=index, count=2)
        made.append(prepare_parts(config, byte_tokenizer, out, node=node, progress=None))
    assert made == [2, 3]
    monkeypatch.setattr(parts.PartMaker, "make", lambda *_: pytest.fail("a finished part was made again"))
    prepare(config, byte_tokenizer, out, ledger=None, progress=None)
    assert digests(out) == expected
    assert prepare_parts(config, byte_tokenizer, out, node=Node(index=0, count=2), progress=None) == 0


def test_the_step_for_clusters_makes_the_parts_of_its_rank(tmp_path, byte_tokenizer, chat, expected, monkeypatch):
    (tmp_path / "tokenizer").mkdir()
    byte_tokenizer.save(tmp_path / "tokenizer")
    config, out = build_config(chat), tmp_path / "data"
    step = MakeParts(config=config, tokenizer_dir=tmp_path / "tokenizer", out_dir=out)
    assert step(["passed on"], rank=1, world_size=2) == ["passed on"]
    assert len(list(tmp_path.glob("data.parts-*/source-*.npz"))) == 2
    step(None, rank=0, world_size=2)
    monkeypatch.setattr(parts.PartMaker, "make", lambda *_: pytest.fail("a finished part was made again"))
    prepare(config, byte_tokenizer, out, ledger=None, progress=None)
    assert digests(out) == expected


def test_a_cluster_without_its_libraries_or_tasks_is_refused(tmp_path, chat, monkeypatch):
    step = MakeParts(config=build_config(chat), tokenizer_dir=tmp_path, out_dir=tmp_path / "data")
    monkeypatch.setitem(sys.modules, "datatrove.executor.ray", None)
    with pytest.raises(ConfigError, match=r"ar2diff\[scale\]"):
        make_parts_on_ray(step, num_tasks=2, logging_dir=tmp_path)
    with pytest.raises(ConfigError, match="no tasks"):
        make_parts_on_ray(step, num_tasks=0, logging_dir=tmp_path)


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(tmp_path, byte_tokenizer, chat, expected):
    script, out = tmp_path / "script.py", tmp_path / "data"
    tests = str(Path(__file__).parent)
    script.write_text(SCRIPT.format(tests=tests, chat=str(chat), out=str(out), workers=1))
    for moment in ("tokenizer-or-none", "source-000-part-000002.npz", "shard/ids.jsonl", "shard/receipt.json"):
        with subprocess.Popen([sys.executable, str(script)], start_new_session=True) as running:
            while running.poll() is None and not list(tmp_path.glob(f"data.parts-*/{moment}")):
                if moment.startswith("tokenizer") and list(tmp_path.glob("data.parts-*")):
                    break
                time.sleep(0.002)
            if running.poll() is None:
                os.kill(running.pid, signal.SIGKILL)
        assert not out.exists() or digests(out) == expected
    prepare(build_config(chat), byte_tokenizer, out, ledger=None, progress=None)
    assert digests(out) == expected
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "script.py"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_goes_on_with_its_finished_parts(tmp_path, byte_tokenizer, chat, expected, workers):
    out = tmp_path / "data"
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parent)
    script.write_text(SCRIPT.format(tests=tests, chat=str(chat), out=str(out), workers=workers))
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, start_new_session=True) as running:
        while not (finished := list(tmp_path.glob("data.parts-*/source-*.npz"))) and running.poll() is None:
            time.sleep(0.01)
        children = read_children(running.pid)
        os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert not out.exists()
    times = {path.name: path.stat().st_mtime_ns for path in finished}
    wait_for_end(children)
    assert {p.name: p.stat().st_mtime_ns for p in finished} == times
    subprocess.run(command, check=True, timeout=400)
    assert digests(out) == expected
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "script.py"]


def read_children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def wait_for_end(pids):
    """Workers of a killed parent end by themselves."""
    for _ in range(6000):
        alive = [pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and read_state(pid) != "Z"]
        if not alive:
            return
        time.sleep(0.01)
    pytest.fail(f"still running: {alive}")


def read_state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_killed_worker_is_an_error_and_keeps_the_parts(tmp_path, byte_tokenizer, chat, expected):
    config, out = build_config(chat), tmp_path / "data"

    before = set(read_children(os.getpid()))
    killed = []

    def kill_workers(*_):
        for pid in set(read_children(os.getpid())) - before - set(killed):
            if read_state(pid) != "Z" and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    with pytest.raises(RunError, match="a worker was killed"):
        prepare(config, byte_tokenizer, out, ledger=None, progress=kill_workers, num_workers=2)
    assert list(tmp_path.glob("data.parts-*/source-*.npz"))
    prepare(config, byte_tokenizer, out, ledger=None, progress=None)
    assert digests(out) == expected


def test_a_fault_in_a_worker_arrives_as_it_was_raised(tmp_path, chat, byte_tokenizer, write_jsonl):
    path = write_jsonl("chat.jsonl", [{"prompt": "a", "response": "b"}, {"text": "c"}])
    config = DataConfig(sources=(SourceShare(source=f"local:{path}"),))
    with pytest.raises(DataError, match=r"chat\.jsonl, row 2"):
        prepare(config, byte_tokenizer, tmp_path / "data", ledger=None, progress=None, num_workers=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["chat.jsonl"]


def test_parts_end_after_so_many_rows_or_characters(chat, write_jsonl, monkeypatch):
    share = build_config(chat).sources[0]
    works = list(plan_parts(share, locate_files(share.source, {}), 3))
    assert [len(work.rows) for work in works] == [300, 300, 300, 300]
    assert works[1].name == "source-003-part-000001.npz"
    monkeypatch.setattr(parts, "PART_CHARACTERS", 10)
    path = write_jsonl("long.jsonl", [{"prompt": "abcde" * (n % 2), "response": "fghij"} for n in range(5)])
    share = SourceShare(source=f"local:{path}")
    assert [len(w.rows) for w in plan_parts(share, locate_files(share.source, {}), 0)] == [2, 2, 1]


def test_a_generator_makes_no_more_than_is_wanted_at_first():
    works = plan_parts(SourceShare(source="procedural:structured", count=300, start=7), [], 0)
    assert [(w.start, w.count) for w, _ in zip(works, range(4), strict=False)] == [
        (7, 256),
        (263, 44),
        (307, 64),
        (371, 64),
    ]


@pytest.mark.parametrize("text", ["2/2", "1", "a/b", "-1/2", "0/0"])
def test_a_node_that_cannot_be_is_refused(text):
    assert Node.parse("1/2") == Node(index=1, count=2)
    with pytest.raises(ConfigError, match="node"):
        Node.parse(text)
