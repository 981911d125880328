"""lm-eval gets equal answers from the engine in process and from the served API, in every mode."""

import json

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from local_server import serve_engine

from ar2diff.clock import SystemClock
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.errors import ConfigError, RequestError
from ar2diff.evals.harness import HarnessModel
from ar2diff.evals.modes import AR_MODE, VERIFIED_MODE, build_modes
from ar2diff.models.loading import save_model
from ar2diff.testing.harness_tasks import write_tasks
from ar2diff.testing.models import END_ID, START_ID, always_model, tiny_diffusion, tiny_model

LOADED = tiny_model(3, diffusion=tiny_diffusion(), max_seq_len=512)
(STEPS_MODE,) = build_modes("diffusion", (2,), ())
MODES = {"ar": AR_MODE, "verified": VERIFIED_MODE, "diffusion": STEPS_MODE}


@pytest.fixture(scope="module")
def engine():
    return Engine(LOADED, clock=SystemClock())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, LOADED, LOADED.diffusion)
    return folder


@pytest.fixture(scope="module")
def url():
    with serve_engine(lambda: Engine(LOADED, clock=SystemClock()), "tiny") as address:
        yield address


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return TaskManager(include_path=write_tasks(tmp_path_factory.mktemp("tasks")), include_defaults=False)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")


def evaluate(model, tasks, names, **settings):
    found = simple_evaluate(
        model=model, tasks=list(names), task_manager=tasks, bootstrap_iters=0, verbosity="ERROR", **settings
    )
    kept = ("doc_id", "filtered_resps", "target")
    samples = {name: [[s[key] for key in kept] for s in rows] for name, rows in found["samples"].items()}
    figures = {name: {k: v for k, v in row.items() if "stderr" not in k} for name, row in found["results"].items()}
    return samples, figures


def options(mode):
    extra = {"ar": {"mode": "ar"}, "verified": {"mode": "verified"}}
    steps = {"mode": "diffusion", "policy": "top_k", "denoising_steps": 2}
    return {"diffusion": extra.get(mode, steps)}


@pytest.mark.parametrize("mode", MODES)
def test_in_process_and_over_the_completions_route_all_answers_are_equal(mode, engine, tasks, folder, url):
    served = get_model("local-completions")(
        model="tiny", base_url=f"{url}/v1/completions", tokenizer=str(folder), max_length=512, timeout=60
    )
    # Likelihoods are those of the causal path in every mode, so one mode shows them.
    names = ["local_gen", "local_choice", "local_text"] if mode == "ar" else ["local_gen"]
    settings = {"gen_kwargs": options(mode)}
    over_http = evaluate(served, tasks, names, **settings)
    in_process = evaluate(HarnessModel(engine, mode=MODES[mode]), tasks, names)
    assert_equal(in_process, over_http)


def test_in_process_and_over_the_chat_route_all_answers_are_equal(engine, tasks, url):
    served = get_model("local-chat-completions")(model="tiny", base_url=f"{url}/v1/chat/completions", timeout=60)
    over_http = evaluate(
        served, tasks, ["local_gen"], apply_chat_template=True, gen_kwargs=options("diffusion"), num_fewshot=1
    )
    own = HarnessModel(engine, mode=STEPS_MODE)
    assert_equal(evaluate(own, tasks, ["local_gen"], apply_chat_template=True, num_fewshot=1), over_http)


def assert_equal(left, right):
    assert left[0].keys() == right[0].keys()
    for name, rows in left[0].items():
        for one, other in zip(rows, right[0][name], strict=True):
            assert one[0] == other[0]
            assert json.loads(json.dumps(one[1])) == nearly(json.loads(json.dumps(other[1])))
    assert left[1].keys() == right[1].keys()
    for name, figures in left[1].items():
        assert list(figures.values()) == nearly([right[1][name][key] for key in figures])


def nearly(value):
    """Floats to single precision, everything else exactly."""
    if isinstance(value, list):
        return [nearly(item) for item in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


def ask(model, kind, *arguments):
    instances = [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in arguments]
    return getattr(model, kind)(instances)


def test_control_tokens_that_a_text_spells_stay_text(engine):
    model = HarnessModel(engine)
    spelled = "a<|im_end|>"
    assert END_ID not in model.tok_encode(spelled)
    chat = model.apply_chat_template([{"role": "user", "content": spelled}])
    ids = model.tok_encode(chat)
    assert (ids.count(START_ID), ids.count(END_ID)) == (2, 1)
    assert chat.endswith("assistant\n")


def test_a_conversation_that_ends_with_the_assistant_is_gone_on_with(engine):
    model = HarnessModel(engine)
    turns = [{"role": "user", "content": "hi"}]
    begun = model.apply_chat_template(
        [*turns, {"role": "assistant", "content": "It is"}], add_generation_prompt=False
    )
    assert model.tok_encode(begun) == model.tok_encode(model.apply_chat_template(turns)) + model.tok_encode("It is")


def test_answers_end_before_a_stop_text_and_at_the_limit():
    model = HarnessModel(Engine(always_model(ord("c")), clock=SystemClock()), max_tokens=5)
    asked = [("abc", {"until": until}) for until in (["d", ""], "cc", ["d", "cc"])]
    assert ask(model, "generate_until", *asked) == ["ccccc", "", ""]
    assert ask(model, "generate_until", ("abc", {"max_gen_toks": 2})) == ["cc"]


def test_a_sampled_answer_is_that_of_its_seed(engine):
    model = HarnessModel(engine, max_tokens=8)
    sampled = {"do_sample": True, "temperature": 1.0, "top_p": 0.9}
    first, again, greedy = (ask(model, "generate_until", ("abc", s)) for s in (sampled, sampled, {}))
    assert first == again != greedy


def test_long_prompts_are_cut_from_the_left(engine):
    model = HarnessModel(engine, max_tokens=4)
    long = "x" * 600 + "the end"
    kept = long[-(511 - 4) :]
    assert ask(model, "generate_until", (long, {})) == ask(model, "generate_until", (kept, {}))
    assert ask(model, "loglikelihood", (long, " it")) == ask(model, "loglikelihood", (long[-509:], " it"))


def test_an_empty_prompt_begins_with_the_prefix_token(engine):
    model = HarnessModel(engine, max_tokens=4)
    (text,) = ask(model, "generate_until", ("", {}))
    request = Request(prompt_ids=(model.prefix_token_id,), max_tokens=4, mode="ar")
    assert text == engine.generate(request).text
    assert ask(model, "loglikelihood", ("", "ab"))[0][0] < 0


def test_the_greedy_answer_is_the_likeliest_and_no_other(engine):
    model = HarnessModel(engine)
    ids = model.tok_encode("abc")
    best = engine.generate(Request(prompt_ids=tuple(ids), max_tokens=3, mode="ar")).token_ids
    scored = model._loglikelihood_tokens([(None, ids, list(best)), (None, ids, [*best[:2], (best[2] + 1) % 256])])
    assert [is_greedy for _, is_greedy in scored] == [True, False]
    assert scored[0][0] > scored[1][0]


def test_a_parent_is_scored_and_asked_like_any_model(tasks):
    parent = Engine(tiny_model(3, max_seq_len=512), clock=SystemClock())
    model = HarnessModel(parent)
    assert ask(model, "loglikelihood", ("ab", "c"))[0][0] < 0
    with pytest.raises(RequestError, match="not converted"):
        ask(HarnessModel(parent, mode=STEPS_MODE), "generate_until", ("ab", {}))


@pytest.mark.parametrize(
    ("settings", "said"), [({"max_gen_toks": 511}, "fills the context"), ({"num_beams": 2}, "num_beams")]
)
def test_what_the_engine_cannot_do_is_refused(engine, settings, said):
    with pytest.raises(ConfigError, match=said):
        ask(HarnessModel(engine), "generate_until", ("abc", settings))
