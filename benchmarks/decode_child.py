"""One contestant of decode.py in a process of its own: JSON lines in, JSON lines out.

python benchmarks/decode_child.py {engine,engine_fp32,transformers} MODEL THREADS LIBRARY_DIR
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ar2diff.attention.kv_cache import KVCache
from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.models.loading import load_model
from ar2diff.tasks.structured import build_problems

Reply = dict[str, Any]


class EngineSide:
    """This project's engine; a mode is a dictionary of `Request` settings."""

    def __init__(self, path: Path, *, precision: str, threads: int, library_dir: Path) -> None:
        torch.set_num_threads(1 if precision == "auto" else threads)
        # Where int8 is impossible, the torch path gets the threads.
        config = EngineConfig(precision=precision, num_threads=threads, library_dir=library_dir)
        self.engine = Engine(load_model(path), clock=SystemClock(), config=config)
        if not self.engine.runner.rows_are_independent:
            torch.set_num_threads(threads)
        self.ready = self.engine.precision_reason

    def prompts(self, ask: Reply) -> Reply:
        """Chat prompts of structured problems as token ids."""
        encode = self.engine.loaded.tokenizer.encode_chat
        problems = build_problems(split="eval", count=ask["count"])
        ids = [list(encode(list(problem.messages), add_generation_prompt=True)) for problem in problems]
        loaded = self.engine.loaded
        assert loaded.diffusion is not None
        return {
            "prompts": ids,
            "block_size": loaded.diffusion.block_size,
            "mask_id": loaded.diffusion.mask_token_id,
            "end_ids": list(loaded.tokenizer.eos_token_ids),
        }

    def answer(self, ask: Reply) -> Reply:
        """One answer; `first_s` is when its first token was settled."""
        request = Request(prompt_ids=tuple(ask["prompt"]), max_tokens=ask["max_tokens"], **ask["mode"])
        start_s, first_s = time.perf_counter(), 0.0
        for step in self.engine.stream(request):
            first_s = first_s or time.perf_counter() - start_s
            generation = step.generation
        assert generation is not None
        return {
            "token_ids": list(generation.token_ids),
            "text": generation.text,
            "is_whole": generation.finish_reason == "stop",
            "seconds": time.perf_counter() - start_s,
            "first_s": first_s,
            "num_forwards": generation.num_forward_passes,
        }

    def rows(self, ask: Reply) -> Reply:
        """Least milliseconds of one pass over some rows, head included for all of them."""
        cache = self._build_cache(ask["cached"] + ask["count"])
        cache.commit(ask["cached"])
        least_s = min(self._forward(cache, torch.arange(ask["count"]) + 65) for _ in range(ask["repeats"]))
        return {"milliseconds": least_s * 1e3}

    def prefill(self, ask: Reply) -> Reply:
        """A prompt's prefill through the engine, and one plain causal forward over the same rows."""
        prompt = tuple(65 + idx % 26 for idx in range(ask["count"]))
        start_s = time.perf_counter()
        self.engine.generate(Request(prompt_ids=prompt, max_tokens=1, mode="ar"))
        engine_s = time.perf_counter() - start_s
        plain_s = self._forward(self._build_cache(len(prompt)), torch.tensor(prompt), last_only=True)
        return {"engine_s": engine_s, "plain_s": plain_s}

    def batch(self, ask: Reply) -> Reply:
        """Tokens a second of requests together and one after another."""
        if not hasattr(self.engine, "generate_many"):
            return {"absent": "this engine answers one request at a time"}
        requests = [Request(prompt_ids=tuple(p), max_tokens=ask["max_tokens"], **ask["mode"]) for p in ask["prompts"]]
        start_s = time.perf_counter()
        together = self.engine.generate_many(requests)
        middle_s = time.perf_counter()
        alone = [self.engine.generate(request) for request in requests]
        end_s = time.perf_counter()
        count = sum(len(answer.token_ids) for answer in alone)
        return {
            "together": sum(len(answer.token_ids) for answer in together) / (middle_s - start_s),
            "alone": count / (end_s - middle_s),
            "equal_share": sum(a.token_ids == b.token_ids for a, b in zip(together, alone, strict=True)) / len(alone),
        }

    def _build_cache(self, capacity: int) -> KVCache:
        runner = self.engine.runner
        runner.reserve(capacity)
        names = ("num_layers", "num_kv_heads", "head_dim", "softmax_scale")
        sizes = {name: getattr(runner.config, name) for name in names}
        return KVCache(**sizes, capacity=capacity, dtype=runner.dtype, device=runner.device)

    def _forward(self, cache: KVCache, ids: torch.Tensor, *, last_only: bool = False) -> float:
        runner, count = self.engine.runner, len(ids)
        positions = torch.arange(cache.length, cache.length + count)
        mask = torch.ones(count, count, dtype=torch.bool).tril()
        start_s = time.perf_counter()
        with torch.inference_mode():
            hidden = runner(ids, positions, cache.attend_with(mask))
            runner.logits(hidden[-1:] if last_only else hidden)
        return time.perf_counter() - start_s


class TransformersSide:
    """`transformers` in fp32: its own generate, and other projects' samplers over its model."""

    def __init__(self, path: Path, *, threads: int) -> None:
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.ready = f"transformers {transformers.__version__}, float32"

    def answer(self, ask: Reply) -> Reply:
        """One answer by `generate`, or by the sampler that the mode names."""
        with torch.inference_mode():
            return self._sample(ask) if "peer" in ask["mode"] else self._generate(ask)

    def rows(self, ask: Reply) -> Reply:
        """Least milliseconds of one pass over some rows, head included for all of them."""
        from transformers import DynamicCache

        cache, least_s = DynamicCache(), 1e9
        with torch.inference_mode():
            self.model(input_ids=torch.full((1, ask["cached"]), 65), cache=cache)
            for _ in range(ask["repeats"]):
                start_s = time.perf_counter()
                self.model(input_ids=torch.full((1, ask["count"]), 66), cache=cache)
                least_s = min(least_s, time.perf_counter() - start_s)
                cache.crop(-ask["count"])
        return {"milliseconds": least_s * 1e3}

    def _generate(self, ask: Reply) -> Reply:
        watch = _Watch(time.perf_counter())
        found = self.model.generate(
            torch.tensor([ask["prompt"]]),
            attention_mask=torch.ones(1, len(ask["prompt"]), dtype=torch.long),
            max_new_tokens=ask["max_tokens"],
            do_sample=False,
            eos_token_id=ask["end_ids"],
            pad_token_id=ask["end_ids"][0],
            streamer=watch,
        )
        seconds = time.perf_counter() - watch.start_s
        ids = [idx for idx in found[0, len(ask["prompt"]) :].tolist() if idx not in ask["end_ids"]]
        return {"token_ids": ids, "seconds": seconds, "first_s": watch.first_s, "num_forwards": watch.count}

    def _sample(self, ask: Reply) -> Reply:
        from decode_peers import PEERS, Sampled, Setting

        mode = dict(ask["mode"])
        sampler = PEERS[mode.pop("peer")]
        setting = Setting(
            model=self.model,
            mask_id=ask["mask_id"],
            end_ids=frozenset(ask["end_ids"]),
            max_tokens=ask["max_tokens"],
            **mode,
        )
        out = sampler(setting, ask["prompt"], Sampled())
        seconds = time.perf_counter() - out.start_s
        return {
            "token_ids": out.token_ids,
            "seconds": seconds,
            "first_s": out.first_s,
            "num_forwards": out.num_forwards,
        }


class _Watch:
    """A streamer that keeps the first token's time and counts."""

    def __init__(self, start_s: float) -> None:
        self.start_s, self.first_s, self.count = start_s, 0.0, -1  # the prompt comes first

    def put(self, value: object) -> None:
        """One more token."""
        del value
        self.count += 1
        if self.count == 1:
            self.first_s = time.perf_counter() - self.start_s

    def end(self) -> None:
        """Nothing to do."""


def main() -> None:
    """Answer lines until "close"."""
    name, path, threads, library_dir = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    if name == "transformers":
        side: Any = TransformersSide(path, threads=threads)
    else:
        precision = "loaded" if name == "engine_fp32" else "auto"
        side = EngineSide(path, precision=precision, threads=threads, library_dir=library_dir)
    print(json.dumps({"ready": side.ready}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["do"] == "close":
            break
        print(json.dumps(getattr(side, ask["do"])(ask)), flush=True)
    print(json.dumps({"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


if __name__ == "__main__":
    main()
