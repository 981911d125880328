"""A source's text pins every byte, reads back to itself, and a wrong one is told the right form."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ar2diff.errors import SourceError
from ar2diff.sources.spec import (
    EMBEDDED_BASE,
    HubSource,
    LocalSource,
    ProceduralSource,
    PypiSource,
    is_inside,
    parse_source,
)

COMMIT, DIGEST = "a1" * 20, "0f" * 32

digests = st.text("0123456789abcdef", min_size=64, max_size=64)
commits = st.text("0123456789abcdef", min_size=40, max_size=40)
names = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,8}[A-Za-z0-9])?", fullmatch=True)
members = st.lists(st.text(string.ascii_letters + "+&=# %é", min_size=1), min_size=1, max_size=3).map("/".join)
counts = st.integers(0, 10**9)

sources = st.one_of(
    st.builds(
        HubSource,
        repo_id=st.builds("{}/{}".format, names, names),
        revision=commits,
        repo_type=st.sampled_from(["model", "dataset"]),
        files=st.none() | st.sampled_from(["data/train-*", "a+b&c=d%20#?.parquet"]),
    ),
    st.builds(PypiSource, name=names, version=st.just("1.2.post3"), sha256=digests),
    st.builds(PypiSource, name=names, version=st.just("0.1"), sha256=digests, member=members, member_sha256=digests),
    st.builds(LocalSource, path=st.text(string.ascii_letters + "/ @#:", min_size=1), sha256=st.none() | digests),
    st.builds(
        ProceduralSource,
        library=names,
        version=st.just("0.1.20"),
        task=names,
        count=st.integers(1, 10**9),
        seed=counts,
        start=counts,
    ),
)


@given(sources)
def test_canonical_text_reads_back_to_an_equal_source(source):
    assert parse_source(str(source)) == source


@given(st.text(max_size=40) | st.builds("{}:{}".format, st.sampled_from(["hub", "pypi", "procedural"]), st.text()))
def test_any_text_is_a_source_or_a_source_error(text):
    try:
        source = parse_source(text)
    except SourceError:
        return
    assert parse_source(str(source)) == source


def test_the_four_kinds_are_told_apart():
    assert parse_source(f"hub:owner/name@{COMMIT}").repo_type == "model"
    assert parse_source(f"hub:models/owner/name@{COMMIT}").repo_id == "owner/name"
    assert parse_source(f"hub:datasets/owner/name@{COMMIT}").repo_type == "dataset"
    assert parse_source(f"local:a b.jsonl#sha256={DIGEST}") == LocalSource(path="a b.jsonl", sha256=DIGEST)
    assert parse_source("procedural:lib==1.0/sums?count=5") == ProceduralSource(
        library="lib", version="1.0", task="sums", count=5
    )


@pytest.mark.parametrize("revision", ["main", COMMIT[:7], COMMIT[:39], COMMIT.upper(), "refs/pr/1"])
def test_a_revision_that_can_change_is_refused_with_the_way_out(revision):
    with pytest.raises(SourceError, match="--resolve"):
        parse_source(f"hub:owner/name@{revision}")
    source = parse_source(f"hub:owner/name@{revision}", allow_branch=True)
    assert source.revision == revision
    assert not source.is_pinned


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("", "hub:owner/name@<40 hex>"),
        ("owner/name", "hub:owner/name@<40 hex>"),
        ("s3:bucket", "pypi:name==version"),
        ("hub:owner/name", "hub:owner/name@<40 hex>"),
        ("hub:owner/name@", "hub:owner/name@<40 hex>"),
        (f"hub:../name@{COMMIT}", "hub:owner/name@<40 hex>"),
        (f"hub:a/b/c@{COMMIT}", "hub:owner/name@<40 hex>"),
        (f"hub:a/..@{COMMIT}", "hub:owner/name@<40 hex>"),
        (f"hub:owner/name@{COMMIT}#files=../x", "#files="),
        (f"hub:owner/name@{COMMIT}#file=x", "#files="),
        (f"hub:owner/name@{COMMIT}#", "#files="),
        ("pypi:name", "pypi:name==version"),
        ("pypi:name==1", "#sha256="),
        ("pypi:name==1#sha256=abc", "<64 hex>"),
        (f"pypi:na me==1#sha256={DIGEST}", "pypi:name==version"),
        (f"pypi:name==1;#sha256={DIGEST}", "pypi:name==version"),
        (f"pypi:name==1#sha256={DIGEST}&other=1", "pypi:name==version"),
        (f"pypi:name==1#sha256={DIGEST}&member=../x", "member"),
        (f"pypi:name==1#sha256={DIGEST}&member=/etc/x", "member"),
        (f"pypi:name==1#sha256={DIGEST}&member_sha256={DIGEST}", "member"),
        ("local:", "local:path"),
        ("local:x#sha256=zz", "<64 hex>"),
        ("procedural:lib", "procedural:library==version/task"),
        ("procedural:lib==1/sums", "count="),
        ("procedural:lib==1/sums?count=0", "count="),
        ("procedural:lib==1/sums?count=-1", "count="),
        ("procedural:lib==1/sums?count=1&temperature=2", "count="),
        ("procedural:lib==1/?count=1", "procedural:library==version/task"),
    ],
)
def test_a_wrong_text_is_told_the_right_form(text, form):
    with pytest.raises(SourceError) as caught:
        parse_source(text, allow_branch=True)
    assert form in str(caught.value)


@pytest.mark.parametrize("path", ["", ".", "..", "/a", "a/../b", "a//b", "a/", "a\\b", "a\0b"])
def test_paths_that_could_leave_a_folder_are_not_inside(path):
    assert not is_inside(path)


def test_the_embedded_base_pins_wheel_and_member():
    assert parse_source(str(EMBEDDED_BASE)) == EMBEDDED_BASE
    assert EMBEDDED_BASE.member_sha256


def test_the_model_that_comes_through_the_package_index_has_a_short_name() -> None:
    assert parse_source("embedded:smollm2-135m") == EMBEDDED_BASE
    with pytest.raises(SourceError, match=r"unknown kind of source.*embedded:smollm2-136m.*embedded:smollm2-135m"):
        parse_source("embedded:smollm2-136m")
