"""What a narrower precision costs: each precision of the engine against fp32 on one converted model.

Three comparisons on held-out problems of the tasks that are generated. Teacher-forced over the reference answers, on
the rows of the AR path and on the masked places of each block's first denoising pass: KL(fp32 || precision) in nats
for each predicted token, and the share of equal argmax. Decoded: answers that are right in the AR mode and in the
diffusion mode, pair by pair. And the bytes of the weights. `--model` takes a checkpoint folder; without it a tiny
random model goes through the same code. The last line of standard output is one JSON document.

    python benchmarks/precision.py --model runs/quickstart/checkpoints/step-000050 --out results/precision.json
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ar2diff import __version__
from ar2diff.clock import SystemClock
from ar2diff.engine.ask import Ask
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.native.runner import NativeRunner
from ar2diff.engine.request import Request
from ar2diff.engine.session import Session
from ar2diff.errors import Ar2diffError
from ar2diff.evals.scores import wilson_interval
from ar2diff.models.loading import load_model, save_model
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.table import TASKS
from ar2diff.testing.models import tiny_diffusion, tiny_model

Report = dict[str, Any]
BASELINE = "fp32"
DTYPES = {BASELINE: torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}
MODES: dict[str, Report] = {
    "ar": {"mode": "ar"},
    "diffusion": {"mode": "diffusion", "policy": "threshold", "policy_parameter": 0.9},
}
MAX_MEAN_KL = 0.01
MAX_LOSS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One decoded answer."""

    token_ids: tuple[int, ...]
    is_right: bool


def open_engines(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Engine], dict[str, str]]:
    """An engine for each precision, and why the others are missing."""
    path, engines, absent = options.model or write_tiny(folder / "model"), dict[str, Engine](), dict[str, str]()
    for name, dtype in DTYPES.items():
        config = EngineConfig(
            precision="int8" if name == "int8" else "loaded",
            num_threads=options.threads,
            library_dir=options.library_dir or folder / "library",
        )
        try:
            engines[name] = Engine(load_model(path, dtype=dtype), clock=SystemClock(), config=config)
        except Ar2diffError as error:
            if name == BASELINE:
                raise
            absent[name] = f"ABSENT: {error.one_line()}"
    return engines, absent


def write_tiny(folder: Path) -> Path:
    """A tiny random model with the block size of the recipe."""
    loaded = tiny_model(0, diffusion=tiny_diffusion(block_size=8, trained_block_sizes=(8,)), max_seq_len=4096)
    save_model(folder, loaded, loaded.diffusion)
    return folder


def build_problems(num_structured: int, num_reasoning: int) -> list[Problem]:
    """Held-out problems of both tasks."""
    counts = {"structured": num_structured, "reasoning": num_reasoning}
    return [p for name, count in counts.items() for p in TASKS[name].build_problems(split="eval", count=count)]


def encode(engine: Engine, problem: Problem) -> tuple[int, ...]:
    """A problem's prompt as ids."""
    return tuple(engine.loaded.tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True))


def force(session: Session, answer: Sequence[int]) -> Generator[Ask, Tensor, dict[str, Tensor]]:
    """Logits of a known answer's tokens, by kind of row; as in decoding, a block sees all that is before it.

    `ar` predicts each token from those before it; `masked` predicts each block's masked places in its first pass.
    """
    pending = yield from session.prefill()
    hidden = yield from session.forward(pending)
    session.cache.commit(len(pending))
    last, shift, size = hidden[-1:], int(session.shift_logits), session.block_size
    starts = range(0, len(answer), size)
    mask_id = session.mask_token_id
    blocks = [(start, [*answer[start : start + shift], *[mask_id] * (size - shift)]) for start in starts]
    hidden = yield from session.forward(answer, blocks)
    # A place past the answer's end has no known token; the shifted row of place p is p - 1.
    rows = [
        len(answer) + start + place - shift
        for start in starts
        for place in range(shift, size)
        if start + place < len(answer)
    ]
    chosen = {"ar": torch.cat((last, hidden[: len(answer) - 1])), "masked": hidden[rows]}
    found = {}
    for kind, rows_NE in chosen.items():
        found[kind] = yield from session.logits(rows_NE, range(len(rows_NE)), [()] * len(rows_NE))
    return found


def force_answer(engine: Engine, problem: Problem, max_tokens: int) -> dict[str, Tensor]:
    """`force` for one problem's reference answer and the end of its turn."""
    tokenizer = engine.loaded.tokenizer
    answer = [*tokenizer.encode(problem.reference)[: max_tokens - 1], min(tokenizer.eos_token_ids)]
    # Room for the answer, and as much again and a block for its noisy copies.
    session = engine.open_session(Request(prompt_ids=encode(engine, problem), max_tokens=3 * len(answer), mode="ar"))
    return engine.passes.run_alone(force(session, answer), session.cache)


def compare_rows(wide_NV: Tensor, narrow_NV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(wide || narrow) in nats and whether the argmax is equal, each row; ids that are -inf on both sides add 0."""
    wide, narrow = (logits.double().log_softmax(dim=-1) for logits in (wide_NV, narrow_NV))
    terms = wide.exp() * (wide - narrow).nan_to_num()
    return terms.sum(dim=-1), wide_NV.argmax(dim=-1) == narrow_NV.argmax(dim=-1)


def measure_divergence(engines: dict[str, Engine], problems: list[Problem], max_tokens: int) -> Report:
    """By precision and kind of row."""
    seen: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = {}
    for problem in problems:
        wide = force_answer(engines[BASELINE], problem, max_tokens)
        for name, engine in engines.items():
            if name == BASELINE:
                continue
            for kind, narrow_NV in force_answer(engine, problem, max_tokens).items():
                seen.setdefault((name, kind), []).append(compare_rows(wide[kind], narrow_NV))
    found: Report = {}
    for (name, kind), pairs in seen.items():
        kl_N, equal_N = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        interval = wilson_interval(int(equal_N.sum()), len(equal_N))
        found.setdefault(name, {})[kind] = {
            "mean_kl": round(float(kl_N.mean()), 6),
            "max_kl": round(float(kl_N.max()), 5),
            "equal_argmax": round(float(equal_N.double().mean()), 4),
            "equal_argmax_interval": [round(limit, 4) for limit in interval],
            "num_rows": len(kl_N),
        }
    return found


def decode(engine: Engine, problems: list[Problem], mode: Report, max_tokens: int) -> list[Answered]:
    """All problems together; an answer that is cut off is wrong."""
    requests = [Request(prompt_ids=encode(engine, p), max_tokens=max_tokens, **mode) for p in problems]
    answers = []
    for problem, reply in zip(problems, engine.generate_many(requests), strict=True):
        if not isinstance(reply, Generation):
            raise reply
        is_right = reply.finish_reason == "stop" and TASKS[problem.task].score(problem, reply.text)
        answers.append(Answered(token_ids=reply.token_ids, is_right=is_right))
    return answers


def measure_answers(engines: dict[str, Engine], problems: list[Problem], max_tokens: int) -> Report:
    """By precision and mode: right answers, and pairs with those of fp32."""
    found: Report = {}
    for mode, settings in MODES.items():
        wide: list[Answered] = []
        for name, engine in engines.items():
            start_s = time.perf_counter()
            answers = decode(engine, problems, settings, max_tokens)
            print(f"{name}, {mode}: {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
            wide = wide or answers
            found.setdefault(name, {})[mode] = compare_answers(wide, answers)
    return found


def compare_answers(wide: list[Answered], answers: list[Answered]) -> Report:
    """Exact match of some answers, and against those of fp32 pair by pair."""
    num_right, pairs = sum(a.is_right for a in answers), list(zip(wide, answers, strict=True))
    return {
        "num_problems": len(answers),
        "num_right": num_right,
        "interval": [round(limit, 4) for limit in wilson_interval(num_right, len(answers))],
        "change": round((num_right - sum(a.is_right for a in wide)) / len(answers), 4),
        "only_right_here": sum(b.is_right and not a.is_right for a, b in pairs),
        "only_right_in_fp32": sum(a.is_right and not b.is_right for a, b in pairs),
        "equal_answers": sum(a.token_ids == b.token_ids for a, b in pairs),
    }


def count_bytes(engine: Engine) -> Report:
    """Of the weights: the matrices of a pass, head included, and an embedding table kept beside them."""
    decoder = engine.loaded.decoder
    table = decoder.embedding.weight.nbytes
    if isinstance(engine.runner, NativeRunner):
        return {"weight_bytes": engine.runner.weight_bytes, "embedding_bytes": table}
    total = sum(weight.nbytes for weight in decoder.parameters())
    return (
        {"weight_bytes": total, "embedding_bytes": 0}
        if decoder.config.tied_head
        else {
            "weight_bytes": total - table,
            "embedding_bytes": table,
        }
    )


def list_bars(divergence: Report, answers: Report) -> list[Report]:
    """What is asked of each precision, and whether it holds."""
    rows: list[tuple[str, float, float, str]] = []
    for name, kinds in divergence.items():
        for kind, figures in kinds.items():
            rows.append((f"{name}, {kind} rows: mean KL from fp32, nats", figures["mean_kl"], MAX_MEAN_KL, "lower"))
        for mode, figures in answers[name].items():
            rows.append((f"{name}, {mode}: exact match lost", -figures["change"], MAX_LOSS, "lower"))
    return [
        {"name": name, "value": value, "bar": bar, "better": better, "holds": value <= bar}
        for name, value, bar, better in rows
    ]


def report(options: argparse.Namespace, folder: Path) -> Report:
    """Everything, measured."""
    start_s = time.perf_counter()
    torch.set_num_threads(options.threads)
    engines, absent = open_engines(options, folder)
    with torch.inference_mode():
        problems = build_problems(*options.forced)
        divergence = measure_divergence(engines, problems, options.max_tokens)
    print(f"rows of {len(problems)} answers: {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
    answers = measure_answers(engines, build_problems(*options.decoded), options.max_tokens)
    return {
        "benchmark": "precision",
        "bars": list_bars(divergence, answers),
        "divergence": divergence,
        "answers": answers,
        "bytes": {name: count_bytes(engine) for name, engine in engines.items()},
        "precisions": {name: engine.precision_reason for name, engine in engines.items()} | absent,
        "model": {
            "kind": "converted checkpoint" if options.model else "tiny random model",
            "tensor_root": engines[BASELINE].loaded.tensor_root,
        },
        "settings": {
            "max_tokens": options.max_tokens,
            "diffusion": MODES["diffusion"],
            "forced_problems": dict(zip(("structured", "reasoning"), options.forced, strict=True)),
            "decoded_problems": dict(zip(("structured", "reasoning"), options.decoded, strict=True)),
        },
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": options.threads},
        "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "quick": options.quick,
        "seconds": round(time.perf_counter() - start_s, 1),
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few problems and short answers: under a minute")
    parser.add_argument(
        "--model", type=Path, help="a converted checkpoint's folder; a tiny random model unless given"
    )
    parser.add_argument("--threads", type=int, default=1, help="for every precision")
    parser.add_argument("--library-dir", type=Path, help="where compiled code is kept; temporary unless given")
    parser.add_argument("--out", type=Path, help="also write the document here")
    options = parser.parse_args()
    options.forced, options.decoded = ((2, 1), (2, 1)) if options.quick else ((16, 8), (12, 8))
    options.max_tokens = 24 if options.quick else 96
    with tempfile.TemporaryDirectory() as temporary:
        document = report(options, Path(temporary))
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
