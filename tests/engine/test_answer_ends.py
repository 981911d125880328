"""Where an answer ends: end tokens, stop texts, limits; shown on models that say exactly what a test wants."""

import pytest

from ar2diff.engine.request import Request

PROMPT = (10, 11, 12)
MODES = ["diffusion", "verified", "ar"]


def say(kit, text_or_ids, *, request=None, shift=True, confidence=None, **asked):
    """Run a model that says these tokens after the prompt, then "a" for ever."""
    ids = list(text_or_ids.encode()) if isinstance(text_or_ids, str) else list(text_or_ids)
    loaded = kit.loaded(shift=shift)
    tokens = {len(PROMPT) + idx: token_id for idx, token_id in enumerate(ids)}
    places = {len(PROMPT) + idx: value for idx, value in (confidence or {}).items()}
    engine = kit.script(loaded, tokens, confidence=places).attach(kit.engine(loaded))
    return list(engine.stream(Request(prompt_ids=PROMPT, **{"max_tokens": 30, "trace": True, **asked})))


def answer(kit, text_or_ids, **asked):
    return say(kit, text_or_ids, **asked)[-1].generation


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 6, 7, 8])
def test_an_end_of_turn_at_any_place_of_a_block_cuts_there(kit, mode, shift, length):
    if not shift and mode != "diffusion":
        mode = "diffusion"
    got = answer(kit, [*b"bcdefghi"[:length], kit.END], mode=mode, shift=shift)
    assert got.text == "bcdefghi"[:length]
    assert got.token_ids == tuple(b"bcdefghi"[:length])
    assert got.finish_reason == "stop"


@pytest.mark.parametrize("shift", [True, False])
def test_an_end_token_to_the_right_never_ends_the_answer_while_masks_remain_left_of_it(kit, shift):
    # The end at place 2 is the surest; what lies left of it comes one pass at a time, right of it nothing does.
    sure = {1: 6.0, 2: 12.0, 3: 7.0, 0: 5.0}
    steps = say(kit, [*b"bc", kit.END, *b"de"], shift=shift, confidence=sure, policy="top_k")
    shown = [step.token_ids for step in steps]
    assert (None, None, kit.END, None) in shown or (98, None, kit.END, None) in shown
    assert all(step.token_ids[3] is None for step in steps)
    assert [step.generation is None for step in steps] == [True] * (len(steps) - 1) + [False]
    assert steps[-1].generation.text == "bc"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("STOP",), "say "),
        (("y S",), "sa"),
        (("OP", "STO"), "say "),
        (("x", "s"), ""),
        (("zzz",), "say STOP and more"),
        (("STOQ", "STOP a"), "say "),
        (("TOP", "STOP"), "say "),
    ],
)
def test_a_stop_text_across_tokens_and_blocks_cuts_where_the_first_is_complete(kit, mode, stops, text):
    steps = say(kit, [*b"say STOP and more", kit.END], mode=mode, stop=stops)
    got = steps[-1].generation
    assert got.text == text
    assert "".join(step.text for step in steps) == text
    assert got.finish_reason == "stop"


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_text_inside_one_token_cuts_inside_it(kit, mode):
    ids = [*b"g", kit.WIDE, *b"h"]
    assert answer(kit, ids, mode=mode, stop=("STOP",)).text == "go"
    assert answer(kit, ids, mode=mode, stop=("STOP",), include_stop=True).text == "goSTOP"
    assert answer(kit, ids, mode=mode, stop=("STOP",)).token_ids == (ord("g"), kit.WIDE)


@pytest.mark.parametrize("mode", MODES)
def test_characters_of_several_bytes_stream_whole(kit, mode):
    text = "aé€😀b"
    steps = say(kit, [*text.encode(), kit.END], mode=mode)
    pieces = [step.text for step in steps]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("mode", MODES)
def test_a_character_cut_by_the_limit_shows_as_a_replacement(kit, mode):
    got = answer(kit, "a😀", mode=mode, max_tokens=3)
    assert got.text == "a\ufffd"
    assert got.finish_reason == "length"


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_only_says_the_end_gives_an_empty_answer(kit, mode):
    got = answer(kit, [kit.END] * 20, mode=mode)
    assert (got.token_ids, got.text, got.finish_reason) == ((), "", "stop")


@pytest.mark.parametrize("mode", MODES)
def test_pad_tokens_show_no_text_and_end_by_length(kit, mode):
    got = answer(kit, [kit.PAD] * 30, mode=mode, max_tokens=6)
    assert (got.text, got.finish_reason, len(got.token_ids)) == ("", "length", 6)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_always_predicts_mask_still_never_emits_it(kit, mode):
    got = answer(kit, [kit.MASK] * 30, mode=mode, max_tokens=6)
    assert got.token_ids == (0,) * 6  # all other logits tie: the lowest id


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_text_that_only_began_is_part_of_the_answer(kit, mode):
    steps = say(kit, [*b"tell ST", kit.END], mode=mode, stop=("STOP",))
    assert steps[-1].generation.text == "tell ST"
    assert [step.text for step in steps if "S" in step.text]
