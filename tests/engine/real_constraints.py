"""Constrained answers of a real converted model, alone and together: every finished one parses.

`python tests/engine/real_constraints.py CHECKPOINT [MINUTES] [RESULTS]` answers under a schema, a regular expression
and a tool's form, in every mode, greedy and sampled under several seeds, alone and in batches, as the engine is
shipped (int8 where that is possible). It stops after the minutes given, 5 unless said, and ends with one JSON object.
"""

import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path

import jsonschema
import torch

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.constraint import Constraint
from ar2diff.engine.loading import load_engine
from ar2diff.engine.request import Request

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
WEATHER |= {"additionalProperties": False}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"


def check_person(text):
    jsonschema.validate(json.loads(text), PERSON)


def check_date(text):
    assert re.fullmatch(DATE, text), text


def check_call(text):
    call = json.loads(text)
    assert call["name"] == "weather"
    jsonschema.validate(call["arguments"], WEATHER)


CALL = {
    "type": "object",
    "properties": {"name": {"const": "weather"}, "arguments": WEATHER},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
FORMS = {
    "schema": (Constraint.json_schema(PERSON), "Describe a person as JSON.", check_person),
    "regex": (Constraint.regex(DATE), "When did the first man land on the moon?", check_date),
    "tool": (Constraint.json_schema(CALL), "What is the weather in Oslo?", check_call),
}
MODES = ("ar", "verified", "diffusion")


def draw_round(tokenizer, idx):
    """Every form in every mode: greedy in the first round, sampled under the round's seed in the others."""
    for form, (constraint, question, check) in FORMS.items():
        messages = [{"role": "user", "content": question}]
        prompt = tuple(tokenizer.encode_chat(messages, add_generation_prompt=True))
        for mode in MODES:
            asked = {"mode": mode, "temperature": 0.8 if idx else 0.0, "seed": idx, "constraint": constraint}
            yield form, mode, Request(prompt_ids=prompt, max_tokens=64, **asked), check


def answer_round(engine, idx):
    """One row an answer: form, mode, round, how it ended, whether it is the same alone, together and backwards."""
    asked = list(draw_round(engine.loaded.tokenizer, idx))
    requests, runs = [request for _, _, request, _ in asked], []
    for together in ([[one] for one in requests], [requests], [requests[::-1]]):
        engine.pages.forget_kept()
        runs.append([answer for batch in together for answer in engine.generate_many(batch)])
    for (form, mode, _, check), alone, both, back in zip(asked, runs[0], runs[1], runs[2][::-1], strict=True):
        if alone.finish_reason == "stop":
            check(alone.text)
        yield {
            "form": form,
            "mode": mode,
            "round": idx,
            "finish_reason": alone.finish_reason,
            "num_tokens": len(alone.token_ids),
            "num_forward_passes": alone.num_forward_passes,
            "is_same_in_batches": alone.token_ids == both.token_ids == back.token_ids,
            "text": alone.text,
        }


def build_report(rows, engine, seconds):
    """What came of all answers."""
    finished = [row for row in rows if row["finish_reason"] == "stop"]
    same = sum(row["is_same_in_batches"] for row in rows)
    bar = {"name": "answers that differ in a batch", "value": len(rows) - same, "bar": 0, "better": "lower"}
    return {
        "benchmark": "real_constraints",
        "answers": len(rows),
        "finished_and_valid": len(finished),
        "cut_at_max_tokens": len(rows) - len(finished),
        "finished_by_mode": {mode: sum(row["mode"] == mode for row in finished) for mode in MODES},
        "rounds": 1 + rows[-1]["round"],
        "first_round": {f"{row['form']}, {row['mode']}": row["text"] for row in rows if row["round"] == 0},
        "seconds": round(seconds, 1),
        "bars": [{**bar, "holds": same == len(rows)}],
        "hardware": {"machine": platform.machine(), "threads": os.cpu_count(), "precision": engine.precision_reason},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def main(path, minutes=5.0, results=None):
    torch.set_num_threads(1)
    start_s, rows, idx = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory() as folder:
        config, threads = EngineConfig(max_running=9, kv_tokens=8192), os.cpu_count()
        asked = {"clock": SystemClock(), "library_dir": Path(folder), "num_threads": threads, "config": config}
        engine = load_engine(path, "auto", **asked)
    while idx == 0 or time.monotonic() - start_s < 60 * minutes * idx / (idx + 1):
        for row in answer_round(engine, idx):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        idx += 1
    report = build_report(rows, engine, time.monotonic() - start_s)
    if results is not None:
        results.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]), float(given[1]) if given[1:] else 5.0, *map(Path, given[2:3]))
