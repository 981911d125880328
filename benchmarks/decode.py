"""Tokens a second of decoding: this engine's modes, transformers, llama.cpp and other projects' block samplers.

Every contestant is a process of its own; they take turns on each prompt, so that a busy moment hits all of them, and
rest while another works. `--run` takes a run folder as `ar2diff quickstart` leaves it: really converted weights and
the parent's GGUF file. Without it a tiny random model goes through the same code. llama.cpp is used where `--llama`
names a folder in which `npm install node-llama-cpp` was run; nothing is downloaded here.

A rate counts the tokens after the first one and the seconds after it; the first token has a figure of its own. Modes
of one engine share its known prefixes, so only the first of them, `ar`, takes in a new prompt. The last line of
standard output is one JSON document.

    python benchmarks/decode.py --run runs/quickstart --llama LLAMA --out benchmarks/results/decode.json
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Reply = dict[str, Any]
Mode = dict[str, Any]
HERE = Path(__file__).parent
ROWS = (1, 4, 8, 16, 32)
STEPS = 4
ENGINE_MODES: dict[str, Mode] = {
    "ar": {"mode": "ar"},
    "verified": {"mode": "verified", "draft_len": 4, "adaptive_draft": True},
    "verified, whole blocks": {"mode": "verified"},
    "diffusion, threshold 0.9": {"mode": "diffusion", "policy": "threshold", "policy_parameter": 0.9},
    f"diffusion, {STEPS} passes": {"mode": "diffusion", "policy": "top_k", "denoising_steps": STEPS},
}
PEERS = {"prefix_again": "dLLM BD3LM", "copied_cache": "SDAR generate", "block_cache": "Fast-dLLM v2"}


class Contestant:
    """A process that answers JSON lines."""

    def __init__(self, command: list[str]) -> None:
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._read()["ready"]

    def ask(self, do: str, **settings: Any) -> Reply:
        """Send one request and wait for its reply."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **settings}) + "\n")
        self._child.stdin.flush()
        return self._read()

    def close(self) -> int:
        """End it; returns its peak memory in bytes."""
        peak: int = self.ask("close")["peak_memory_bytes"]
        self._child.wait(timeout=30)
        return peak

    def _read(self) -> Reply:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"a contestant ended with status {self._child.wait()}: {self._child.args}")
        reply: Reply = json.loads(line)
        return reply


def open_contestants(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Those that can take part, and why the others cannot."""
    model, gguf = find_model(options.run, folder)
    library = str(options.library_dir or folder / "library")
    names = ("engine", "engine_fp32", "transformers")
    sides = {
        name: Contestant(
            [sys.executable, str(HERE / "decode_child.py"), name, str(model), str(options.threads), library]
        )
        for name in names
    }
    if reason := why_no_llama(options.llama, gguf):
        return sides, {"llama.cpp": f"ABSENT: {reason}"}
    command = ["node", str(HERE / "decode_llama.mjs"), str(options.llama.resolve()), str(gguf), str(options.threads)]
    return {**sides, "llama.cpp": Contestant(command)}, {}


def why_no_llama(folder: Path | None, gguf: Path | None) -> str | None:
    """What llama.cpp lacks here, or None."""
    if gguf is None:
        return "no GGUF file of the parent (give --run)"
    if folder is None:
        return "no --llama folder was given"
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        return f"{folder.name} holds no node_modules/node-llama-cpp"
    return None if shutil.which("node") else "node is not installed"


def find_model(run: Path | None, folder: Path) -> tuple[Path, Path | None]:
    """The converted model and the parent's GGUF file; without a run, a tiny random model."""
    if run is not None:
        steps = sorted((run / "checkpoints").glob("step-*"))
        if not steps:
            raise SystemExit(f"{run} holds no checkpoints/step-*: is it a finished run?")
        return steps[-1], next(iter(sorted((run / "base").glob("*.gguf"))), None)
    from ar2diff.models.loading import save_model
    from ar2diff.testing.models import tiny_diffusion, tiny_model

    loaded = tiny_model(0, diffusion=tiny_diffusion(block_size=8, trained_block_sizes=(8,)), max_seq_len=4096)
    save_model(folder / "model", loaded, loaded.diffusion)
    return folder / "model", None


def measure_answers(
    sides: dict[str, Contestant], options: argparse.Namespace, facts: Reply
) -> dict[str, list[Reply]]:
    """Answers by contestant and mode; all of them answer a prompt before the next one comes."""
    answers: dict[str, list[Reply]] = {}
    shared = {"end_ids": facts["end_ids"], "mask_id": facts["mask_id"]}
    peer_mode = {"steps": STEPS, "block_size": facts["block_size"]}
    for idx, prompt in enumerate(facts["prompts"]):
        turns = [("engine", name, mode, options.max_tokens) for name, mode in ENGINE_MODES.items()]
        if idx < options.slow_prompts:
            same = {"mode": "diffusion", "policy": "top_k", "denoising_steps": STEPS}
            turns += [("engine_fp32", "ar", {"mode": "ar"}, options.max_tokens)]
            turns += [("transformers", "generate", {}, options.max_tokens)]
            turns += [("engine_fp32", "diffusion", same, options.peer_tokens)]
            turns += [("engine", "diffusion, as the peers", same, options.peer_tokens)]
            turns += [("transformers", name, {"peer": name, **peer_mode}, options.peer_tokens) for name in PEERS]
        if "llama.cpp" in sides:
            turns.append(("llama.cpp", "ar", {}, options.max_tokens))
        for side, name, mode, max_tokens in turns:
            reply = sides[side].ask("answer", prompt=prompt, max_tokens=max_tokens, mode=mode, **shared)
            answers.setdefault(f"{side}: {name}", []).append(reply)
            print(f"prompt {idx}, {side}: {name}: {len(reply['token_ids'])} tokens", file=sys.stderr)
    return answers


def summarise(answers: list[Reply]) -> Reply:
    """One contestant's figures over all its answers."""
    late = [reply for reply in answers if len(reply["token_ids"]) > 1]
    tokens = sum(len(reply["token_ids"]) - 1 for reply in late)
    seconds = sum(reply["seconds"] - reply["first_s"] for reply in late)
    forwards = sum(reply["num_forwards"] for reply in answers)
    return {
        "tokens_per_s": round(tokens / seconds, 2) if seconds > 0 else 0.0,
        "tokens_per_forward": round(sum(len(reply["token_ids"]) for reply in answers) / max(1, forwards), 3),
        "first_token_s": round(sum(reply["first_s"] for reply in answers) / len(answers), 3),
        "whole_answer_s": round(sum(reply["seconds"] for reply in answers) / len(answers), 3),
        "num_answers": len(answers),
        "num_tokens": sum(len(reply["token_ids"]) for reply in answers),
    }


def score_answers(answers: dict[str, list[Reply]]) -> dict[str, Reply]:
    """Task accuracy of the engine's modes, and how many answers are those of its AR mode."""
    from ar2diff.tasks.structured import build_problems, score

    found: dict[str, Reply] = {}
    ar = answers["engine: ar"]
    problems = build_problems(split="eval", count=len(ar))
    for name in ENGINE_MODES:
        replies = answers[f"engine: {name}"]
        right = [reply["is_whole"] and score(p, reply["text"]) for p, reply in zip(problems, replies, strict=True)]
        equal = [a["token_ids"] == b["token_ids"] for a, b in zip(replies, ar, strict=True)]
        found[name] = {"accuracy": sum(right) / len(right), "equal_to_ar": sum(equal) / len(equal)}
    wide = answers["engine_fp32: ar"]
    same = [a["token_ids"] == b["token_ids"] for a, b in zip(wide, ar, strict=False)]
    found["ar"]["equal_to_fp32"] = sum(same) / len(same)
    return found


def measure_rows(sides: dict[str, Contestant], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds a forward by contestant and row count, contestants in turn."""
    found: dict[str, dict[str, float]] = {name: {} for name in sides}
    for count in ROWS:
        for name, side in sides.items():
            # llama.cpp takes its prompt in anew for each repeat.
            turns = min(repeats, 2) if name == "llama.cpp" else repeats
            reply = side.ask("rows", count=count, cached=256, repeats=turns)
            found[name][str(count)] = round(reply["milliseconds"], 2)
    return found


def measure_batches(engine: Contestant, prompts: list[list[int]], max_tokens: int) -> dict[str, Reply]:
    """Eight requests together against the same ones alone."""
    eight = [prompts[idx % len(prompts)] for idx in range(8)]
    modes = {"ar": ENGINE_MODES["ar"], "diffusion": ENGINE_MODES[f"diffusion, {STEPS} passes"]}
    return {
        name: engine.ask("batch", prompts=eight, mode=mode, max_tokens=max_tokens) for name, mode in modes.items()
    }


def list_bars(document: Reply) -> list[Reply]:
    """What is asked of these numbers, and whether it holds."""
    rate = {name: figures["tokens_per_s"] for name, figures in document["answers"].items()}
    ar, scores = rate["engine: ar"], document["scores"]
    near = {name: rate[f"engine: {name}"] for name in ENGINE_MODES if name.startswith("diffusion")}
    fair = [r for name, r in near.items() if scores[name]["accuracy"] >= scores["ar"]["accuracy"] - 0.01]
    bars = [
        ("diffusion over ar at equal accuracy", max(fair) / ar if fair else 0.0, 2.0, "higher"),
        (
            "verified over ar",
            max(rate["engine: verified"], rate["engine: verified, whole blocks"]) / ar,
            1.5,
            "higher",
        ),
        ("verified answers are the ar answers", scores["verified"]["equal_to_ar"], 1.0, "higher"),
        ("ar over transformers.generate", ar / rate["transformers: generate"], 2.0, "higher"),
    ]
    if "llama.cpp: ar" in rate:
        best = max(near.values())
        bars.append(("diffusion over llama.cpp, any accuracy", best / rate["llama.cpp: ar"], 1.5, "higher"))
        best = max(fair, default=0.0)
        bars.append(("diffusion over llama.cpp, at equal accuracy", best / rate["llama.cpp: ar"], 1.5, "higher"))
    for peer, label in PEERS.items():
        ours = rate["engine_fp32: diffusion"]
        bars.append((f"diffusion in fp32 over {label}", ours / rate[f"transformers: {peer}"], 2.0, "higher"))
        ours = rate["engine: diffusion, as the peers"]
        bars.append((f"diffusion as shipped over {label}", ours / rate[f"transformers: {peer}"], 2.0, "higher"))
    for mode, bar in (("ar", 4.0), ("diffusion", 1.3)):
        if "together" in document["batch_of_8"][mode]:
            together, alone = (document["batch_of_8"][mode][key] for key in ("together", "alone"))
            bars.append((f"batch of 8 over batch of 1, {mode}", together / alone, bar, "higher"))
    prefill = document["prefill"]
    bars.append(("prefill over one plain forward, seconds", prefill["engine_s"] / prefill["plain_s"], 1.2, "lower"))
    return [
        {
            "name": name,
            "value": round(value, 3),
            "bar": bar,
            "better": better,
            "holds": value >= bar if better == "higher" else value <= bar,
        }
        for name, value, bar, better in bars
    ]


def report(options: argparse.Namespace, folder: Path) -> Reply:
    """Everything, measured."""
    start_s = time.perf_counter()
    sides, absent = open_contestants(options, folder)
    facts = sides["engine"].ask("prompts", count=options.prompts)
    for side in sides.values():  # the first pass of a process finds cold memory
        side.ask("rows", count=1, cached=8, repeats=1)
    answers = measure_answers(sides, options, facts)
    document: Reply = {
        "benchmark": "decode",
        "bars": [],
        "answers": {name: summarise(replies) for name, replies in answers.items()},
        "scores": score_answers(answers),
        "milliseconds_by_rows": measure_rows(sides, 2 if options.quick else 5),
        "prefill": sides["engine"].ask("prefill", count=options.prefill),
        "batch_of_8": measure_batches(sides["engine"], facts["prompts"], options.peer_tokens),
        "contestants": {name: side.about for name, side in sides.items()} | absent,
        "model": "converted run" if options.run else "tiny random model",
        "settings": {
            "block_size": facts["block_size"],
            "prompt_tokens": [len(prompt) for prompt in facts["prompts"]],
            **{name: getattr(options, name) for name in ("max_tokens", "peer_tokens", "slow_prompts", "prefill")},
        },
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": options.threads},
        "load_average": round(os.getloadavg()[0], 2),
        "quick": options.quick,
    }
    document["bars"] = list_bars(document)
    document["peak_memory_bytes"] = {name: side.close() for name, side in sides.items()}
    document["versions"] = read_versions()
    document["seconds"] = round(time.perf_counter() - start_s, 1)
    return document


def read_versions() -> dict[str, str]:
    """Of this package and what it runs on."""
    from importlib.metadata import version

    names = ("torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few prompts and repeats: under a minute")
    parser.add_argument("--run", type=Path, help="a finished run folder; a tiny random model unless given")
    parser.add_argument("--llama", type=Path, help="a folder with node_modules/node-llama-cpp")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="for every contestant")
    parser.add_argument("--library-dir", type=Path, help="where compiled code is kept; temporary unless given")
    parser.add_argument("--out", type=Path, help="also write the document here")
    options = parser.parse_args()
    options.prompts, options.slow_prompts = (2, 1) if options.quick else (6, 2)
    options.max_tokens, options.peer_tokens = (24, 16) if options.quick else (96, 24)
    options.prefill = 256 if options.quick else 2048
    with tempfile.TemporaryDirectory() as temporary:
        document = report(options, Path(temporary))
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
