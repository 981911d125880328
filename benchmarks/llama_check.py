"""Does llama.cpp give our ids? Greedy AR answers, and block diffusion by the loop of examples/llama_cpp_blocks.py.

A run (`--run`, as `ar2diff quickstart` leaves it) gives its newest checkpoint. As an f32 GGUF file it answers chat
prompts of structured problems, in the engine at fp32 and in llama.cpp; then it is written in every other kind, which
llama.cpp must load and answer with. Without a run, a tiny random Llama goes through the same code. Where an AR answer
parts from ours, the document holds the gap between our logits of the two tokens. Progress goes to standard error; the
last line of standard output is one JSON document.

    make llama-check ARGS="--run runs/quickstart --out benchmarks/results/llama.json"
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from ar2diff.attention.ops import causal_attend
from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.export.export import ExportOptions, export_model
from ar2diff.export.gguf import FILE_NAME, KINDS
from ar2diff.models.gguf_tokenizer import PRE_TOKENIZERS
from ar2diff.models.loading import LoadedModel, load_model, save_model
from ar2diff.tasks.structured import build_problems
from ar2diff.testing.models import tiny_diffusion, tiny_model
from ar2diff.tokenizer import Tokenizer

Reply = dict[str, Any]
EXAMPLE = Path(__file__).parents[1] / "examples" / "llama_cpp_blocks.py"
STEPS = (1, 4)


def build_decoder(path: Path, threads: int) -> Any:
    """The example's decoder over a file."""
    spec = importlib.util.spec_from_file_location("llama_cpp_blocks", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BlockDecoder(path, threads=threads)


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def build_tiny() -> LoadedModel:
    """A random Llama whose tokenizer llama.cpp takes: with a merge, and a splitting rule that has a name there."""
    model = tiny_model(0, diffusion=tiny_diffusion(), max_seq_len=1024)
    stored = json.loads(model.tokenizer.to_json())
    vocabulary = stored["model"]["vocab"] | {token["content"]: token["id"] for token in stored["added_tokens"]}
    first, second = list(stored["model"]["vocab"])[:2]
    # The merged token takes the place of the last byte, which no prompt here has.
    vocabulary = {text: idx for text, idx in vocabulary.items() if idx != 255} | {first + second: 255}
    backend = Backend(BPE(vocab=vocabulary, merges=[(first, second)]))
    backend.pre_tokenizer = PRE_TOKENIZERS["smollm"]()
    backend.decoder = Backend.from_str(model.tokenizer.to_json()).decoder
    backend.add_special_tokens([token["content"] for token in stored["added_tokens"]])
    tokenizer = Tokenizer(
        backend,
        eos_token_ids=list(model.tokenizer.eos_token_ids),
        chat_template=model.tokenizer.chat_template,
        config={"eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
    )
    return replace(model, tokenizer=tokenizer)


def compare(
    name: str,
    prompts: Sequence[tuple[int, ...]],
    ours: Callable[[tuple[int, ...]], list[int]],
    theirs: Callable[[tuple[int, ...]], list[int]],
    loaded: LoadedModel | None,
) -> Reply:
    """How many answers are equal, and where the others part; with a model, how level the two tokens were."""
    parted, spent_s = [], {"ar2diff": 0.0, "llama.cpp": 0.0}
    for number, prompt in enumerate(prompts):
        start_s = time.perf_counter()
        mine = ours(prompt)
        middle_s = time.perf_counter()
        other = theirs(prompt)
        spent_s["ar2diff"] += middle_s - start_s
        spent_s["llama.cpp"] += time.perf_counter() - middle_s
        say(f"{name}: prompt {number + 1} of {len(prompts)}, {'equal' if mine == other else 'other ids'}")
        if mine == other:
            continue
        pairs = list(zip(mine, other, strict=False))
        at = next((idx for idx, (a, b) in enumerate(pairs) if a != b), len(pairs))
        gap = None if loaded is None or at == len(pairs) else read_gap(loaded, (*prompt, *mine[:at]), pairs[at])
        parted.append({"prompt": number, "at": at, "logit_gap": gap})
    seconds = {side: round(spent, 1) for side, spent in spent_s.items()}
    return {"prompts": len(prompts), "equal": len(prompts) - len(parted), "parted": parted, "seconds": seconds}


def read_gap(loaded: LoadedModel, ids: tuple[int, ...], pair: tuple[int, int]) -> float:
    """By how much our logits prefer the first token of a pair after `ids`."""
    with torch.inference_mode():
        attend = causal_attend(loaded.config.softmax_scale)
        hidden = loaded.decoder(torch.tensor([ids]), torch.arange(len(ids))[None], attend)
        logits_V = loaded.decoder.logits(hidden[:, -1])[0]
    return float(logits_V[pair[0]] - logits_V[pair[1]])


def check_model(loaded: LoadedModel, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Reply]:
    """The comparisons of the f32 file, by mode."""
    say("writing f32")
    export_model(model, "gguf", folder / "f32", ExportOptions(quantisation="f32"))
    engine = Engine(loaded, clock=SystemClock(), config=EngineConfig(precision="loaded", num_threads=options.threads))
    decoder = build_decoder(folder / "f32" / FILE_NAME, options.threads)
    prompts = build_prompts(loaded, options.prompts)

    def ask(prompt: tuple[int, ...], **settings: Any) -> list[int]:
        return list(engine.generate(Request(prompt_ids=prompt, max_tokens=options.max_tokens, **settings)).token_ids)

    said = {
        "ar": compare(
            "ar",
            prompts,
            lambda prompt: ask(prompt, mode="ar"),
            lambda prompt: decoder.decode_tokens(prompt, options.max_tokens),
            loaded,
        )
    }
    for steps in STEPS:
        name = f"diffusion, {steps} passes a block"
        said[name] = compare(
            name,
            prompts,
            lambda prompt, steps=steps: ask(prompt, policy="top_k", denoising_steps=steps),
            lambda prompt, steps=steps: decoder.decode_blocks(prompt, options.max_tokens, steps),
            None,
        )
    return said


def check_kinds(loaded: LoadedModel, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Reply]:
    """Every kind of file: whether llama.cpp loads it, and how much of a short AR answer is that of the f32 file."""
    (prompt,) = build_prompts(loaded, 1)
    wanted: list[int] = []
    said: dict[str, Reply] = {}
    for kind in KINDS:
        say(f"loading {kind}")
        path = folder / kind / FILE_NAME
        if not path.exists():
            export_model(model, "gguf", folder / kind, ExportOptions(quantisation=kind))
        answer = build_decoder(path, options.threads).decode_tokens(prompt, options.max_tokens)
        wanted = wanted or answer
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, wanted, strict=False)))
        said[kind] = {"bytes": path.stat().st_size, "tokens": len(answer), "same_as_f32": same}
        path.unlink()
    return said


def build_prompts(loaded: LoadedModel, count: int) -> list[tuple[int, ...]]:
    """Chat prompts of held-out problems."""
    return [
        tuple(loaded.tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True))
        for problem in build_problems(split="eval", count=count)
    ]


def report(options: argparse.Namespace) -> Reply:
    """Everything, compared."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.run is None:
            loaded, model = build_tiny(), folder / "model"
            save_model(model, loaded, loaded.diffusion)
        else:
            model = sorted((options.run / "checkpoints").glob("step-*"))[-1]
            loaded = load_model(model)
        modes = check_model(loaded, model, folder, options)
        kinds = check_kinds(loaded, model, folder, options)
    bars = [(f"{mode}: equal answers", said["equal"] / said["prompts"]) for mode, said in modes.items()]
    bars += [(f"{kind} loads and answers", float(said["tokens"] > 0)) for kind, said in kinds.items()]
    return {
        "benchmark": "llama_check",
        "model": {name: getattr(loaded.config, name) for name in ("model_type", "num_layers", "hidden_size")},
        "bars": [
            {"name": name, "value": value, "bar": 1.0, "better": "higher", "holds": value >= 1.0}
            for name, value in bars
        ],
        "modes": modes,
        "kinds": kinds,
        "settings": {"max_tokens": options.max_tokens, "precision": "f32 weights, f32 cache, no flash attention"},
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": options.threads},
        "versions": {"python": platform.python_version(), "torch": version("torch"), "cyllama": version("cyllama")},
        "quick": options.quick,
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, short answers: under a minute")
    parser.add_argument("--run", type=Path, help="a finished run folder; a tiny random model unless given")
    parser.add_argument("--threads", type=int, default=1, help="for both sides")
    parser.add_argument("--out", type=Path, help="also write the document here")
    options = parser.parse_args()
    options.prompts, options.max_tokens = (4, 8) if options.quick else (20, 12)
    document = report(options)
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
