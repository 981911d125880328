"""Run by a test in a process of its own: an exported folder in transformers alone, this package out of reach.

Arguments: the folder, a JSON file of questions, where to write the answers.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Answer every question: logits of causal ids, and `generate` with its settings."""
    folder, questions_path, answers_path = sys.argv[1:]
    questions = json.loads(Path(questions_path).read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation="sdpa").eval()
    assert "ar2diff" not in sys.modules
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([questions["ids"]])).logits[0].tolist()
    answers = [
        model.generate(torch.tensor([question["prompt"]]), **question["settings"])[
            0, len(question["prompt"]) :
        ].tolist()
        for question in questions["generate"]
    ]
    refused = []
    for settings in questions["refused"]:
        try:
            model.generate(torch.tensor([questions["ids"]]), **settings)
        except ValueError as error:
            refused.append(str(error))
    batch = torch.tensor([[0, 0, 1, 2], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    padded = model.generate(batch, attention_mask=mask, max_new_tokens=3).tolist()
    alone = [model.generate(torch.tensor([row]), max_new_tokens=3)[0].tolist() for row in ([1, 2], [3, 4, 5, 6])]
    said = {"logits": logits, "answers": answers, "refused": refused, "batch": padded, "alone": alone}
    Path(answers_path).write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main()
