"""The micro-batches of one optimizer step, a function of the run's settings and the step's number alone.

The trainer consumes them; an audit makes them again.
"""

from ar2diff.data.stream import RowStream
from ar2diff.train.batch import BatchSettings, TrainingBatch, build_batch, keyed_noise
from ar2diff.train.config import TrainConfig
from ar2diff.train.traces import Traces


def build_step_batches(
    config: TrainConfig,
    stream: RowStream,
    *,
    step: int,
    block_size: int,
    mask_token_id: int,
    end_token_id: int,
    traces: Traces | None = None,
) -> list[TrainingBatch]:
    """The whole global batch of a step, counted from 0: `config.accum` micro-batches of `config.micro` rows.

    Args:
        traces: where the masks come from in place of noise.
    """
    objective = config.objective
    settings = BatchSettings(
        block_size=block_size,
        shift_logits=objective.shift_logits,
        clean_attention=objective.clean_attention,
        mask_token_id=mask_token_id,
        end_token_id=end_token_id,
        nelbo_weighted=objective.nelbo_weighted,
        with_causal=objective.ar_weight > 0,
        anchor=objective.anchor,
    )
    if traces is None:
        draw = keyed_noise(objective.noise, shift_logits=objective.shift_logits, seed=config.seed, step=step)
    else:
        draw = traces.at(num_views=objective.noise.num_views, seed=config.seed, step=step)
    first = step * config.micro * config.accum
    rows = [stream.row(first + idx) for idx in range(config.micro * config.accum)]
    return [build_batch(rows[at : at + config.micro], settings, draw) for at in range(0, len(rows), config.micro)]
