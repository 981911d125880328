"""The comparison is fair and keeps its time: warmed up, interleaved, in a budget, of undamaged models alone."""

import json
from dataclasses import replace

import pytest

from ar2diff.data.config import EvaluationShare
from ar2diff.errors import CheckpointError, ModelError, RequestError
from ar2diff.evals.scores import Answer
from ar2diff.hashing import sha256_file
from ar2diff.models.loading import save_model
from ar2diff.pipelines import evaluation
from ar2diff.pipelines.answer_log import AnswerLog
from ar2diff.pipelines.evaluation import check_model_paths, describe_machine, evaluate_run
from ar2diff.pipelines.recipe import EvaluationConfig
from ar2diff.pipelines.stages import RunContext
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events
from ar2diff.testing.models import tiny_diffusion, tiny_model

CONFIG = EvaluationConfig(
    problems=(EvaluationShare(task="structured", count=5),),
    modes="parent,ar,diffusion",
    steps=(1,),
    thresholds=(),
    max_tokens=20,
    bits_problems=0,
    precision="fp32",
)


class ManualClock:
    """Time that passes only when told to."""

    now = 0.0

    def seconds(self):
        return self.now

    def utc(self):
        from datetime import UTC, datetime

        return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Silent:
    def stage(self, title): ...

    def evaluation(self, done, total, mode): ...


@pytest.fixture
def context(tmp_path):
    clock = ManualClock()
    with Ledger.open(tmp_path / "run", clock=clock, run_id="x") as ledger:
        yield RunContext(
            run_dir=tmp_path / "run",
            cache_dir=tmp_path,
            library_dir=tmp_path,
            ledger=ledger,
            clock=clock,
            view=Silent(),
        )


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    save_model(folder, tiny_model(2, max_seq_len=512), tiny_diffusion())
    return folder


@pytest.fixture
def asked(context, monkeypatch):
    """Every call in order, each of ten seconds; no model answers."""
    calls = []

    def answer(contestants, problems, mode, *, max_tokens, clock):
        return [answer_one(problem, mode, max_tokens, clock) for problem in problems]

    def answer_one(problem, mode, max_tokens, clock):
        calls.append((problem.id.rpartition("-")[2], mode.name, max_tokens))
        clock.now += 10.0
        return Answer(
            mode=mode.name,
            problem_id=problem.id,
            domain=problem.domain,
            text="",
            token_ids=(1,),
            finish_reason="stop",
            correct=False,
            num_forward_passes=1,
            seconds=10.0,
        )

    monkeypatch.setattr(evaluation, "answer_problems", answer)
    return calls


def test_every_mode_is_warmed_up_and_then_takes_every_place_in_turn(tiny_parent, converted, context, asked):
    report = evaluate_run(tiny_parent, converted, CONFIG, context)
    names = ["parent", "ar", "diffusion, steps=1"]
    assert asked[:3] == [("0", name, 8) for name in names]
    timed = [asked[start : start + 3] for start in range(3, len(asked), 3)]
    assert [[mode for _, mode, _ in group] for group in timed] == [
        names,
        [*names[1:], names[0]],
        [*names[2:], *names[:2]],
        names,
        [*names[1:], names[0]],
    ]
    assert all(len({problem for problem, _, _ in group}) == 1 for group in timed)
    assert {limit for _, _, limit in asked[3:]} == {20}
    assert [score.mode for score in report.scores] == [name for name in names for _ in range(2)]
    assert all(score.num_problems == 5 for score in report.scores)


@pytest.mark.parametrize(("minutes", "num_problems"), [(0.1, 1), (1.5, 2), (2.0, 3), (60.0, 5)])
def test_problems_are_asked_while_the_next_one_fits_the_budget(
    tiny_parent, converted, context, asked, minutes, num_problems
):
    # Warming up costs 30 seconds, and so does each problem.
    report = evaluate_run(tiny_parent, converted, replace(CONFIG, minutes=minutes), context)
    assert len(report.answers) == 3 * num_problems


def test_the_report_names_models_settings_and_machine_and_is_in_the_ledger(tiny_parent, converted, context):
    few = (EvaluationShare(task="structured", count=1),)
    config = replace(CONFIG, problems=few, bits_problems=1, precision="bf16", modes="parent,ar,verified,diffusion")
    report = evaluate_run(tiny_parent, converted, config, context)
    stored = json.loads((context.run_dir / "eval.json").read_text())
    about = stored["about"]
    assert about["settings"] == json.loads(json.dumps(config.as_json()))
    assert about["diffusion"] == tiny_diffusion().as_json()
    assert set(about["roots"]) == {"parent", "converted"}
    assert {"device", "processor", "threads", "torch"} <= set(about["machine"])
    assert set(stored["bits_per_token"]) == {"parent", "ar", "verified", "diffusion, steps=1"}
    assert stored["bits_per_token"]["ar"] == stored["bits_per_token"]["verified"]
    (event,) = find_events(context.run_dir / LEDGER_NAME, "evaluate")
    for logged in (event.data["report"], event.data["samples"]):
        assert sha256_file(context.run_dir / logged["path"]) == logged["sha256"]
    assert event.data["roots"] == about["roots"]
    assert len((context.run_dir / "eval_samples.jsonl").read_text().splitlines()) == len(report.answers) == 4


def test_a_model_that_is_not_converted_is_refused(tiny_parent, context):
    with pytest.raises(CheckpointError, match="not a converted model"):
        evaluate_run(tiny_parent, tiny_parent, CONFIG, context)


def test_a_mode_that_the_model_cannot_decode_in_is_refused_before_any_answer(tiny_parent, tmp_path, context, asked):
    blockwise = tmp_path / "blockwise"
    diffusion = tiny_diffusion(shift_logits=False, clean_attention="block")
    save_model(blockwise, tiny_model(2, max_seq_len=512), diffusion)
    with pytest.raises(RequestError, match="needs shifted logits"):
        evaluate_run(tiny_parent, blockwise, CONFIG, context)
    assert asked == []
    alone = replace(CONFIG, modes="parent,diffusion", bits_problems=1)
    assert set(evaluate_run(tiny_parent, blockwise, alone, context).bits_per_token) == {
        "parent",
        "diffusion, steps=1",
    }


def test_a_parent_of_another_tokenizer_is_refused(converted, tmp_path, context):
    other = tiny_model(2, max_seq_len=512, vocab_size=300)
    save_model(tmp_path / "other", other, None)
    config = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    config["added_tokens"][-1]["content"] = "<|other|>"
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="another tokenizer"):
        evaluate_run(tmp_path / "other", converted, CONFIG, context)


def test_what_is_no_model_is_named(tmp_path, tiny_parent):
    check_model_paths(tiny_parent)
    (tmp_path / "x.gguf").write_bytes(b"")
    check_model_paths(tmp_path / "x.gguf")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelError, match="no model folder"):
            check_model_paths(path)


def test_the_machine_is_described_without_a_processor_name_too(monkeypatch):
    monkeypatch.setattr(
        "ar2diff.pipelines.evaluation.Path", lambda text: type("None", (), {"is_file": lambda s: False})()
    )
    assert describe_machine("cpu")["processor"]
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    assert describe_machine("cuda")["device"] == "a card"


def test_an_evaluation_killed_midway_asks_only_what_is_left(tiny_parent, converted, context, asked, monkeypatch):
    whole = evaluate_run(tiny_parent, converted, CONFIG, context)
    real, done = evaluation.answer_problems, []

    def killed_at_the_ninth(*arguments, **settings):
        done.append(None)
        if len(done) == 9:
            raise KeyboardInterrupt
        return real(*arguments, **settings)

    monkeypatch.setattr(evaluation, "answer_problems", killed_at_the_ninth)
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(tiny_parent, converted, CONFIG, context)
    log = context.run_dir / "eval_answers.partial.jsonl"
    with log.open("ab") as stream:
        stream.write(b'{"mode": "ar", "probl')
    monkeypatch.setattr(evaluation, "answer_problems", real)
    asked.clear()
    again = evaluate_run(tiny_parent, converted, CONFIG, context)
    # Three to warm up, and fifteen less the five that were answered.
    assert len(asked) == 3 + 10
    assert [(a.mode, a.problem_id) for a in again.answers] == [(a.mode, a.problem_id) for a in whole.answers]
    assert not log.exists()


def test_answers_of_other_settings_are_not_taken_over(tiny_parent, converted, context, asked, monkeypatch):
    def killed(*arguments, **settings):
        if len(asked) == 5:
            raise KeyboardInterrupt
        return real(*arguments, **settings)

    real = evaluation.answer_problems
    monkeypatch.setattr(evaluation, "answer_problems", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(tiny_parent, converted, CONFIG, context)
    monkeypatch.setattr(evaluation, "answer_problems", real)
    asked.clear()
    evaluate_run(tiny_parent, converted, replace(CONFIG, max_tokens=21), context)
    assert len(asked) == 3 + 15


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_model(folder / "child", tiny_model(2, max_seq_len=512), tiny_diffusion())
    save_model(folder / "parent", tiny_model(3, max_seq_len=512), None)
    return folder / "parent", folder / "child"


def said(report):
    """Everything that an evaluation says but its times."""
    return [{**answer.as_json(), "seconds": 0.0} for answer in report.answers], {
        (s.mode, s.domain): (s.num_correct, s.num_truncated, s.accuracy, s.interval, s.equal_share, s.num_tokens)
        for s in report.scores
    }


def test_answers_and_scores_are_the_same_at_every_batch_size_and_over_a_restart(tiny_pair, context, monkeypatch):
    config = replace(CONFIG, modes="parent,ar,verified,diffusion", steps=(2,), max_tokens=12)
    config = replace(config, problems=(EvaluationShare(task="structured", count=8),))
    alone = said(evaluate_run(*tiny_pair, config, context))
    assert len(alone[0]) == 4 * 8
    assert said(evaluate_run(*tiny_pair, replace(config, batch_size=8), context)) == alone
    real, done, kill_at = evaluation.answer_problems, [], [7]

    def killed_at_the_seventh(*arguments, **settings):
        done.append(None)
        if len(done) == kill_at[0]:
            raise KeyboardInterrupt
        return real(*arguments, **settings)

    monkeypatch.setattr(evaluation, "answer_problems", killed_at_the_seventh)
    threes = replace(config, batch_size=3)
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(*tiny_pair, threes, context)
    done.clear()
    kill_at[0] = None
    assert said(evaluate_run(*tiny_pair, threes, context)) == alone
    # Four to warm up; of twelve turns two were done before.
    assert len(done) == 4 + 12 - 2


def test_a_batch_that_was_half_kept_is_asked_only_for_the_rest(tiny_pair, context, asked, monkeypatch):
    config = replace(CONFIG, modes="ar", batch_size=4)
    real = AnswerLog.add

    def killed(log, answer):
        if len(log.known) == 2:
            raise KeyboardInterrupt
        real(log, answer)

    monkeypatch.setattr(AnswerLog, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(*tiny_pair, config, context)
    monkeypatch.setattr(AnswerLog, "add", real)
    asked.clear()
    report = evaluate_run(*tiny_pair, config, context)
    assert len(asked) == 1 + 5 - 2
    assert len(report.answers) == 5


def test_a_problem_that_is_named_twice_is_asked_once(tiny_pair, context, asked):
    shares = (EvaluationShare(task="structured", count=3), EvaluationShare(task="structured", count=2, start=1))
    report = evaluate_run(*tiny_pair, replace(CONFIG, problems=shares, modes="ar"), context)
    assert len({answer.problem_id for answer in report.answers}) == len(report.answers) == 3


def test_where_every_answer_is_cut_off_nothing_is_right_wrong_or_known(tiny_pair, context):
    report = evaluate_run(*tiny_pair, replace(CONFIG, modes="ar,diffusion", max_tokens=1), context)
    for score in report.scores:
        assert (score.num_truncated, score.num_correct, score.accuracy) == (score.num_problems, 0, 0.0)
        assert score.interval == (0.0, 1.0)
    found = report.as_json()["against_ar"][-1]
    assert (found["num_pairs"], found["interval"]) == (0, [-1.0, 1.0])
