"""Constrained answers of a real converted model, alone and together: every finished one parses.

`python tests/engine/real_constraints.py CHECKPOINT` answers under a schema, a regular expression and a tool's form,
in every mode, alone and in one batch, and ends with one JSON object.
"""

import json
import re
import sys
from pathlib import Path

import jsonschema
import torch

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.constraint import Constraint
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.models.loading import load_model

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


FORMS = {
    "schema": (Constraint.json_schema(PERSON), "Describe a person as JSON.", check_person),
    "regex": (Constraint.regex(DATE), "When did the first man land on the moon?", check_date),
    "tool": (Constraint.tool_calls({"weather": WEATHER}), "What is the weather in Oslo?", check_call),
}
MODES = ("ar", "verified", "diffusion")


def draw_requests(tokenizer):
    for form, (constraint, question, check) in FORMS.items():
        messages = [{"role": "user", "content": question}]
        prompt = tuple(tokenizer.encode_chat(messages, add_generation_prompt=True))
        for mode in MODES:
            for temperature in (0.0, 0.8):
                asked = {"mode": mode, "temperature": temperature, "seed": 7, "constraint": constraint}
                yield (form, mode, temperature), Request(prompt_ids=prompt, max_tokens=64, **asked), check


def main(path):
    torch.set_num_threads(1)
    loaded = load_model(Path(path))
    config = EngineConfig(kv_tokens=8192)
    asked = list(draw_requests(loaded.tokenizer))
    single, shared = (Engine(loaded, clock=SystemClock(), config=config) for _ in range(2))
    alone = [single.generate(request) for _, request, _ in asked]
    together = shared.generate_many([request for _, request, _ in asked])
    reversed_ = Engine(loaded, clock=SystemClock(), config=config).generate_many([one for _, one, _ in asked[::-1]])
    rows = []
    for (name, _, check), one, both, back in zip(asked, alone, together, reversed_[::-1], strict=True):
        if one.finish_reason == "stop":
            check(one.text)
        is_same = one.token_ids == both.token_ids == back.token_ids
        rows.append([*name, one.finish_reason, len(one.token_ids), one.num_forward_passes, is_same, one.text])
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finished = sum(row[3] == "stop" for row in rows)
    report = {"answers": len(rows), "finished_and_valid": finished, "same_in_batches": sum(row[6] for row in rows)}
    by_mode = {mode: {row[0] + str(row[2]): row[7] for row in rows if row[1] == mode} for mode in MODES}
    print(json.dumps({"benchmark": "real_constraints", **report, "texts": by_mode}))


if __name__ == "__main__":
    main(sys.argv[1])
