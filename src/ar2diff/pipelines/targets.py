"""Which export targets a finished training left open, as an event of the ledger: the model card is made from it."""

from pathlib import Path
from typing import Any

from ar2diff.errors import ModelError
from ar2diff.export.matrix import TARGETS, list_closed_reasons
from ar2diff.files import read_json
from ar2diff.models.adapter_file import ADAPTER_CONFIG_NAME
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.families.table import read_decoder_config
from ar2diff.models.loading import DIFFUSION_KEY
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events

TARGETS_EVENT = "export_targets"
NO_ADAPTER = "the model has no mask-gated adapter"


def record_targets(checkpoint: Path, ledger: Ledger) -> None:
    """Append what `describe_targets` finds, unless that is what the ledger says already.

    Raises:
        ModelError: the checkpoint's config.json cannot be read.
    """
    data = describe_targets(checkpoint)
    recorded = find_events(ledger.path.parent / LEDGER_NAME, TARGETS_EVENT)
    if not recorded or recorded[-1].data != data:
        ledger.append(TARGETS_EVENT, data)


def describe_targets(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's open targets, those of them that need `--merge`, and the reasons of the closed ones.

    Raises:
        ModelError: its config.json cannot be read.
    """
    stored = read_json(checkpoint / "config.json", error=ModelError)
    diffusion = DiffusionConfig.from_json(stored.pop(DIFFUSION_KEY))
    config = read_decoder_config(stored)
    has_adapter = (checkpoint / ADAPTER_CONFIG_NAME).is_file()
    reasons = {name: list_closed_reasons(name, config, diffusion) for name in TARGETS}
    if not has_adapter:
        reasons["adapter"].append(NO_ADAPTER)
    opened = [name for name, found in reasons.items() if not found]
    return {
        "checkpoint": checkpoint.name,
        "open": opened,
        "need_merge": [name for name in opened if has_adapter and TARGETS[name].needs_merge],
        "closed": {name: found for name, found in reasons.items() if found},
    }
