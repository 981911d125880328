"""Watch a converted model denoise one answer, pass by pass, from Python.

Run: python examples/denoise.py runs/quickstart/checkpoints/step-000100 "Write the order as JSON ..."
"""

import sys
from pathlib import Path

from ar2diff.clock import SystemClock
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.models.loading import load_model


def denoise(checkpoint: Path, prompt: str, *, max_tokens: int = 64) -> str:
    """Print every pass of one answer and return its text."""
    engine = Engine(load_model(checkpoint), clock=SystemClock())
    tokenizer = engine.loaded.tokenizer
    prompt_ids = tokenizer.encode_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)
    request = Request(prompt_ids=tuple(prompt_ids), max_tokens=max_tokens, policy="threshold", policy_parameter=0.9)
    for step in engine.stream(request):
        shown = ["_" if token_id is None else tokenizer.decode([token_id]) for token_id in step.token_ids]
        print(f"block {step.block_idx} pass {step.pass_idx}: {''.join(shown)!r}")
        if step.generation is not None:
            return step.generation.text
    raise AssertionError("a stream ends with its answer")


if __name__ == "__main__":
    print(denoise(Path(sys.argv[1]), sys.argv[2]))
