"""Which planted copies of evaluation questions are found: `python benchmarks/decontamination.py`; ends in JSON.

Copies of GSM8K test questions are planted as prompts; GSM8K's training rows are the clean text. Counts, no timings,
so a run on a busy machine says the same. `--quick` takes every fourth question and training row.
"""

import argparse
import json
import os
import platform
import random
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from ar2diff import __version__
from ar2diff.data.blocklist import BlocklistItem
from ar2diff.data.decontaminate import STRICT_POLICY, Decontaminator
from ar2diff.data.documents import Document
from ar2diff.data.recipes.chat_jsonl import read_documents
from ar2diff.data.text_batch import TextBatch

BATCH = 2048


def renumber(text: str) -> str:
    """Other numbers in the same places."""
    draw = random.Random(text)
    return re.sub(r"\d+", lambda _: str(draw.randint(1, 9999)), text)


def widen(text: str) -> str:
    """Full-width forms of ASCII."""
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def replace_at_random(text: str, one_in: int) -> str:
    """Each word replaced with a chance of one in `one_in`."""
    draw = random.Random(text)
    return " ".join("qux" if draw.random() < 1 / one_in else word for word in text.split())


def replace_every(text: str, step: int) -> str:
    """The words number `step`, twice that, and so on, replaced."""
    return " ".join("qux" if n % step == step - 1 else word for n, word in enumerate(text.split()))


COPIES: dict[str, tuple[Callable[[str], str], float]] = {
    "verbatim": (str, 1.0),
    "renumbered": (renumber, 0.98),
    "respaced": (lambda text: "  \n".join(text.split()), 1.0),
    "upper_case": (str.upper, 1.0),
    "full_width": (widen, 1.0),
    "numbers_in_latex": (lambda text: re.sub(r"\d+", r"$\\text{ \g<0> }$", text), 1.0),
    "one_word_in_eight_at_random": (lambda text: replace_at_random(text, 8), 0.99),
    "one_word_in_five_at_random": (lambda text: replace_at_random(text, 5), 0.92),
    "every_eighth_word": (lambda text: replace_every(text, 8), 0.99),
    "every_fifth_word": (lambda text: replace_every(text, 5), 0.92),
    "every_fourth_word": (lambda text: replace_every(text, 4), 0.0),
}


def read_rows(path: Path, step: int) -> list[Document]:
    """Every `step`th document of a file."""
    return [row for row in read_documents(path, path.name) if isinstance(row, Document)][::step]


def count_removed(policy: Decontaminator, documents: list[Document]) -> float:
    """The share of the documents that are removed."""
    batches = [TextBatch(documents[start : start + BATCH]) for start in range(0, len(documents), BATCH)]
    return sum(match is not None for batch in batches for match in policy.find_all(batch)) / len(documents)


def plant(question: str, number: int) -> Document:
    """A training document that asks a copy of an evaluation question."""
    prompt = ({"role": "user", "content": question},)
    return Document(id=f"planted-{number}", prompt=prompt, response="fine", source="planted")


def build_bar(name: str, value: float, bar: float, better: str) -> dict[str, object]:
    """One line of the verdict."""
    holds = value >= bar if better == "higher" else value <= bar
    return {"name": name, "value": round(value, 4), "bar": bar, "better": better, "holds": holds}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every fourth question and training row")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="a folder with gsm8k in it")
    arguments = parser.parse_args()
    step = 4 if arguments.quick else 1
    train = read_rows(arguments.data / "gsm8k" / "train.jsonl", step)
    questions = read_rows(arguments.data / "gsm8k" / "test_part1.jsonl", step)
    policy = Decontaminator([BlocklistItem.from_document(row, "gsm8k") for row in questions])
    bars = []
    for name, (copy, bar) in COPIES.items():
        copies = [plant(copy(row.prompt_text), number) for number, row in enumerate(questions)]
        bars.append(build_bar(f"recall_{name}", count_removed(policy, copies), bar, "higher"))
    bars.append(build_bar("clean_rows_removed", count_removed(policy, train), 0.03, "lower"))
    document = {
        "benchmark": "decontamination",
        "policy": STRICT_POLICY,
        "bars": bars,
        "questions": len(questions),
        "clean_rows": len(train),
        "hardware": {"machine": platform.machine(), "num_cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "ar2diff": __version__,
            **{name: version(name) for name in ("numpy", "rapidfuzz")},
        },
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
