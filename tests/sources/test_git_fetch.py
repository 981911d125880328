"""A pinned commit's own objects are retained and prove every file; what git itself packs is read."""

import shutil
import subprocess

import pytest

from ar2diff.clock import SystemClock
from ar2diff.errors import SourceError
from ar2diff.provenance.git_objects import digest_file, object_id, prove_file
from ar2diff.provenance.git_pack import apply_delta, read_pack, write_pack
from ar2diff.sources.fetch import fetch
from ar2diff.sources.git_fetch import (
    OBJECTS_NAME,
    _ask_for,
    _unwrap,
    read_git_objects,
    read_lines,
    write_git_objects,
    write_line,
)
from ar2diff.sources.spec import parse_source
from ar2diff.testing.hub import LoopbackHub

FILES = {
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "config.json": b"{}",
    "deep/er/notes.md": b"x",
    "README.md": b"A model.\n",
}


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        yield hub


def get(hub, commit, folder, *, dataset=False, files=None):
    name = "datasets/maker/tiny" if dataset else "maker/tiny"
    return fetch(
        parse_source(f"hub:{name}@{commit}"),
        folder / "out",
        cache_dir=folder / "cache",
        ledger=None,
        clock=SystemClock(),
        progress=None,
        endpoint=hub.endpoint,
    )


def test_a_fetch_keeps_the_objects_that_prove_its_files(hub, tmp_path):
    commit = hub.add_repo("maker/tiny", FILES)
    receipt = get(hub, commit, tmp_path)
    objects = read_git_objects(tmp_path / "out")
    assert commit in objects
    for file in receipt.files:
        assert prove_file(commit, file.path, digest_file(tmp_path / "out" / file.path), objects).holds
    assert sum(map(len, objects.values())) < 2000
    [asked] = [request for request in hub.requests if request.method == "POST"]
    assert not {"authorization", "cookie"} & set(asked.headers)


def test_a_data_set_is_proven_too(hub, tmp_path):
    commit = hub.add_repo("maker/tiny", {"data/train.parquet": b"PAR1"}, dataset=True)
    get(hub, commit, tmp_path, dataset=True)
    assert commit in read_git_objects(tmp_path / "out")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"zzzz",
        b"00ff",
        write_line(b"ERR no"),
        write_line(b"packfile\n") + write_line(b"\x03no"),
        write_line(b"packfile\n") + write_line(b"\x01PACK"),
        write_line(b"packfile\n") + write_line(b"\x01" + write_pack({})),
    ],
)
def test_a_hub_without_its_git_side_still_gives_the_files(hub, tmp_path, answer):
    commit = hub.add_repo("maker/tiny", FILES)
    hub.faults.no_git, hub.faults.git_answer = answer is None, answer or None
    get(hub, commit, tmp_path)
    assert answer == b"" or not (tmp_path / "out" / OBJECTS_NAME).exists()


def test_a_listing_that_is_not_the_commits_is_refused(hub, tmp_path):
    commit = hub.add_repo("maker/tiny", FILES)
    hub.repos["maker/tiny"][commit].files["config.json"] = b'{"a": 1}'
    with pytest.raises(SourceError, match="not the commit's"):
        get(hub, commit, tmp_path)


def test_an_object_that_is_not_its_id_is_left_out(tmp_path):
    tree = object_id("tree", b"")
    write_git_objects(tmp_path, {tree: b"", "0" * 40: b""})
    assert set(read_git_objects(tmp_path)) == {tree}


def run_git(folder, *command, **options):
    environ = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", **options.pop("env", {})}
    return subprocess.run(
        ["git", "-C", str(folder), *command], env=environ, capture_output=True, check=True, **options
    ).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_itself_answers_the_request_and_its_packs_with_deltas_are_read(tmp_path):
    run_git(tmp_path, "init", "-q")
    for part in ("a", "b"):
        folder = tmp_path / part
        folder.mkdir()
        for idx in range(120):
            (folder / f"file-{idx:03}").write_text(str(idx))
        (folder / "own").write_text(part)
    run_git(tmp_path, "config", "uploadpack.allowFilter", "true")
    run_git(tmp_path, "config", "uploadpack.allowAnySHA1InWant", "true")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "one")
    commit = run_git(tmp_path, "rev-parse", "HEAD").decode().strip()
    answer = run_git(
        tmp_path, "upload-pack", "--stateless-rpc", ".", input=_ask_for(commit), env={"GIT_PROTOCOL": "version=2"}
    )
    objects = {oid: content for oid, (_, content) in read_pack(_unwrap(answer)).items()}
    assert len(objects) == 4
    proof = prove_file(commit, "b/file-007", digest_file(tmp_path / "b/file-007"), objects)
    assert proof.holds
    packed = run_git(tmp_path, "pack-objects", "--all", "--stdout", "-q")
    assert objects.items() <= {oid: content for oid, (_, content) in read_pack(packed).items()}.items()


def test_a_damaged_pack_is_refused():
    pack = write_pack({"x": ("tree", b"abc" * 500), "y": ("commit", b"")})
    assert set(read_pack(pack)) == {object_id("tree", b"abc" * 500), object_id("commit", b"")}
    for at in range(0, len(pack), 3):
        with pytest.raises(ValueError, match="pack"):
            read_pack(pack[:at] + bytes([pack[at] ^ 1]) + pack[at + 1 :])


def test_a_delta_of_another_base_is_refused():
    assert apply_delta(b"hello", b"\x05\x07\x90\x05\x02, ") == b"hello, "
    with pytest.raises(ValueError, match="another base"):
        apply_delta(b"hell", b"\x05\x07\x90\x05\x02, ")
    with pytest.raises(ValueError, match="damaged"):
        apply_delta(b"hello", b"\x05\x08\x90\x05\x02, ")


def test_a_cut_line_is_refused():
    assert list(read_lines(write_line(b"a") + b"0000")) == [b"a", None]
    with pytest.raises(ValueError, match="cut"):
        list(read_lines(b"0009a"))
