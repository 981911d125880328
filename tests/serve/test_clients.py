"""Clients that others wrote, unchanged, against a real server: curl, and lm-eval by both of its routes."""

import json
import shutil
import subprocess

import pytest

from ar2diff.models.loading import save_model
from ar2diff.testing.models import tiny_diffusion

curl = shutil.which("curl")


@pytest.mark.skipif(curl is None, reason="needs the program curl")
def test_curl_works_whole_streamed_and_refused(shared, kit, tmp_path):
    def ask(*words):
        url = f"{shared.url}/v1/chat/completions"
        command = [curl, "-sS", "--max-time", "20", url, "-H", "Content-Type: application/json", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = kit.chat_body(seed=11)
    want = shared.chat(seed=11).json()["choices"][0]["message"]["content"]
    assert json.loads(ask("-d", json.dumps(body)))["choices"][0]["message"]["content"] == want
    streamed = ask("-N", "-d", json.dumps({**body, "stream": True}))
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == want
    assert streamed.endswith("data: [DONE]\n\n")
    # Over a mebibyte curl asks first (Expect: 100-continue); over ten the answer is no.
    big = tmp_path / "big.json"
    big.write_text(json.dumps({**body, "messages": [{"role": "user", "content": "x" * 2_000_000}]}))
    assert json.loads(ask("-d", f"@{big}"))["error"]["code"] == "context_length_exceeded"
    big.write_bytes(b" " * (10 * 2**20 + 1))
    assert json.loads(ask("--data-binary", f"@{big}"))["error"]["code"] == "body_too_large"
    assert json.loads(ask("--compressed", "-d", "{"))["error"]["code"] == "invalid_json"


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
MORE = {
    "generate_until": "generation_kwargs: {until: [Q, W, X, Y, Z], max_gen_toks: 6, do_sample: false}",
    "multiple_choice": 'doc_to_choice: "{{choices}}"',
}


def evaluate(server, folder, monkeypatch, route, kind, **settings):
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    data = folder / "test.jsonl"
    rows = [{"question": f"q{idx}", "answer": "a", "choices": ["aa", "b"], "gold": idx % 2} for idx in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    is_choice = kind == "multiple_choice"
    target, metric = ("gold", "acc") if is_choice else ('"{{answer}}"', "exact_match")
    text = TASK.format(name="local_task", data=data, kind=kind, target=target, metric=metric, more=MORE[kind])
    (folder / "local_task.yaml").write_text(text)
    path = {"local-chat-completions": "chat/completions", "local-completions": "completions"}[route]
    asked = {"model": "tiny", "base_url": f"{server.url}/v1/{path}", "num_concurrent": 2, "max_retries": 1}
    asked |= {"tokenizer_backend": "none", "tokenized_requests": False, "max_length": 256, **settings}
    return lm_eval.simple_evaluate(
        model=route,
        model_args=asked,
        tasks=["local_task"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=route == "local-chat-completions",
        log_samples=True,
        bootstrap_iters=0,
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("route", ["local-chat-completions", "local-completions"])
def test_lm_eval_generates_through_the_server(shared, tmp_path, monkeypatch, route):
    found = evaluate(shared, tmp_path, monkeypatch, route, "generate_until")
    samples = found["samples"]["local_task"]
    assert len(samples) == 4
    for sample in samples:
        asked = {"temperature": 0, "max_tokens": 6, "stop": ["Q", "W", "X", "Y", "Z"], "seed": 1234}
        question = sample["doc"]["question"]
        if route == "local-chat-completions":
            asked["stop"] = asked["stop"][:4]  # the harness sends no more on this route
        if route == "local-completions":
            want = shared.complete(prompt=question, **asked).json()["choices"][0]["text"]
        else:
            messages = [{"role": "user", "content": question}]
            want = shared.chat(messages=messages, **asked).json()["choices"][0]["message"]["content"]
        assert sample["resps"][0][0] == want


@pytest.mark.filterwarnings("default")
def test_lm_eval_scores_choices_through_the_server(shared, kit, tmp_path, monkeypatch):
    model = tmp_path / "model"
    save_model(model, kit.loaded, tiny_diffusion())
    tokens = {"tokenizer_backend": "huggingface", "tokenizer": str(model), "tokenized_requests": True}
    found = evaluate(shared, tmp_path, monkeypatch, "local-completions", "multiple_choice", **tokens)
    samples = found["samples"]["local_task"]
    assert len(samples) == 4
    for sample in samples:
        context = len(sample["doc"]["question"])
        wants = []
        for choice in sample["doc"]["choices"]:
            prompt = list(f"{sample['doc']['question']} {choice}".encode())
            asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
            scores = shared.complete(**asked).json()["choices"][0]["logprobs"]["token_logprobs"]
            wants.append(sum(scores[context : len(prompt)]))
        assert [resp[0][0] for resp in sample["resps"]] == pytest.approx(wants, abs=1e-4)
        right = max(range(2), key=lambda idx: wants[idx]) == sample["doc"]["gold"]
        assert sample["acc"] == right
