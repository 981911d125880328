"""Git digests are git's own, and a commit id proves a file or says which link is broken."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ar2diff.hashing import sha256_bytes
from ar2diff.provenance.git_objects import (
    FileDigest,
    build_repository,
    digest_file,
    is_pointer_file,
    object_id,
    prove_file,
    read_pointer,
    read_tree,
    write_commit,
    write_pointer,
    write_tree,
)

BIG = b"weights" * 1000
FILES = {
    "config.json": b"{}",
    "a": b"",
    "a.txt": b"sorted around the folder a-b",
    "a-b/deep/er.txt": "é".encode(),
    "model.safetensors": write_pointer(sha256_bytes(BIG), len(BIG)),
}


@pytest.fixture
def repository():
    tree_id, objects = build_repository(FILES)
    commit = write_commit(tree_id, message="one")
    commit_id = object_id("commit", commit)
    return commit_id, objects | {commit_id: commit}


def digest_of(content):
    return FileDigest(len(content), sha256_bytes(content), object_id("blob", content))


def test_ids_are_those_of_gits_documentation():
    assert object_id("blob", b"what is up, doc?") == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"
    assert object_id("tree", b"") == "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the oracle of this test alone")
def test_git_itself_gives_the_same_tree(tmp_path):
    for path, content in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    git = ["git", "-C", str(tmp_path), "-c", "core.autocrlf=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    written = subprocess.run([*git, "write-tree"], check=True, capture_output=True, text=True).stdout.strip()
    assert written == build_repository(FILES)[0]


def test_every_file_is_proven_large_ones_through_their_pointer(repository):
    commit_id, objects = repository
    for path, content in (FILES | {"model.safetensors": BIG}).items():
        assert prove_file(commit_id, path, digest_of(content), objects).holds


def test_other_bytes_are_not_proven(repository):
    commit_id, objects = repository
    for path, content in (FILES | {"model.safetensors": BIG}).items():
        proof = prove_file(commit_id, path, digest_of(content + b"x"), objects)
        assert (proof.holds, proof.broken_at) == (False, f"file {path}")


def test_a_file_of_another_name_is_not_proven(repository):
    commit_id, objects = repository
    assert prove_file(commit_id, "absent", digest_of(b"{}"), objects).broken_at == "tree /"
    assert prove_file(commit_id, "a-b/config.json", digest_of(b"{}"), objects).broken_at == "tree /a-b"


def test_any_changed_object_breaks_the_proof_and_any_absent_one_is_missing(repository):
    commit_id, objects = repository
    path, file = "a-b/deep/er.txt", digest_of(FILES["a-b/deep/er.txt"])
    links = [oid for oid in objects if not prove_file(commit_id, path, file, _without(objects, oid)).holds]
    assert len(links) == 4, "commit and three trees carry this file"
    for oid in links:
        proof = prove_file(commit_id, path, file, _without(objects, oid))
        assert oid in proof.missing
        proof = prove_file(commit_id, path, file, objects | {oid: objects[oid] + b"x"})
        assert not proof.holds
        assert proof.broken_at


def _without(objects, oid):
    return {key: value for key, value in objects.items() if key != oid}


@pytest.mark.parametrize("content", [b"100644 name", b"100644\0" + b"x" * 20, b"100644 name\0short"])
def test_a_malformed_tree_reads_as_none(content):
    assert read_tree(content) is None


def test_a_tree_reads_back(repository):
    tree = repository[1][build_repository(FILES)[0]]
    assert write_tree(read_tree(tree).values()) == tree


@given(st.integers(0, 2**62), st.text("0123456789abcdef", min_size=64, max_size=64))
def test_a_pointer_reads_back(size_bytes, sha256):
    assert read_pointer(write_pointer(sha256, size_bytes)) == (sha256, size_bytes)


def test_other_text_is_no_pointer(tmp_path):
    pointer = write_pointer("0" * 64, 5)
    for other in (b"", pointer[:-1], pointer + b"\n", pointer.replace(b"size 5", b"size 05"), b"x" + pointer):
        assert read_pointer(other) is None
    path = tmp_path / "file"
    for content, expected in ((pointer, True), (b"data", False)):
        path.write_bytes(content)
        assert is_pointer_file(path) is expected


def test_a_file_on_disk_has_the_digests_of_its_bytes(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(BIG * 400)
    assert digest_file(path) == digest_of(BIG * 400)
