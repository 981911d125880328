"""One prompt in all three modes: the text, the forward passes and the speed of each.

Run: python examples/compare_modes.py runs/quickstart/checkpoints/step-000100 "Write the order as JSON ..."
"""

import sys
from pathlib import Path

from ar2diff.clock import SystemClock
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import MODES, Request
from ar2diff.models.loading import load_model


def compare_modes(checkpoint: Path, prompt: str, *, max_tokens: int = 64) -> dict[str, Generation]:
    """The answer in each mode."""
    engine = Engine(load_model(checkpoint), clock=SystemClock())
    prompt_ids = engine.loaded.tokenizer.encode_chat(
        [{"role": "user", "content": prompt}], add_generation_prompt=True
    )
    return {
        mode: engine.generate(Request(prompt_ids=tuple(prompt_ids), max_tokens=max_tokens, mode=mode))  # type: ignore[arg-type]
        for mode in MODES
    }


if __name__ == "__main__":
    for mode, answer in compare_modes(Path(sys.argv[1]), sys.argv[2]).items():
        speed = len(answer.token_ids) / answer.decode_s
        print(f"{mode:<10} {answer.num_forward_passes:>4} passes {speed:6.1f} tokens/s  {answer.text!r}")
