"""How fast and how large `prepare` is: `python benchmarks/prepare.py [--quick]`; the last line printed is JSON.

The text is GSM8K's training rows where `--data` has them (else generated problems), repeated with other words of the
same length each time, so that sizes and word frequencies stay and no two documents are alike. The tokenizer is a
byte-level BPE trained on the same text. End-to-end speed is wall time with two workers; the stages are processor time
of one core.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ar2diff import __version__
from ar2diff.data.blocklist import BlocklistItem
from ar2diff.data.config import DataConfig, SourceShare
from ar2diff.data.decontaminate import Decontaminator
from ar2diff.data.documents import Document
from ar2diff.data.near_duplicates import sign_texts
from ar2diff.data.normalize import split_words
from ar2diff.data.packing import pack_documents
from ar2diff.data.pipeline import prepare
from ar2diff.data.recipes.chat_jsonl import read_documents
from ar2diff.data.shards import TokenShard
from ar2diff.data.text_batch import TextBatch
from ar2diff.tasks import structured
from ar2diff.tokenizer import Tokenizer

BATCH = 2048
ROW_LENS = (1024, 2048, 4096)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Pair = tuple[str, str]


def load_pairs(data: Path) -> tuple[list[Pair], list[Pair]]:
    """Training pairs and held-out pairs."""
    folder = data / "gsm8k"
    if folder.is_dir():
        texts = [(folder / name).read_text().splitlines() for name in ("train.jsonl", "test_part1.jsonl")]
        train, held_out = [[(r["question"], r["answer"]) for r in map(json.loads, lines)] for lines in texts]
        return train, held_out
    splits = [structured.build_problems(split=split, count=n) for split, n in (("train", 4000), ("eval", 600))]
    train, held_out = [[(p.prompt_text, p.reference) for p in problems] for problems in splits]
    return train, held_out


def vary_pairs(pairs: list[Pair]) -> Iterator[Pair]:
    """The pairs, then again and again with each word replaced by another one of its length and kind."""
    yield from pairs
    kinds: dict[tuple[int, bool], list[str]] = defaultdict(list)
    for word in sorted({word for pair in pairs for text in pair for word in text.split(" ")}):
        kinds[len(word), word.isalpha()].append(word)
    for repetition in range(1, 10_000):
        draw = random.Random(repetition)
        other = {a: b for words in kinds.values() for a, b in zip(words, draw.sample(words, len(words)), strict=True)}
        for question, answer in pairs:
            yield (
                " ".join(other[word] for word in question.split(" ")),
                " ".join(other[word] for word in answer.split(" ")),
            )


def write_rows(path: Path, pairs: Iterator[Pair], num_bytes: int) -> int:
    """Write at least `num_bytes` of rows; how many rows."""
    rows = written = 0
    with path.open("w", encoding="utf-8") as stream:
        while written < num_bytes:
            question, answer = next(pairs)
            written += stream.write(json.dumps({"question": question, "answer": answer}) + "\n")
            rows += 1
    return rows


def train_tokenizer(pairs: list[Pair], folder: Path) -> Tokenizer:
    """A byte-level BPE of 8,192 tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator((text for pair in pairs for text in pair), trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    end = backend.token_to_id("<|im_end|>")
    folder.mkdir()
    Tokenizer(backend, eos_token_ids=[end], chat_template=TEMPLATE).save(folder)
    return Tokenizer.from_folder(folder)


def measure_stages(chat: Path, blocklist: Path) -> dict[str, float]:
    """Scan and signatures on one core, best of three."""
    documents = [row for row in read_documents(chat, "chat") if isinstance(row, Document)][:8192]
    items = [BlocklistItem.from_document(r, "b") for r in read_documents(blocklist, "b") if isinstance(r, Document)]
    policy = Decontaminator(items)
    num_words = sum(len(split_words(d.prompt_text)) + len(split_words(d.response)) for d in documents)
    scans, signs, sign_prompts = [], [], []
    for _ in range(3):
        started_s = time.process_time()
        batches = [TextBatch(documents[start : start + BATCH]) for start in range(0, len(documents), BATCH)]
        for batch in batches:
            policy.find_all(batch)
        scans.append(time.process_time() - started_s)
        signs.append(_time_signing([batch.read_compared() for batch in batches]))
        sign_prompts.append(_time_signing([batch.prompts for batch in batches]))
    return {
        "words_per_document": num_words / len(documents),
        "scan_words_per_s": num_words / min(scans),
        "minhash_documents_per_s": len(documents) / min(signs),
        "minhash_prompts_per_s": len(documents) / min(sign_prompts),
    }


def _time_signing(batches: list[list[str]]) -> float:
    started_s = time.process_time()
    for texts in batches:
        sign_texts(texts)
    return time.process_time() - started_s


def run_prepare(
    folder: Path, rows: Path, blocklist: Path, num_workers: int, results: "multiprocessing.Queue"
) -> None:
    """One whole run, in a process of its own so that its memory is its own."""
    config = DataConfig(
        sources=(SourceShare(source=f"local:{rows}"),), blocklist_files=(str(blocklist),), max_document_len=2048
    )
    tokenizer = Tokenizer.from_folder(folder / "tokenizer")
    out = folder / f"out-{rows.stem}-{num_workers}"
    started_s = time.perf_counter()
    receipt = prepare(config, tokenizer, out, ledger=None, progress=None, num_workers=num_workers)
    wall_s = time.perf_counter() - started_s
    own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    processor_s = own.ru_utime + own.ru_stime + workers.ru_utime + workers.ru_stime
    unit = 1024 if sys.platform != "darwin" else 1
    workers_bytes = num_workers * workers.ru_maxrss * unit if num_workers > 1 else 0
    (source,) = receipt.content["sources"]
    packing = measure_packing(out)
    results.put(
        {
            "rows": source["rows"],
            "bytes_per_row": round(rows.stat().st_size / source["rows"]),
            "documents": source["documents"],
            "dropped": source["dropped"],
            "wall_s": round(wall_s, 2),
            "processor_s": round(processor_s, 2),
            "documents_per_s": round(source["rows"] / wall_s),
            # What the wall time is where nothing else runs on these cores.
            "documents_per_processor_s": round(source["rows"] / processor_s),
            "peak_mib": round((own.ru_maxrss * unit + workers_bytes) / 2**20),
            "packing": packing,
        }
    )


def measure_packing(folder: Path) -> dict[str, object]:
    """The share of positions that carry a document's token, by row length, and how long the packing takes."""
    lens = TokenShard(folder).document_lens.tolist()
    fill, wall_s = {}, {}
    for row_len in ROW_LENS:
        kept = [length for length in lens if length <= row_len]
        started_s = time.perf_counter()
        rows = pack_documents(kept, row_len)
        wall_s[row_len] = round(time.perf_counter() - started_s, 2)
        fill[row_len] = round(sum(kept) / (len(rows) * row_len), 4)
    return {"fill": fill, "wall_s": wall_s}


def measure_prepare(folder: Path, rows: Path, blocklist: Path, num_workers: int) -> dict[str, object]:
    """`run_prepare` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    runner = context.Process(target=run_prepare, args=(folder, rows, blocklist, num_workers, results))
    runner.start()
    result = results.get()
    runner.join()
    return dict(result)


def build_bar(name: str, value: float, bar: float, better: str) -> dict[str, object]:
    """One line of the verdict."""
    holds = value >= bar if better == "higher" else value <= bar
    return {"name": name, "value": round(value, 3), "bar": bar, "better": better, "holds": holds}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 MB of text instead of 200 MB")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="a folder with gsm8k in it")
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    arguments = parser.parse_args()
    pairs, held_out = load_pairs(arguments.data)
    large_bytes = 10_000_000 if arguments.quick else 200_000_000
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        train_tokenizer(pairs[:4000], folder / "tokenizer")
        small, large, blocklist = (folder / f"{part}.jsonl" for part in ("small", "large", "blocklist"))
        write_rows(small, vary_pairs(pairs), large_bytes // 8)
        write_rows(large, vary_pairs(pairs), large_bytes)
        write_rows(blocklist, iter(held_out), sum(len(q) + len(a) for q, a in held_out) // 2)
        stages = measure_stages(small, blocklist)
        runs = {path.stem: measure_prepare(folder, path, blocklist, 2) for path in (small, large)}
    document = {
        "benchmark": "prepare",
        "bars": [
            build_bar("prepare_documents_per_s_2_workers", runs["large"]["documents_per_s"], 2000, "higher"),
            build_bar("scan_mwords_per_s_per_core", stages["scan_words_per_s"] / 1e6, 1.5, "higher"),
            build_bar("minhash_documents_per_s_per_core", stages["minhash_documents_per_s"], 50_000, "higher"),
            build_bar("packing_fill", min(runs["large"]["packing"]["fill"].values()), 0.98, "higher"),
            build_bar("prepare_peak_mib", runs["large"]["peak_mib"], 1536, "lower"),
        ],
        # Below some parts for each worker the memory still fills up, so --quick says little here.
        "peak_growth_with_8_times_the_text": round(runs["large"]["peak_mib"] / runs["small"]["peak_mib"], 3),
        "stages": {key: round(value, 1) for key, value in stages.items()},
        "runs": {**runs, "bytes": {"small": large_bytes // 8, "large": large_bytes}},
        "load_average": os.getloadavg(),
        "hardware": {"machine": platform.machine(), "num_cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "ar2diff": __version__,
            **{name: version(name) for name in ("numpy", "rensa", "rapidfuzz", "tokenizers")},
        },
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
