"""A recipe file is taken as it is written or refused in one line; the shipped ones are always good."""

import tomllib
from pathlib import Path

import pytest

from ar2diff.errors import Ar2diffError, ConfigError, SourceError
from ar2diff.pipelines.recipe import EvaluationConfig, find_recipe, load_recipe, parse_recipe

SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
SMALL = {
    "base": {"source": "local:x.gguf"},
    "data": {
        "sources": [{"source": "procedural:structured", "count": 5}],
        "evaluation": [{"task": "structured", "count": 10}],
    },
    "train": {"steps": 3},
}


def changed(section, **keys):
    return {**SMALL, section: {**SMALL.get(section, {}), **keys}}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_read_and_found_by_its_name(path):
    recipe = load_recipe(path)
    assert parse_recipe(recipe.as_json() | {"train": tomllib.loads(path.read_text())["train"]}) == recipe
    assert find_recipe(path.stem).read_bytes() == path.read_bytes()


def test_there_are_shipped_recipes_and_a_wrong_name_lists_them():
    with pytest.raises(ConfigError, match="smollm2-135m_cpu") as caught:
        find_recipe("smollm")
    assert all(path.stem in caught.value.one_line() for path in SHIPPED)
    assert len(SHIPPED) >= 2


def test_what_a_recipe_leaves_out_is_the_default():
    recipe = parse_recipe(SMALL)
    assert recipe.evaluate == EvaluationConfig()
    assert recipe.train.micro == 8


def test_arrays_fill_tuples_and_nested_sections_their_configs():
    recipe = parse_recipe(
        changed("train", objective={"block_sizes": [4, 8], "noise": {"all_mask_share": 0.25}}, optim={"lr": 1e-3})
    )
    assert recipe.train.objective.block_sizes == (4, 8)
    assert recipe.train.objective.noise.all_mask_share == 0.25
    assert recipe.train.optim.lr == 1e-3


@pytest.mark.parametrize(
    ("content", "key", "nearest"),
    [
        ({**SMALL, "trian": {}}, "trian", "train"),
        (changed("train", stpes=3), "train.stpes", "steps"),
        (changed("train", objective={"block_size": 4}), "train.objective.block_size", "block_sizes"),
        (
            changed("train", objective={"noise": {"all_mask_shre": 1}}),
            "train.objective.noise.all_mask_shre",
            "all_mask_share",
        ),
        (changed("data", sources=[{"sorce": "x"}]), "data.sources.sorce", "source"),
        (changed("evaluate", problems=[{"tsak": "structured", "count": 1}]), "evaluate.problems.tsak", "task"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(content, key, nearest):
    with pytest.raises(ConfigError) as caught:
        parse_recipe(content)
    assert (caught.value.problem, caught.value.given) == ("unknown recipe key", key)
    assert caught.value.fix == f"The nearest known key is {nearest}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed("train", steps="3"), r"train\.steps"),
        (changed("train", steps=3.5), r"train\.steps"),
        (changed("train", steps=True), r"train\.steps"),
        (changed("data", max_document_len="256"), r"data\.max_document_len"),
        ({**SMALL, "base": 3}, "base"),
        (changed("base", source="local:a\x00b"), "null character"),
        ({**SMALL, "base": {}}, r"base\.source"),
        (changed("train", optim={"lr": float("nan")}), r"train\.optim\.lr is not a finite number"),
        (changed("evaluate", minutes=float("inf")), r"evaluate\.minutes is not a finite number"),
        (changed("evaluate", steps=[1, float("inf")]), r"evaluate\.steps is not a finite number"),
        (changed("train", steps=-3), "steps must be at least 1"),
        (changed("train", minutes=1.0), "either steps or minutes"),
        (changed("evaluate", precision="fp8"), "precision"),
        (changed("evaluate", modes="ar,fast"), "unknown mode.*fast"),
        (changed("evaluate", steps=[0]), "at least 1"),
        (changed("evaluate", thresholds=[1.5]), "at most 1"),
        (changed("evaluate", max_tokens=0), "max_tokens"),
        (changed("evaluate", minutes=0.0), "minutes"),
        (changed("evaluate", bits_problems=-1), "bits_problems"),
        (changed("evaluate", problems=[{"task": "riddles", "count": 1}]), "unknown task.*riddles"),
        (changed("data", evaluation=[{"task": "riddles", "count": 1}]), "unknown task.*riddles"),
        (changed("data", sources=[{"source": "procedural:riddles", "count": 1}]), "unknown task.*riddles"),
        (changed("data", sources=[{"source": "local:x.jsonl", "recipe": "riddles"}]), "unknown recipe.*riddles"),
    ],
)
def test_a_wrong_type_or_value_is_named(content, said):
    with pytest.raises(ConfigError, match=said):
        parse_recipe(content)


def test_an_unknown_precision_is_refused_where_no_file_is_read():
    with pytest.raises(ConfigError, match="fp32, bf16, int8, auto"):
        EvaluationConfig(precision="fp8")


@pytest.mark.parametrize("source", ["smollm", "hub:nobody", "embedded:other"])
def test_a_source_that_cannot_be_is_named_before_anything_is_fetched(source):
    with pytest.raises(SourceError):
        parse_recipe(changed("base", source=source))
    with pytest.raises(Ar2diffError):
        parse_recipe(changed("data", sources=[{"source": source}]))


@pytest.mark.parametrize("section", ["base", "data", "train"])
def test_a_missing_section_says_what_it_takes(section):
    with pytest.raises(ConfigError, match=rf"no section \[{section}\].*it takes"):
        parse_recipe({name: content for name, content in SMALL.items() if name != section})


@pytest.mark.parametrize(
    "problems",
    [
        {"task": "structured", "count": 11},
        {"task": "structured", "count": 1, "start": 10},
        {"task": "reasoning", "count": 1},
    ],
)
def test_only_problems_that_are_kept_out_of_the_data_may_be_evaluated(problems):
    with pytest.raises(ConfigError, match="does not keep out of training"):
        parse_recipe(changed("evaluate", problems=[problems]))
    assert parse_recipe(changed("evaluate", problems=[{"task": "structured", "count": 4, "start": 6}]))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[base", "not readable TOML"), (b"\xff\xfe", "not readable TOML"), (None, "no such recipe")],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, said):
    path = tmp_path / "odd.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_recipe(path)


def test_a_folder_in_place_of_a_recipe_is_named(tmp_path):
    with pytest.raises(ConfigError, match="not readable TOML"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("text", ["steps = " + "9" * 5000, "a = " + "[" * 50_000, "\x00", "a = 1\na = 2"])
def test_a_text_that_the_parser_cannot_take_is_named(tmp_path, text):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not readable TOML"):
        load_recipe(path)


@pytest.mark.parametrize(
    "content",
    [
        changed("train", seed=2**53),
        changed("train", steps=10**18),
        changed("data", sources=[{"source": "procedural:structured", "count": 10**18}]),
        changed("evaluate", steps=[10**18]),
    ],
)
def test_a_number_that_the_ledger_cannot_hold_is_refused(content):
    with pytest.raises(ConfigError, match="beyond 53 bits"):
        parse_recipe(content)


@pytest.mark.parametrize("changes", [{"minutes": float("inf")}, {"steps": (10**18,)}, {"max_tokens": 10**18}])
def test_an_absurd_evaluation_is_refused_where_no_file_is_read(changes):
    with pytest.raises(ConfigError):
        EvaluationConfig(**changes)


def test_on_policy_rounds_are_refused_where_blocks_begin_with_the_last_token():
    train = {**SMALL["train"], "objective": {"block_sizes": [4], "anchor": "last"}}
    parse_recipe({**SMALL, "train": train})
    with pytest.raises(ConfigError, match="begin with the last token"):
        parse_recipe({**SMALL, "train": train, "on_policy": {}})
