"""The digest of a training step's inputs and targets, made again from the shard, the order and the noise key."""

from pathlib import Path
from typing import Any

import pydantic

from ar2diff.data.stream import RowStream
from ar2diff.hashing import sha256_json
from ar2diff.tokenizer import Tokenizer
from ar2diff.train.config import TrainConfig
from ar2diff.train.step_batches import build_step_batches


class StepDigests:
    """Steps of one training.

    Args:
        config: as `train_started` holds it.
        checkpoint: a folder with the run's tokenizer.
    """

    def __init__(self, config: dict[str, Any], stream: RowStream, checkpoint: Path, *, mask_token_id: int) -> None:
        self._config = pydantic.TypeAdapter(TrainConfig).validate_python(config)
        self._stream, self._mask_token_id = stream, mask_token_id
        self._end_token_id = Tokenizer.from_folder(checkpoint).eos_token_ids[0]

    def differs(self, step: int, lines: list[dict[str, Any]]) -> bool:
        """Whether the log's line of `step` (from 0), the last of `lines`, is not what the step must have consumed."""
        config, line = self._config, lines[-1]
        block_size = config.objective.block_size_at(step, self._progress(step, lines), seed=config.seed)
        if line.get("block_size") != block_size:
            return True
        return bool(line.get("batch_sha256") != self._digest(step, block_size))

    def _progress(self, step: int, lines: list[dict[str, Any]]) -> float:
        if self._config.steps is not None:
            return step / self._config.steps
        elapsed_s = float(lines[-2]["elapsed_s"]) if len(lines) > 1 else 0.0
        return min(elapsed_s / ((self._config.minutes or 1.0) * 60), 1.0)

    def _digest(self, step: int, block_size: int) -> str:
        batches = build_step_batches(
            self._config,
            self._stream,
            step=step,
            block_size=block_size,
            mask_token_id=self._mask_token_id,
            end_token_id=self._end_token_id,
        )
        return sha256_json([batch.digest() for batch in batches])
