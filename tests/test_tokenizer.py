"""The tokenizer: control tokens come from the template alone, and files round-trip."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ar2diff.errors import ModelError, RequestError
from ar2diff.testing.models import CONTROL_TOKENS, END_ID, START_ID, byte_tokenizer
from ar2diff.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SPITEFUL_TEXT = st.lists(
    st.one_of(PLAIN_TEXT, st.sampled_from([*CONTROL_TOKENS, "<|im_", "end|>", "\ue0f0", "\ue0f1", "\ue0f00\ue0f1"]))
).map("".join)


def with_template(template, **config):
    return Tokenizer(TOKENIZER._backend, eos_token_ids=[END_ID], chat_template=template, config=config)


def user(text):
    return [{"role": "user", "content": text}]


@given(PLAIN_TEXT)
def test_decoding_undoes_encoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(SPITEFUL_TEXT)
def test_plain_encoding_never_yields_a_control_token(text):
    ids = TOKENIZER.encode(text)
    assert not TOKENIZER.special_ids & set(ids)
    assert TOKENIZER.decode(ids, skip_special=False) == text


@given(SPITEFUL_TEXT)
def test_a_message_never_becomes_a_control_token(text):
    ids = TOKENIZER.encode_chat(user(text), add_generation_prompt=True)
    assert [idx for idx in ids if idx in TOKENIZER.special_ids] == [START_ID, END_ID, START_ID]
    rendered = TOKENIZER.render_chat(user(text), add_generation_prompt=True)
    assert TOKENIZER.decode(ids, skip_special=False) == rendered


@given(SPITEFUL_TEXT)
def test_a_role_never_becomes_a_control_token(text):
    ids = TOKENIZER.encode_chat([{"role": text, "content": "hi"}], add_generation_prompt=False)
    assert [idx for idx in ids if idx in TOKENIZER.special_ids] == [START_ID, END_ID]


def test_a_template_that_trims_does_so_whether_or_not_a_message_spells_a_control_token():
    tokenizer = with_template("{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}")
    ids = tokenizer.encode_chat(user("  a <|im_end|> b  "), add_generation_prompt=False)
    assert tokenizer.decode(ids) == "[a <|im_end|> b]"


def test_control_tokens_in_text_count_only_when_asked_for():
    assert TOKENIZER.encode("<|im_end|>", parse_special=True) == [END_ID]
    assert END_ID not in TOKENIZER.encode("<|im_end|>")
    assert TOKENIZER.decode([END_ID, 65]) == "A"
    assert TOKENIZER.decode([END_ID, 65], skip_special=False) == "<|im_end|>A"
    assert TOKENIZER.decode([0xE2, 0x82]) == "\ufffd"


def test_ids_and_texts_of_tokens_are_found_or_none():
    assert TOKENIZER.token_to_id("<|im_end|>") == END_ID
    assert TOKENIZER.id_to_token(END_ID) == "<|im_end|>"
    assert TOKENIZER.token_to_id("nowhere") is None
    assert TOKENIZER.id_to_token(9999) is None
    assert (TOKENIZER.vocab_size, TOKENIZER.max_token_id) == (260, 259)


def test_templates_may_use_the_functions_that_published_ones_use():
    template = (
        "{{ bos_token }}{{ eos_token }}{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}"
    )
    tokenizer = with_template(template, bos_token={"content": "<|im_start|>"}, eos_token="<|im_end|>")
    text = tokenizer.render_chat([*user("<é>"), *user("b")], add_generation_prompt=False)
    assert text == '<|im_start|><|im_end|>{"role": "user", "content": "<é>"}'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system turns') }}",
        "{% if %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request(template):
    with pytest.raises(RequestError, match="template"):
        with_template(template).render_chat(user("a"), add_generation_prompt=True)


def test_a_model_without_a_template_says_so():
    with pytest.raises(RequestError, match="no chat template"):
        with_template(None).encode_chat(user("a"), add_generation_prompt=True)


def test_saved_files_load_as_the_same_tokenizer(tmp_path):
    TOKENIZER.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    messages = user("hello <|im_end|> é")
    assert again.encode_chat(messages, add_generation_prompt=True) == TOKENIZER.encode_chat(
        messages, add_generation_prompt=True
    )
    for name in ("vocab_size", "max_token_id", "eos_token_ids", "special_ids", "chat_template"):
        assert getattr(again, name) == getattr(TOKENIZER, name)
    again.save(tmp_path / "again")
    for path in tmp_path.glob("*.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_the_template_may_lie_in_the_config(tmp_path):
    TOKENIZER.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    rewrite(tmp_path / "tokenizer_config.json", chat_template="{{ messages[0]['content'] }}")
    assert Tokenizer.from_folder(tmp_path).render_chat(user("a"), add_generation_prompt=False) == "a"


def rewrite(path, **changes):
    stored = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, (END_ID,)),
        ({}, {"eos_token_id": [START_ID, END_ID]}, (END_ID, START_ID)),
        ({}, {"eos_token_id": 259}, (END_ID, 259)),
        ({"eos_token_ids": [259, 258]}, {"eos_token_id": 256}, (259, 258)),
    ],
)
def test_the_turn_end_comes_first_and_declared_ends_follow(config, generation, expected, tmp_path):
    TOKENIZER.save(tmp_path)
    rewrite(tmp_path / "tokenizer_config.json", **{"eos_token_ids": None, **config})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("ends", [[9999], [-1], [True], ["256"], "256", []])
def test_an_impossible_end_token_is_refused(ends, tmp_path):
    TOKENIZER.save(tmp_path)
    rewrite(tmp_path / "tokenizer_config.json", eos_token_ids=ends)
    with pytest.raises(ModelError, match=r"end token|eos_token_ids"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}'])
def test_a_damaged_tokenizer_json_is_named(content, tmp_path):
    TOKENIZER.save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_missing_or_odd_files_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    TOKENIZER.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ messages.x.y.z }}"]
)
def test_a_template_may_fail_in_any_way(template):
    with pytest.raises(RequestError, match="template refuses"):
        with_template(template).encode_chat(user("hi"), add_generation_prompt=False)


def test_a_template_that_cuts_control_text_in_a_message_is_an_error_of_the_request():
    cutting = with_template("{{ messages[0]['content'][:1] }}")
    with pytest.raises(RequestError, match="cuts a message"):
        cutting.encode_chat(user("<|im_end|>"), add_generation_prompt=False)


def test_a_lone_surrogate_is_an_error_of_the_request():
    # JSON can spell one: "\\ud800".
    with pytest.raises(RequestError, match="not valid Unicode"):
        TOKENIZER.encode("a\ud800")
    with pytest.raises(RequestError, match="not valid Unicode"):
        TOKENIZER.encode_chat(user("a\ud800"), add_generation_prompt=True)


def test_a_template_file_that_is_no_text_is_named(tmp_path):
    TOKENIZER.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="chat template cannot be read"):
        Tokenizer.from_folder(tmp_path)
