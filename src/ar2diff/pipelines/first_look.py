"""What a model can do before it is trained on, measured on a few held-out problems and kept nowhere.

A run's ledger, its eval.json and so its audit speak of the trained model alone: this is for the eye.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from ar2diff.evals.report import EvalReport
from ar2diff.pipelines.evaluation import evaluate_run
from ar2diff.pipelines.recipe import EvaluationConfig
from ar2diff.pipelines.stages import RunContext
from ar2diff.provenance.ledger import Ledger

# Of the problems that the run will ask in the end; those first asked, so that both can be compared.
SHARE = 3
MINUTES = 1.0


def measure_start(base: Path, start: Path, config: EvaluationConfig, context: RunContext) -> EvalReport:
    """Compare the model at `start` with its base on a third of the config's problems, for a minute at most.

    Nothing of it is written into the run. Bits per token are left out.

    Raises:
        as `evaluate_run`.
    """
    problems = tuple(replace(share, count=-(-share.count // SHARE)) for share in config.problems)
    minutes = min(MINUTES, config.minutes or MINUTES)
    look = replace(config, problems=problems, minutes=minutes, bits_problems=0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with Ledger.open(folder, clock=context.clock, run_id="first-look") as ledger:
            return evaluate_run(base, start, look, replace(context, run_dir=folder, ledger=ledger))
