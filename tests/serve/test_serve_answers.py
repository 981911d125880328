"""Answers over HTTP are the engine's answers, whole and streamed."""

import json

import httpx2
import openai
import pytest

from ar2diff.engine.request import Request
from ar2diff.serve.prompts import choice_seed


def expect(kit, prompt="hello", **fields):
    tokenizer = kit.loaded.tokenizer
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)
    asked = {"max_tokens": 6, "temperature": 1.0, "seed": 11, "adaptive_draft": True, "copy_drafts": True, **fields}
    return kit.direct.generate(Request(prompt_ids=tuple(ids), **asked))


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = [piece for piece in response.text.split("\n\n") if piece]
    assert all(piece.startswith("data: ") for piece in pieces)
    return [piece.removeprefix("data: ") for piece in pieces]


def chunks(response):
    found = events(response)
    assert found.pop() == "[DONE]"
    return [json.loads(piece) for piece in found]


@pytest.mark.parametrize("mode", ["diffusion", "verified", "ar"])
def test_an_answer_is_the_engines_answer_in_every_mode(shared, kit, mode):
    got = shared.chat(diffusion={"mode": mode}, max_tokens=9).json()
    want = expect(kit, mode=mode, max_tokens=9)
    choice = got["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert choice["finish_reason"] == want.finish_reason
    assert choice["diffusion"]["num_forward_passes"] == want.num_forward_passes
    assert got["usage"]["completion_tokens"] == len(want.token_ids)
    assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] + len(want.token_ids)
    assert got["diffusion"]["tokens_per_forward"] == want.tokens_per_forward


FIELDS = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    ({"seed": -1}, {"seed": -1}),
    ({"top_p": 0.3}, {"top_p": 0.3}),
    ({"top_k": 2}, {"top_k": 2}),
    ({"max_tokens": None, "max_completion_tokens": 3}, {"max_tokens": 3}),
    ({"logit_bias": {"65": 100}}, {"logit_bias": {65: 100.0}}),
    ({"diffusion": {"denoising_steps": 1}}, {"denoising_steps": 1}),
    ({"diffusion": {"policy": "factor", "policy_parameter": 3}}, {"policy": "factor", "policy_parameter": 3.0}),
    ({"diffusion": {"block_size": 2}}, {"block_size": 2}),
]


@pytest.mark.parametrize(("sent", "fields"), FIELDS, ids=[str(sent) for sent, _ in FIELDS])
def test_a_field_reaches_the_engine(shared, kit, sent, fields):
    got = shared.chat(**sent).json()["choices"][0]
    want = expect(kit, **fields)
    assert got["message"]["content"] == want.text
    assert got["diffusion"]["num_forward_passes"] == want.num_forward_passes
    assert got["diffusion"]["passes_per_block"] == list(want.passes_per_block)


def test_a_stop_text_ends_the_answer_and_is_not_shown(shared, kit):
    text = expect(kit, max_tokens=30, logit_bias={65: 6.0, 66: 6.0}).text
    stop = text[3:5]
    got = shared.chat(max_tokens=30, logit_bias={"65": 6, "66": 6}, stop=["never there", stop]).json()
    assert got["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert got["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("mode", ["diffusion", "verified", "ar"])
def test_a_stream_is_the_whole_answer_in_pieces(shared, mode):
    asked = {"diffusion": {"mode": mode}, "max_tokens": 14, "logit_bias": {str(idx): 3 for idx in range(65, 91)}}
    whole = shared.chat(**asked).json()
    found = chunks(shared.chat(stream=True, stream_options={"include_usage": True}, **asked))
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [c["choices"][0]["delta"].get("content", "") for c in found[:-1]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert sum(map(bool, texts)) > 1
    reasons = [c["choices"][0]["finish_reason"] for c in found[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [whole["choices"][0]["finish_reason"]]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]
    assert len({c["id"] for c in found}) == 1


def test_a_stream_without_usage_ends_with_the_reason(shared):
    found = chunks(shared.chat(stream=True))
    assert all(c["choices"] for c in found)
    assert not any("usage" in c for c in found)


def test_several_choices_are_the_answers_of_several_seeds(shared, kit):
    got = shared.chat(n=3, seed=5).json()
    wants = [expect(kit, seed=choice_seed(5, idx)) for idx in range(3)]
    assert [c["message"]["content"] for c in got["choices"]] == [want.text for want in wants]
    assert len({want.text for want in wants}) == 3
    assert choice_seed(5, 0) == 5
    assert got["usage"]["completion_tokens"] == sum(len(want.token_ids) for want in wants)
    assert got["usage"]["prompt_tokens"] == shared.chat().json()["usage"]["prompt_tokens"]
    streamed = chunks(shared.chat(n=3, seed=5, stream=True))
    for idx, want in enumerate(wants):
        mine = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == idx]
        assert "".join(c["delta"].get("content", "") for c in mine) == want.text
        assert mine[0]["delta"]["role"] == "assistant"
        assert mine[-1]["finish_reason"] == want.finish_reason


def test_a_trace_shows_every_pass(shared, kit):
    got = shared.chat(diffusion={"trace": True}).json()["choices"][0]["diffusion"]["passes"]
    want = expect(kit, trace=True).passes
    assert [step["token_ids"] for step in got] == [list(step.token_ids) for step in want]
    streamed = chunks(shared.chat(diffusion={"trace": True}, stream=True))
    passes = [
        c["choices"][0]["diffusion"]["pass"] for c in streamed if "pass" in c["choices"][0].get("diffusion", {})
    ]
    assert passes == got
    assert "passes" not in shared.chat().json()["choices"][0]["diffusion"]


def test_a_last_turn_by_the_assistant_is_continued(shared, kit):
    start = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}]
    ids = kit.loaded.tokenizer.encode_chat(start[:1], add_generation_prompt=True) + list(b"Well")
    want = kit.direct.generate(Request(prompt_ids=tuple(ids), max_tokens=6, temperature=1.0, seed=11))
    assert shared.chat(messages=start).json()["choices"][0]["message"]["content"] == want.text


def test_control_tokens_that_a_user_spells_are_plain_text(shared):
    plain = shared.chat(messages=[{"role": "user", "content": "x" * 10}]).json()["usage"]["prompt_tokens"]
    spelled = shared.chat(messages=[{"role": "user", "content": "<|im_end|>"}]).json()["usage"]["prompt_tokens"]
    assert spelled == plain


def test_text_parts_are_one_text(shared):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    content = shared.chat(messages=[{"role": "user", "content": parts}]).json()["choices"]
    assert content == shared.chat().json()["choices"]


def test_completions_take_texts_and_ids_alike(shared, kit):
    want = kit.direct.generate(Request(prompt_ids=tuple(b"hello"), max_tokens=6, temperature=1.0, seed=11))
    for prompt in ("hello", list(b"hello"), ["hello"], [list(b"hello")]):
        got = shared.complete(prompt=prompt).json()
        assert got["choices"][0]["text"] == want.text
        assert got["usage"]["prompt_tokens"] == 5
    two = shared.complete(prompt=["hello", "abc"], n=2).json()
    assert [c["index"] for c in two["choices"]] == [0, 1, 2, 3]
    assert two["usage"]["prompt_tokens"] == 8
    assert two["choices"][0]["text"] == want.text
    streamed = chunks(shared.complete(stream=True))
    assert "".join(c["choices"][0]["text"] for c in streamed) == want.text


def test_an_answer_that_fills_the_context_ends_with_length(shared, kit):
    room = kit.loaded.config.max_seq_len - 250
    got = shared.complete(prompt=[7] * 250, max_tokens=10**6, logit_bias={"257": -100}).json()
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == room


def test_the_public_client_works_unchanged(shared, kit):
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none needed", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [kit.name]
        messages = [{"role": "user", "content": "hello"}]
        asked = {"model": kit.name, "messages": messages, "max_completion_tokens": 6, "seed": 11}
        got = client.chat.completions.create(**asked, extra_body={"diffusion": {"mode": "verified"}})
        want = expect(kit, mode="verified")
        assert got.choices[0].message.content == want.text
        assert got.usage.completion_tokens == len(want.token_ids)
        with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            pieces = list(stream)
        assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == expect(kit).text
        assert pieces[-1].usage.total_tokens == got.usage.prompt_tokens + 6
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked, presence_penalty=3)
        assert refused.value.param == "presence_penalty"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**asked, "model": "../../etc/passwd"})


def test_provenance_names_the_live_weights(shared, kit):
    got = shared.http.get("/v1/provenance").json()
    assert got["tensor_root"] == got["live_tensor_root"] == kit.loaded.tensor_root
    assert set(got["versions"]) == {"ar2diff", "torch", "python"}


def test_metrics_count_tokens_and_passes(kit):
    with kit.running() as server:
        got = server.chat().json()
        text = server.http.get("/metrics").text
    assert f"ar2diff_generated_tokens_total {got['usage']['completion_tokens']}.0" in text
    assert f"ar2diff_forward_passes_total {got['diffusion']['num_forward_passes']}.0" in text
    assert 'ar2diff_responses_total{status="200"} 1.0' in text


def test_the_description_is_complete(shared):
    found = shared.http.get("/openapi.json").json()
    body = found["components"]["schemas"]["ChatRequest"]
    assert body["additionalProperties"] is False
    assert {"messages", "diffusion", "logit_bias"} <= set(body["properties"])
    references = set(json.dumps(found).split('"$ref": "#/components/schemas/')[1:])
    assert {name.partition('"')[0] for name in references} <= set(found["components"]["schemas"])
    assert "422" not in json.dumps(found)


def test_an_async_client_gets_many_answers_at_once(shared):
    import asyncio

    async def ask_all():
        async with httpx2.AsyncClient(base_url=shared.url, timeout=30) as client:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
            posts = [client.post("/v1/completions", json={**body, "seed": seed}) for seed in range(12)]
            return await asyncio.gather(*posts)

    answers = asyncio.run(ask_all())
    alone = [shared.complete(max_tokens=4, seed=seed).json()["choices"] for seed in range(12)]
    assert [answer.json()["choices"] for answer in answers] == alone
