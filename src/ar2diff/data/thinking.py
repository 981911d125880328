"""Thinking sections of a response: what a reasoning model writes before its answer, between two marks."""

from dataclasses import replace

from ar2diff.data.documents import Document, DroppedRow
from ar2diff.tokenizer import Message

# What the open reasoning models and the data sets made from them write.
MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
)


def join_thinking(thinking: str, answer: str) -> str:
    """Both as one response, in the form of the first marks."""
    opening, closing = MARKS[0]
    return f"{opening}\n{thinking.strip()}\n{closing}\n\n{answer}"


def drop_thinking(text: str) -> str | None:
    """`text` without the thinking that it begins with; None where a section never ends.

    A section may lack its opening mark, which many templates write into the prompt. Marks further on are text.
    """
    rest = text
    while (cut := _cut_section(rest)) != rest:
        if cut is None:
            return None
        rest = cut
    return text if rest is text else rest.lstrip()


def _cut_section(text: str) -> str | None:
    for opening, closing in MARKS:
        before, found, after = text.partition(closing)
        if text.lstrip().startswith(opening):
            return after if found else None
        if found and opening not in before:
            return after
    return text


def without_thinking(row: Document | DroppedRow) -> Document | DroppedRow:
    """The document without the thinking of its response and of earlier answers, or the reason why none is left."""
    if isinstance(row, DroppedRow):
        return row
    response = drop_thinking(row.response)
    if response is None or not response.strip():
        reason = "unfinished thinking" if response is None else "nothing but thinking"
        return DroppedRow(id=row.id, source=row.source, reason=reason)
    return replace(row, response=response, prompt=tuple(map(_clean_turn, row.prompt)))


def _clean_turn(turn: Message) -> Message:
    if turn["role"] != "assistant":
        return turn
    return {"role": turn["role"], "content": drop_thinking(turn["content"]) or ""}
