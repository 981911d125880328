"""`ar2diff generate`: one answer to one prompt, by diffusion, verified, or token by token."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ar2diff.engine.engine import Engine
    from ar2diff.engine.generation import Generation
    from ar2diff.tokenizer import Message

Precision = Literal["fp32", "bf16", "int8", "auto"]


def generate(
    model: Path,
    *,
    prompt: str,
    mode: Literal["diffusion", "verified", "ar"] = "diffusion",
    steps: int | None = None,
    policy: str = "threshold",
    threshold: float | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    block_size: int | None = None,
    draft_lanes: int = 0,
    copies: bool = True,
    raw: bool = False,
    precision: Precision = "auto",
    json: bool = False,
) -> None:
    """Answer one prompt, and on a terminal show how it is denoised.

    Args:
        model: folder of a model, or a .gguf file.
        prompt: what to answer; put into the model's chat template unless --raw.
        mode: diffusion; verified, which gives the AR answer in fewer passes; or ar, one token at a time.
        steps: denoising passes a block at most; in verified mode, drafting passes.
        policy: what a pass reveals: top_k, threshold, factor, entropy or left_to_right.
        threshold: the policy's number: a confidence, factor or entropy bound.
        max_tokens: length of the answer at most.
        temperature: 0 is greedy.
        top_p: nucleus of sampling.
        seed: of sampling.
        stop: a text that ends the answer; may be repeated.
        block_size: one of the trained sizes, in place of the checkpoint's own.
        draft_lanes: verified mode: acceptance lengths whose next draft rides along with verification.
        copies: verified mode: draft what followed the same words before, where that promises more than the model's
            own draft. At temperature 0 the answer is the same without.
        raw: take the prompt as plain text, without the chat template.
        precision: fp32 and bf16 run in torch; int8 runs code that is compiled for this machine on first use; auto is
            int8 where that is possible, else fp32.
        json: print one JSON object instead of text.
    """
    from rich.console import Console

    from ar2diff.cli.denoise_view import describe_speed, show_steps
    from ar2diff.engine.request import Request

    engine = load_engine(model, precision)
    tokenizer = engine.loaded.tokenizer
    chat: list[Message] = [{"role": "user", "content": prompt}]
    ids = tokenizer.encode(prompt) if raw else tokenizer.encode_chat(chat, add_generation_prompt=True)
    request = Request(
        prompt_ids=tuple(ids),
        max_tokens=max_tokens,
        mode=mode,
        denoising_steps=steps,
        policy=policy,
        policy_parameter=threshold,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
        block_size=block_size,
        draft_lanes=draft_lanes,
        draft_len="auto",
        copy_drafts=copies,
    )
    if json:
        print(as_json_line(engine.generate(request)))
        return
    generation = show_steps(Console(), tokenizer, engine.stream(request))
    Console(stderr=True).print(describe_speed(generation), highlight=False)


def load_engine(model: Path, precision: Precision) -> "Engine":
    """The engine of a model folder or file; a training checkpoint is checked against its digests first."""
    import torch

    from ar2diff.cli.allocator import keep_freed_memory
    from ar2diff.cli.fetch import default_library_dir
    from ar2diff.clock import SystemClock
    from ar2diff.engine.loading import load_engine as load
    from ar2diff.train.checkpoint import OPTIMIZER_NAME, is_checkpoint, verify_checkpoint

    if is_checkpoint(model):
        verify_checkpoint(model, skip=(OPTIMIZER_NAME,))
    keep_freed_memory()
    engine = load(
        model,
        precision,
        clock=SystemClock(),
        library_dir=default_library_dir(),
        num_threads=torch.get_num_threads(),
    )
    if engine.runner.rows_are_independent:
        # The compiled pass has threads of its own; torch's would spin between passes on the same cores.
        torch.set_num_threads(1)
    return engine


def as_json_line(generation: "Generation") -> str:
    """The answer and its cost as one line of JSON."""
    import json as json_text
    from dataclasses import asdict

    content = asdict(generation)
    del content["passes"]
    content["tokens_per_forward"] = generation.tokens_per_forward
    return json_text.dumps(content, ensure_ascii=False)
