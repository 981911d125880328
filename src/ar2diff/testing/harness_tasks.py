"""Tasks of lm-evaluation-harness in local files, one of each kind: `local_gen`, `local_choice`, `local_text`."""

import json
from pathlib import Path
from typing import Any

_GEN: list[dict[str, Any]] = [
    {"question": f"Say {word}.", "answer": word} for word in ("one", "zwölf", "三", "a b", "five", "six")
]
_CHOICE: list[dict[str, Any]] = [
    {"question": f"Pick {idx}:", "choices": ["alpha", "be", "gamma ray"], "gold": idx % 3} for idx in range(5)
]
_TEXT: list[dict[str, Any]] = [{"text": text} for text in ("Plain words.", "Ünïcode, 三 words", "long " * 140)]
_KINDS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "local_gen": (
        _GEN,
        {
            "output_type": "generate_until",
            "doc_to_text": "Q: {{question}}\nA:",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["Q:", "\n\n"], "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
    "local_choice": (
        _CHOICE,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_target": "gold",
            "doc_to_choice": "{{choices}}",
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
            ],
        },
    ),
    "local_text": (
        _TEXT,
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
                {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
                {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
            ],
        },
    ),
}

TASK_NAMES = tuple(_KINDS)


def write_tasks(folder: Path) -> str:
    """Write the three tasks into a folder; returns its path, for lm-eval's `include_path`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (rows, settings) in _KINDS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(path), "validation": str(path)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "fewshot_split": "validation",
            **settings,
        }
        # JSON is YAML too.
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")
    return str(folder)
