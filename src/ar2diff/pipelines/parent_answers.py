"""Answers by the autoregressive parent to the prompts of a source: what `parent:` data is made from.

A folder of answers holds `answers-NNNNNN.jsonl`, a fixed number of rows each, and `receipt.json`, written last. Every
answer has a seed of its own, and requests go to the model in the fixed groups of one file, so a run that was killed
goes on from its finished files and ends with the same bytes.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ar2diff import __version__
from ar2diff.data.config import SourceShare
from ar2diff.data.documents import Document
from ar2diff.data.locate import describe_files, locate_share, read_source
from ar2diff.data.pipeline import fingerprint_tokenizer
from ar2diff.data.receipt import SourceCount
from ar2diff.data.recipes.parent import RECEIPT_NAME, describe_share
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError, DataError, RequestError
from ar2diff.files import read_json, write_json, write_text
from ar2diff.hashing import sha256_json
from ar2diff.provenance.ledger import Ledger, find_events
from ar2diff.seeding import derive_seed
from ar2diff.tokenizer import Message, Tokenizer

ANSWERS_EVENT = "parent_answers"
REQUEST_NAME = "request.json"
ROWS_PER_FILE = 32
# A self-written prompt is drawn from the whole distribution: a greedy one would be the same each time.
PROMPT_TEMPERATURE, PROMPT_TOP_P = 1.0, 0.95
_MARK = "\ue0f2"

Progress = Callable[[str, int, int | None], None]


class Parent(Protocol):
    """Who answers: many requests in, their answers out, in order."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the prompts and answers."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Of prompt and answer together."""
        ...

    def describe(self) -> dict[str, Any]:
        """Tensor root and precision: what decides the answers beside the requests."""
        ...

    def answer(self, requests: Sequence[Request]) -> Sequence[Generation]:
        """The answers.

        Raises:
            RequestError: a request cannot be served; nothing was computed.
        """
        ...


class EngineParent:
    """The model of an engine, in AR mode."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Parent`."""
        return self._engine.loaded.tokenizer

    @property
    def max_seq_len(self) -> int:
        """See `Parent`."""
        return self._engine.loaded.config.max_seq_len

    def describe(self) -> dict[str, Any]:
        """See `Parent`."""
        loaded = self._engine.loaded
        return {"tensor_root": loaded.tensor_root, "precision": self._engine.precision_reason}

    def answer(self, requests: Sequence[Request]) -> list[Generation]:
        """Together, in batches of the engine's; the same requests give the same answers."""
        for request in requests:
            self._engine.check(request)
        answers = []
        for answer in self._engine.generate_many(requests):
            if isinstance(answer, Ar2diffError):
                raise answer
            answers.append(answer)
        return answers


def answer_prompts(
    share: SourceShare,
    parent: Parent,
    out_dir: Path,
    *,
    fetched: Mapping[str, Path],
    ledger: Ledger | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make `out_dir`, a finished folder of answers, and record it in the ledger; returns its receipt.

    A finished folder of the same request is kept; an unfinished one goes on from its finished files.

    Args:
        share: a `parent:` source.
        fetched: the folder of each downloaded source of prompts, by its text.

    Raises:
        DataError: the folder holds something else, or files that were changed; or a file of prompts is broken.
        GenerationError: the model's logits are not finite.
    """
    run = _Run(share, parent, out_dir, fetched, progress)
    receipt = run.enter()
    if receipt is None:
        receipt = run.finish()
    if ledger is not None:
        known = {event.data["digest"] for event in find_events(ledger.path, ANSWERS_EVENT)}
        if receipt["digest"] not in known:
            ledger.append(ANSWERS_EVENT, {**receipt, "folder": out_dir.name})
    return receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """One prompt: its turns, None where the parent writes them; or why it cannot be answered."""

    id: str
    messages: tuple[Message, ...]
    source: str
    task: str = ""
    passage: str = ""
    fault: str = ""


class _Run:
    def __init__(
        self,
        share: SourceShare,
        parent: Parent,
        out_dir: Path,
        fetched: Mapping[str, Path],
        progress: Progress | None,
    ) -> None:
        self._share, self._parent, self._out_dir = share, parent, out_dir
        self._progress = progress
        self._files = [] if share.is_self_prompted else locate_share(share.prompts, fetched)
        self._dropped: Counter[str] = Counter()

    def enter(self) -> dict[str, Any] | None:
        """Take the folder for this request; the receipt of a finished one."""
        asked = self._describe()
        stored = self._out_dir / REQUEST_NAME
        if stored.is_file():
            if read_json(stored, error=DataError) != asked:
                fix = "Choose another folder, or remove this one"
                raise DataError("the folder holds answers of another request", given=str(self._out_dir), fix=fix)
        elif self._out_dir.exists() and any(self._out_dir.iterdir()):
            raise DataError("the folder holds something else", given=str(self._out_dir), fix="Choose another folder")
        else:
            write_json(stored, asked)
        return self._read_finished()

    def _read_finished(self) -> dict[str, Any] | None:
        if not (self._out_dir / RECEIPT_NAME).is_file():
            return None
        receipt: dict[str, Any] = read_json(self._out_dir / RECEIPT_NAME, error=DataError)
        if receipt.get("files") != describe_files(self._answer_files()):
            fix = "Restore the files, or remove the folder to answer again"
            raise DataError("the answers were changed after they were written", given=str(self._out_dir), fix=fix)
        return receipt

    def _describe(self) -> dict[str, Any]:
        """All that decides the answers."""
        prompts = {} if self._share.is_self_prompted else SourceCount(self._share.prompts, self._files).describe()
        return {
            **describe_share(self._share),
            "prompts": prompts,
            "model": self._parent.describe(),
            "tokenizer": fingerprint_tokenizer(self._parent.tokenizer),
            "ar2diff": __version__,
        }

    def finish(self) -> dict[str, Any]:
        """Answer what is not answered yet, and write the receipt."""
        done = 0
        for number, prompts in enumerate(self._groups()):
            path = self._out_dir / f"answers-{number:06d}.jsonl"
            if not path.is_file():
                rows = self._answer(prompts)
                write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            done += len(prompts)
            if self._progress is not None:
                self._progress(self._share.source, done, self._share.count)
        if not done:
            raise DataError("there are no prompts to answer", given=self._share.source, fix="Check source and start")
        receipt = self._build_receipt()
        write_json(self._out_dir / RECEIPT_NAME, receipt)
        return receipt

    def _groups(self) -> Iterator[list[tuple[int, _Prompt]]]:
        numbered = enumerate(islice(self._prompts(), self._share.count), start=self._share.start)
        while group := list(islice(numbered, ROWS_PER_FILE)):
            yield group

    def _prompts(self) -> Iterator[_Prompt]:
        if self._share.is_self_prompted:
            number = self._share.start
            while True:
                yield _Prompt(id=f"self-{number}", messages=(), source=self._share.source)
                number += 1
        rows = read_source(self._share.prompts, self._files)
        documents = (row for row in rows if self._is_document(row))
        # A generator starts where it is told to; of files the first prompts are left out here.
        skipped = 0 if self._share.prompts.is_procedural else self._share.start
        for document in islice(documents, skipped, None):
            assert isinstance(document, Document)
            yield _Prompt(
                id=document.id,
                messages=document.prompt,
                source=document.source,
                task=document.task,
                passage=document.passage,
            )

    def _is_document(self, row: object) -> bool:
        if not isinstance(row, Document):
            self._dropped[getattr(row, "reason", "")] += 1
        return isinstance(row, Document)

    def _answer(self, numbered: list[tuple[int, _Prompt]]) -> list[dict[str, Any]]:
        if self._share.is_self_prompted:
            numbered = self._write_prompts(numbered)
        asked = {
            number: request
            for number, prompt in numbered
            if not prompt.fault and (request := self._build_request(number, prompt)) is not None
        }
        answers = dict(zip(asked, self._parent.answer(list(asked.values())), strict=True))
        return [_describe_answer(prompt, answers.get(number)) for number, prompt in numbered]

    def _build_request(self, number: int, prompt: _Prompt) -> Request | None:
        """None where the template refuses the turns, or they leave no room for an answer."""
        share = self._share
        try:
            ids = self._parent.tokenizer.encode_chat(list(prompt.messages), add_generation_prompt=True)
        except RequestError:
            return None
        if len(ids) >= self._parent.max_seq_len:
            return None
        return Request(
            prompt_ids=tuple(ids),
            max_tokens=share.max_tokens,
            mode="ar",
            temperature=share.temperature,
            top_p=share.top_p,
            seed=derive_seed("parent answer", share.seed, number),
        )

    def _write_prompts(self, numbered: list[tuple[int, _Prompt]]) -> list[tuple[int, _Prompt]]:
        """The parent goes on from an opened user turn (Xu et al., 2024: Magpie)."""
        opening = tuple(self._parent.tokenizer.encode(open_user_turn(self._parent.tokenizer), parse_special=True))
        requests = [
            Request(
                prompt_ids=opening,
                max_tokens=self._share.max_tokens,
                mode="ar",
                temperature=PROMPT_TEMPERATURE,
                top_p=PROMPT_TOP_P,
                seed=derive_seed("parent prompt", self._share.seed, number),
            )
            for number, _ in numbered
        ]
        written = self._parent.answer(requests)
        return [
            (number, _with_text(prompt, generation))
            for (number, prompt), generation in zip(numbered, written, strict=True)
        ]

    def _answer_files(self) -> list[Path]:
        return sorted(self._out_dir.glob("answers-*.jsonl"))

    def _build_receipt(self) -> dict[str, Any]:
        files = self._answer_files()
        described = describe_files(files)
        reasons: Counter[str] = Counter()
        for path in files:
            # Not splitlines, which also cuts at characters that an answer may hold.
            lines = path.read_text(encoding="utf-8").split("\n")
            reasons.update(json.loads(line)["finish_reason"] for line in lines if line)
        return {
            "source": self._share.source,
            "request": self._describe(),
            "rows": sum(reasons.values()),
            "finish_reasons": dict(sorted(reasons.items())),
            "prompts_dropped": dict(sorted(self._dropped.items())),
            "files": described,
            "digest": sha256_json(described),
        }


def open_user_turn(tokenizer: Tokenizer) -> str:
    """The conversation's text up to where the user's first word goes.

    Raises:
        RequestError: there is no chat template, or it does not write the user's words as they are.
    """
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    before, mark, _ = text.partition(_MARK)
    if not mark or not before:
        raise RequestError("the chat template opens no user turn", fix="Name a source of prompts")
    return before


def _with_text(prompt: _Prompt, generation: Generation) -> _Prompt:
    text = generation.text.strip()
    fault = "prompt_length" if generation.finish_reason == "length" else "" if text else "prompt_empty"
    messages: tuple[Message, ...] = ({"role": "user", "content": text},)
    return _Prompt(id=prompt.id, messages=messages, source=prompt.source, fault=fault)


def _describe_answer(prompt: _Prompt, generation: Generation | None) -> dict[str, Any]:
    row: dict[str, Any] = {"id": prompt.id, "prompt": list(prompt.messages)}
    row["response"] = "" if generation is None else generation.text
    row["finish_reason"] = prompt.fault or ("prompt_refused" if generation is None else generation.finish_reason)
    row |= {"num_tokens": 0 if generation is None else len(generation.token_ids), "source": prompt.source}
    return row | {name: value for name in ("task", "passage") if (value := getattr(prompt, name))}
