"""Prepares one data set with one worker, four workers, two nodes and two Ray workers, and compares every byte.

Run by `make scale-check`, outside the tests: Ray alone is a download of half a gigabyte. Ray gives up where its own
processes take 30 s to start, so the machine must be quiet. The last line is JSON.
"""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from conftest import build_byte_tokenizer

from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare
from ar2diff.data.parts import PART_ROWS
from ar2diff.data.pipeline import PARTS_MARK, prepare, prepare_parts
from ar2diff.data.receipt import Node
from ar2diff.data.scale import MakeParts, make_parts_on_ray
from ar2diff.hashing import sha256_file
from ar2diff.tasks import structured

NUM_ROWS = 3 * PART_ROWS + 500


def build_config(folder: Path) -> DataConfig:
    """Four parts of rows with repeats in them, generated rows, and held-out problems among both."""
    problems = structured.build_problems(split="eval", count=NUM_ROWS)
    rows = [{"prompt": p.prompt_text, "response": p.reference} for p in problems]
    rows[-50:] = rows[:50]
    chat = folder / "chat.jsonl"
    chat.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(
        sources=(
            SourceShare(source=f"local:{chat}"),
            SourceShare(source="procedural:structured", count=600),
        ),
        evaluation=(EvaluationShare(task="structured", count=40),),
        max_document_len=900,
    )


def main() -> None:
    """Make the folders, compare them, and say so."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, tokenizer = build_config(folder), build_byte_tokenizer()
        (folder / "tokenizer").mkdir()
        tokenizer.save(folder / "tokenizer")
        outs = {kind: folder / kind for kind in ("1 worker", "4 workers", "2 nodes", "2 Ray workers")}
        for index in (1, 0):
            node = Node(index=index, count=2)
            prepare_parts(config, tokenizer, outs["2 nodes"], node=node, progress=None)
        parts = run_on_ray(
            MakeParts(config=config, tokenizer_dir=folder / "tokenizer", out_dir=outs["2 Ray workers"])
        )
        for kind, out in outs.items():
            workers = 4 if kind == "4 workers" else 1
            prepare(config, tokenizer, out, ledger=None, progress=None, num_workers=workers)
        digests = {kind: {path.name: sha256_file(path) for path in out.iterdir()} for kind, out in outs.items()}
    same = all(each == digests["1 worker"] for each in digests.values())
    versions = {name: version(name) for name in ("datatrove", "ray", "xxhash")}
    result = {"check": "scale", "same_bytes": same, "kinds": list(outs), "ray": parts, "versions": versions}
    print(json.dumps(result))
    sys.exit(0 if same and parts["parts_by_ray"] >= 4 else 1)


def run_on_ray(step: MakeParts) -> dict[str, object]:
    """Two local Ray workers make the parts; how many, and how long it took with Ray's start."""
    import ray

    started_s = time.perf_counter()
    slow_start = {"agent_register_timeout_ms": 60_000}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _system_config=slow_start)
    try:
        make_parts_on_ray(step, num_tasks=2, logging_dir=step.out_dir.with_name("logs"))
    finally:
        ray.shutdown()
    (folder,) = step.out_dir.parent.glob(f"{step.out_dir.name}{PARTS_MARK}*")
    return {
        "parts_by_ray": len(list(folder.glob("source-*.npz"))),
        "wall_s": round(time.perf_counter() - started_s, 1),
    }


if __name__ == "__main__":
    main()
