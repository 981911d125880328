"""Drafts copied from what was said before: what is found, what it costs, and that it changes no answer."""

import random

import pytest

from ar2diff.engine import session, verify
from ar2diff.engine.constraint import Constraint
from ar2diff.engine.copying import MAX_PLACES, CopyDrafts
from ar2diff.engine.request import Request


def find(ids, count):
    copies = CopyDrafts()
    copies.add(ids)
    return copies.find(count)


@pytest.mark.parametrize(
    ("ids", "count", "wanted"),
    [
        ([], 3, ([], 0)),
        ([5], 3, ([], 0)),
        ([1, 2, 3], 3, ([], 0)),
        ([1, 2, 1], 0, ([], 0)),
        ([1, 2, 8, 9, 1], 3, ([2, 8, 9], 1)),
        ([1, 2, 8, 1, 3, 8, 1], 2, ([3, 8], 2)),  # of equal matches the latest
        ([7, 1, 2, 6, 1, 3, 7, 1], 2, ([2, 6], 2)),  # a longer match wins over a later one
        ([4, 5, 4], 5, ([5, 4, 5, 4, 5], 1)),  # a loop goes on
        ([6, 6], 4, ([6, 6, 6, 6], 1)),
        ([1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5], 1, ([8], 4)),
    ],
)
def test_the_longest_match_is_copied(ids, count, wanted):
    assert find(ids, count) == wanted


def test_copies_are_what_a_plain_search_finds():
    """Against a restatement over random texts of few letters, added piece by piece."""
    draw = random.Random(3)
    for _ in range(300):
        ids = [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
        copies, at, count = CopyDrafts(), 0, draw.randrange(1, 9)
        while at < len(ids):
            piece = draw.randrange(1, 6)
            copies.add(ids[at : at + piece])
            at += piece
        matches = [
            (length, place)
            for place in range(len(ids) - 1)
            for length in range(1, min(4, place + 1) + 1)
            if ids[place + 1 - length : place + 1] == ids[len(ids) - length :]
        ]
        if not matches:
            assert copies.find(count) == ([], 0)
            continue
        length, place = max(matches)
        said = list(ids)
        for _ in range(count):
            said.append(said[place + 1 + len(said) - len(ids)])
        assert copies.find(count) == (said[len(ids) :], length)


def test_a_search_looks_at_a_bounded_number_of_places():
    long_match = [3, 4, 5, 9]
    near = [*long_match, *[8, 5] * (MAX_PLACES - 2), 3, 4, 5]
    assert find(near, 1).match_len == 3
    assert find([*long_match, *[8, 5] * MAX_PLACES, 3, 4, 5], 1).match_len == 1


def ask(**settings):
    return Request(**{"prompt_ids": (97, 98, 99, 97, 98), "max_tokens": 40, "mode": "verified"} | settings)


@pytest.mark.parametrize("block_size", [1, 2, 8])
@pytest.mark.parametrize(
    "drafting",
    [
        {},
        {"adaptive_draft": True, "draft_len": 3},
        {"draft_len": "auto"},
        {"draft_lanes": 2},
        {"denoising_steps": 3},
        {"stop": ("e", "\x02")},
        {"frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"constraint": Constraint.regex("([ab]c|ca){3,30}")},
    ],
)
def test_greedy_answers_are_the_ar_answers(kit, block_size, drafting):
    num_copied = 0
    for seed in range(4):
        engine = kit.engine(kit.loaded(seed=seed, block_size=8), pass_seconds=((1, 1.0), (8, 1.5)))
        asked = drafting | {"block_size": block_size}
        found = engine.generate(ask(copy_drafts=True, **asked))
        ar = engine.generate(ask(**{**asked, "mode": "ar"}))
        assert (found.token_ids, found.text, found.finish_reason) == (ar.token_ids, ar.text, ar.finish_reason)
        assert found.logprobs == pytest.approx(ar.logprobs, abs=1e-4)
        num_copied += found.num_copied
    assert num_copied > 0 if block_size == 8 else block_size > 1 or num_copied == 0


def loop(kit, text="abc", length=256):
    """A model that says "abc" over and over, and drafts it wrong."""
    loaded = kit.loaded(block_size=8, max_seq_len=256)
    return kit.script(loaded, {place: ord(text[place % len(text)]) for place in range(length)}).attach(
        kit.engine(loaded)
    )


def test_a_copied_draft_costs_no_pass_and_counts_apart(kit):
    asked = {"prompt_ids": tuple(b"abcabcabc"), "max_tokens": 33}
    found = loop(kit).generate(ask(copy_drafts=True, **asked))
    assert found.text == "abc" * 11
    # The prompt gives the first token; four whole cycles of 7 copies and the AR path's token give the others.
    assert found.num_forward_passes == 5
    assert (found.num_copied, found.num_copied_accepted) == (28, 28)
    assert sum(found.drafted_by_offset) == 0
    assert found.passes_per_block[1:] == (0,) * 4


def test_without_copies_nothing_is_copied(kit):
    found = loop(kit).generate(ask(prompt_ids=tuple(b"abcabcabc"), max_tokens=33))
    assert (found.num_copied, found.num_copied_accepted) == (0, 0)
    assert sum(found.drafted_by_offset) > 0


def test_copies_that_are_never_accepted_give_way_to_drafts_of_the_model(kit):
    """Every "a" of the answer is followed by a byte that was not there before."""
    loaded = kit.loaded(block_size=8, max_seq_len=256)
    others = (byte for byte in range(33, 127) if byte not in b"ab")
    said = {place: next(others) if place % 3 else ord("a") for place in range(40, 170)}
    engine = kit.script(loaded, said).attach(kit.engine(loaded))
    found = engine.generate(ask(prompt_ids=tuple(b"ab" * 20), copy_drafts=True, max_tokens=120))
    assert list(found.token_ids) == [said[place] for place in range(40, 160)]
    assert found.num_copied_accepted == 0
    assert 0 < found.num_copied < 20
    assert sum(found.accepted_by_offset) > 80


def test_passes_that_grow_with_rows_leave_no_copy(kit):
    steep = kit.engine(kit.loaded(block_size=8), pass_seconds=((1, 1.0), (8, 80.0)))
    asked = {"prompt_ids": tuple(b"abcabcabc"), "draft_len": "auto", "copy_drafts": True}
    assert steep.generate(ask(**asked)).num_copied == 0
    flat = kit.engine(kit.loaded(block_size=8), pass_seconds=((1, 1.0), (8, 1.0)))
    assert flat.generate(ask(**asked)).num_copied > 0


def test_nothing_is_copied_behind_an_end_of_turn(kit):
    end = kit.END
    loaded = kit.loaded(block_size=8)
    said = dict(enumerate([97, 98, end, 99, 97, 98, end], start=5))
    prompt = (99, 97, 98, end, 99)
    found = (
        kit.script(loaded, {**said, 5: 97, 6: 98, 7: end})
        .attach(kit.engine(loaded))
        .generate(ask(prompt_ids=prompt, copy_drafts=True))
    )
    assert (found.text, found.finish_reason) == ("ab", "stop")
    assert found.num_copied == found.num_copied_accepted == 2


def test_drafts_never_pass_the_limit(kit):
    for max_tokens in range(1, 12):
        found = loop(kit).generate(ask(prompt_ids=tuple(b"abcabc"), copy_drafts=True, max_tokens=max_tokens))
        assert found.text == ("abc" * 4)[:max_tokens]
        assert found.finish_reason == "length"
        # The prompt gives the first token, the AR path the last one.
        assert found.num_copied <= max(0, max_tokens - 2)


def test_copies_that_the_form_forbids_are_not_drafted(kit):
    form = Constraint.regex("(abz){1,9}")
    asked = {"prompt_ids": tuple(b"abcabc"), "draft_len": 1, "constraint": form, "max_tokens": 18}
    found = loop(kit).generate(ask(copy_drafts=True, **asked))
    assert found.text == "abz" * 6
    # "ab", never "abc"; from the second round on the answer itself is copied.
    assert found.num_copied == found.num_copied_accepted > 0


def capture_copies(monkeypatch, *, num_failed=0):
    """The copies of the requests to come; in the record of each are so many copies of which nothing was kept."""
    made = []

    class Seen(CopyDrafts):
        def __init__(self):
            super().__init__()
            for _ in range(num_failed):
                self.logs[4].add(7, 0)
            made.append(self)

    monkeypatch.setattr(session, "CopyDrafts", Seen)
    return made


def test_the_record_is_kept_by_the_length_of_the_match(kit, monkeypatch):
    made = capture_copies(monkeypatch)
    loop(kit).generate(ask(prompt_ids=tuple(b"abcabcabc"), copy_drafts=True, max_tokens=33))
    assert [sum(made[0].logs[length].drafted_by_offset) for length in (1, 2, 3, 4)] == [0, 0, 0, 28]


def test_a_bad_record_fades_while_the_model_drafts(kit, monkeypatch):
    monkeypatch.setattr(verify, "FADING", 0.75)
    capture_copies(monkeypatch, num_failed=20)
    found = loop(kit).generate(ask(prompt_ids=tuple(b"abcabcabc"), copy_drafts=True, max_tokens=120))
    assert sum(found.accepted_by_offset) >= 21  # the first drafts are the model's
    assert found.num_copied_accepted >= 21
