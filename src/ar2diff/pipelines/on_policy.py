"""On-policy rounds: the model decodes, and is then trained on the blocks as its own passes saw them.

Random masks hide any tokens; decoding meets the masks that its policy leaves, beside tokens of its own choice. In a
round the model answers prompts of the prepared data with every pass kept, and at those states it is drawn towards
the frozen base's predictions for the same tokens. A round is resumed whole: a finished one is kept, a cut one redone.
"""

import gc
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ar2diff.data.shards import COMPLETE_NAME, ShardWriter, TokenShard, read_receipt
from ar2diff.data.stream import draw_order
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.loading import load_engine
from ar2diff.engine.request import Request
from ar2diff.errors import DataError
from ar2diff.files import open_whole
from ar2diff.hashing import sha256_file
from ar2diff.pipelines.parent_answers import EngineParent
from ar2diff.pipelines.recipe import OnPolicyConfig, Recipe
from ar2diff.pipelines.stages import DATA_DIR, RunContext, Stop, watch_training
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.seeding import derive_seed
from ar2diff.train.checkpoint import verify_checkpoint
from ar2diff.train.config import TrainConfig
from ar2diff.train.metrics import digest_metrics, read_metrics
from ar2diff.train.traces import NEVER, REVEALS_NAME, Reveals
from ar2diff.train.trainer import TrainResult, train

ROUND_EVENT = "on_policy_round"
ON_POLICY_DIR, STATES_DIR, TRAIN_DIR = "on_policy", "states", "train"
# Prompts that are answered together, where the engine has batches.
PROMPTS_PER_BATCH = 32


def train_on_policy(
    recipe: Recipe, base: Path, checkpoint: Path, context: RunContext, stop_requested: Stop
) -> tuple[Path, bool]:
    """Do the rounds that are not done yet; the last checkpoint, and whether training was stopped early.

    Raises:
        CheckpointError: a finished round's checkpoint is damaged.
        DataError: no prompt of the data leaves room for an answer.
    """
    config = recipe.on_policy
    assert config is not None
    done = find_events(context.run_dir / LEDGER_NAME, ROUND_EVENT)
    for number in range(config.rounds):
        if number < len(done):
            checkpoint = context.run_dir / str(done[number].data["checkpoint"])
            verify_checkpoint(checkpoint)
            continue
        context.view.stage(f"On-policy round {number + 1} of {config.rounds}")
        folder = context.run_dir / ON_POLICY_DIR / f"round-{number:02d}"
        decoded = decode_round(recipe, checkpoint, folder, number, context)
        result = _train_round(recipe, base, checkpoint, folder, number, context, stop_requested)
        if result.interrupted:
            return checkpoint, True
        checkpoint = result.checkpoint
        _record(decoded, folder, result, base, context)
    return checkpoint, False


def decode_round(recipe: Recipe, checkpoint: Path, folder: Path, number: int, context: RunContext) -> dict[str, Any]:
    """Answer the round's prompts with every pass kept; the receipt of the answers' shard. A finished one is kept."""
    states = folder / STATES_DIR
    if (states / COMPLETE_NAME).is_file():
        return read_receipt(states)
    shutil.rmtree(folder, ignore_errors=True)
    config = recipe.on_policy
    assert config is not None
    engine = load_engine(
        checkpoint,
        "auto",
        clock=context.clock,
        library_dir=context.library_dir,
        device=context.device,
        num_threads=torch.get_num_threads(),
    )
    assert engine.loaded.diffusion is not None
    block_size, reveals = engine.loaded.diffusion.block_size, list[Reveals]()
    with ShardWriter(states) as writer:
        for document, request, generation in _decode(engine, config, recipe.train, number, context):
            token_ids = list(generation.token_ids)
            if generation.finish_reason == "stop":
                token_ids.append(engine.loaded.tokenizer.eos_token_ids[0])
            whole = np.array([*request.prompt_ids, *token_ids], dtype=np.uint32)
            writer.add_tokens(f"{number}-{document}", f"{DATA_DIR}#{document}", whole, len(request.prompt_ids))
            reveals.append(read_reveals(generation, num_tokens=len(token_ids), block_size=block_size))
        if not reveals:
            raise DataError("no prompt of the data leaves room for an answer", fix="Raise row_len")
        with open_whole(folder / REVEALS_NAME) as stream:
            np.save(stream, np.concatenate(reveals), allow_pickle=False)
        receipt = {
            "round": number,
            "student_tensor_root": engine.loaded.tensor_root,
            "precision": engine.precision_reason,
            "eos_token_id": engine.loaded.tokenizer.eos_token_ids[0],
            "num_documents": writer.num_documents,
            "num_tokens": writer.num_tokens,
            "num_passes": int(sum(len(np.unique(part[part < NEVER])) for part in reveals)),
            "reveals_sha256": sha256_file(folder / REVEALS_NAME),
            "files": writer.finish_arrays(),
        }
        writer.finish(receipt)
    del engine
    gc.collect()
    return receipt


def read_reveals(generation: Generation, *, num_tokens: int, block_size: int) -> Reveals:
    """The pass that revealed each position of an answer's blocks, int16 (N, S); `NEVER` where none did."""
    num_blocks = -(-num_tokens // block_size)
    reveals = np.full(num_blocks * block_size, NEVER, dtype=np.int16)
    for step in generation.passes:
        for reveal in step.reveals:
            if reveal.position < len(reveals):
                reveals[reveal.position] = min(step.pass_idx, NEVER - 1)
    return reveals.reshape(num_blocks, block_size)


def build_round_config(train: TrainConfig, config: OnPolicyConfig, number: int, block_size: int) -> TrainConfig:
    """The recipe's training with what a round changes."""
    objective = replace(
        train.objective,
        block_sizes=(block_size,),
        nelbo_weighted=False,
        diffusion_weight=config.diffusion_weight,
        distill_weight=config.distill_weight,
        ar_weight=config.ar_weight,
    )
    return replace(
        train,
        objective=objective,
        optim=replace(train.optim, lr=config.lr),
        steps=config.steps,
        minutes=None,
        save_every=None,
        keep_last=1,
        average_last=0,
        seed=derive_seed("on-policy round", train.seed, number) % 2**53,
    )


def _decode(
    engine: Engine, config: OnPolicyConfig, train: TrainConfig, number: int, context: RunContext
) -> Iterator[tuple[int, Request, Generation]]:
    """Document, request and answer, for each prompt whose answer has something to learn from."""
    shard = TokenShard(context.run_dir / DATA_DIR)
    order = draw_order(len(shard), derive_seed("on-policy prompts", train.seed), number)[: config.prompts]
    asked = [
        (int(document), request)
        for document in order
        if (request := _ask(shard, int(document), config, train, number))
    ]
    done = 0
    for at in range(0, len(asked), PROMPTS_PER_BATCH):
        group = asked[at : at + PROMPTS_PER_BATCH]
        answers: Sequence[Generation] = EngineParent(engine).answer([request for _, request in group])
        for (document, request), generation in zip(group, answers, strict=True):
            done += 1
            # A block's first token is given, so an answer of one token shows no state.
            if len(generation.token_ids) > 1:
                yield document, request, generation
        context.view.data("on-policy answers", done, len(asked))


def _ask(shard: TokenShard, document: int, config: OnPolicyConfig, train: TrainConfig, number: int) -> Request | None:
    """The request of one prompt; None where a row has no room for an answer."""
    start, prompt_len = int(shard.document_offsets[document]), int(shard.prompt_lens[document])
    # The end token takes a place of the row too.
    room = train.row_len - prompt_len - 1
    if room < 2:
        return None
    return Request(
        prompt_ids=tuple(shard.token_ids[start : start + prompt_len].tolist()),
        max_tokens=min(config.max_tokens, room),
        policy=config.policy,
        policy_parameter=config.policy_parameter,
        denoising_steps=config.denoising_steps,
        temperature=config.temperature,
        seed=derive_seed("on-policy answer", train.seed, number, document),
        trace=True,
    )


def _train_round(
    recipe: Recipe,
    base: Path,
    checkpoint: Path,
    folder: Path,
    number: int,
    context: RunContext,
    stop_requested: Stop,
) -> TrainResult:
    config = recipe.on_policy
    assert config is not None
    reveals_NS = np.load(folder / REVEALS_NAME, allow_pickle=False, mmap_mode="r")
    # What a cut round left is of no use: its training starts anew.
    shutil.rmtree(folder / TRAIN_DIR, ignore_errors=True)
    with watch_training(context, folder / TRAIN_DIR) as progress:
        return train(
            build_round_config(recipe.train, config, number, int(reveals_NS.shape[1])),
            checkpoint,
            folder / STATES_DIR,
            folder / TRAIN_DIR,
            clock=context.clock,
            progress=progress,
            device=context.device,
            stop_requested=stop_requested,
            traces=folder / REVEALS_NAME,
            teacher=base,
        )


def _record(decoded: dict[str, Any], folder: Path, result: TrainResult, base: Path, context: RunContext) -> None:
    losses = [line["distill_loss"] for line in read_metrics(folder / TRAIN_DIR) if line["distill_loss"] is not None]
    context.ledger.append(
        ROUND_EVENT,
        {
            **decoded,
            "teacher": base.name,
            "steps": result.steps,
            "distill_loss": [losses[0], losses[-1]] if losses else None,
            "metrics_sha256": digest_metrics(folder / TRAIN_DIR),
            "checkpoint": result.checkpoint.relative_to(context.run_dir).as_posix(),
            "tensor_root": result.tensor_root,
        },
    )
