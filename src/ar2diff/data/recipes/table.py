"""All recipes for files by name: what a row of that data set becomes."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes import chat_jsonl, gsm8k, medmcqa, openr1_math, parent, taco

Recipe = Callable[[Path, str], Iterator[Document | DroppedRow]]

RECIPES: dict[str, Recipe] = {
    "chat_jsonl": chat_jsonl.read_documents,
    "openr1_math": openr1_math.read_documents,
    "taco": taco.read_documents,
    "medmcqa": medmcqa.read_documents,
    "gsm8k": gsm8k.read_documents,
    "gsm8k_marks": gsm8k.read_marked,
    "parent": parent.read_documents,
}
