"""The compiled library: built once per source, compiler and processor; what cannot be built is said."""

import multiprocessing

import native_kit as kit
import pytest
import torch

from ar2diff.engine.config import EngineConfig
from ar2diff.engine.native import build
from ar2diff.engine.native.build import build_library
from ar2diff.engine.native.runner import MAX_HEAD_DIM
from ar2diff.engine.precision import build_runner
from ar2diff.engine.runner import Runner
from ar2diff.errors import BuildError, ConfigError, UnsupportedModelError


def write_compiler(folder, body):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_library_is_built_once_and_whole(library_dir, monkeypatch):
    path = build_library(library_dir)
    assert [entry for entry in library_dir.iterdir() if ".partial-" in entry.name] == []
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build_library(library_dir) == path


def test_other_sources_give_another_library(tmp_path, library_dir, monkeypatch):
    first = build_library(library_dir)
    changed = tmp_path / "csrc"
    changed.mkdir()
    for source in build.SOURCES.iterdir():
        (changed / source.name).write_text(source.read_text() + "\n/* changed */\n")
    monkeypatch.setattr(build, "SOURCES", changed)
    monkeypatch.setattr(build, "_compile", lambda *_: None)
    assert build_library(library_dir) != first


def test_a_machine_without_a_compiler_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="needs a C compiler"):
        build_library(tmp_path)


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path):
    compiler = write_compiler(
        tmp_path, 'case "$*" in *-dM*) echo "#define A 1";; *) echo "bad flag -x" >&2; exit 1;; esac'
    )
    with pytest.raises(BuildError, match="bad flag -x"):
        build_library(tmp_path / "cache", compiler=compiler)
    assert list((tmp_path / "cache").iterdir()) == []


def test_int8_is_refused_and_auto_says_why_where_nothing_can_be_built(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    decoder = kit.build_decoder()
    with pytest.raises(BuildError):
        build_runner(decoder, EngineConfig(precision="int8", library_dir=tmp_path))
    runner, reason = build_runner(decoder, EngineConfig(precision="auto", library_dir=tmp_path))
    assert not runner.rows_are_independent
    assert reason.startswith("float32: int8 decoding needs a C compiler")


@pytest.mark.parametrize(
    "overrides", [{"norm_placement": "post"}, {"qk_norm": "flat"}, {"qk_norm": "head", "head_dim": 1026}]
)
def test_an_architecture_that_the_c_code_does_not_know_is_refused(library_dir, overrides):
    with pytest.raises(UnsupportedModelError, match="int8 decoding does not know"):
        kit.build_runner(kit.build_decoder(**overrides), library_dir)


def test_int8_needs_a_folder_and_a_known_name(tmp_path):
    with pytest.raises(ConfigError, match="library_dir"):
        EngineConfig(precision="int8")
    with pytest.raises(ConfigError, match="unknown precision"):
        EngineConfig(precision="int4", library_dir=tmp_path)


def _run_in_child(runner, ids, queue):
    queue.put(kit.run_chunks(runner, ids, [12]).tolist())


def test_a_forked_child_computes_the_same(library_dir):
    runner = kit.build_runner(kit.build_decoder(), library_dir, num_threads=2)
    ids = torch.arange(12)
    wanted = kit.run_chunks(runner, ids, [12]).tolist()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_run_in_child, args=(runner, ids, queue))
    child.start()
    assert queue.get() == wanted
    child.join(timeout=30)
    assert child.exitcode == 0


def test_the_widest_heads_with_norms_and_wider_ones_without_are_known(library_dir):
    for overrides in ({"qk_norm": "head", "head_dim": MAX_HEAD_DIM}, {"head_dim": MAX_HEAD_DIM + 2}):
        decoder = kit.build_decoder(num_heads=2, num_kv_heads=1, **overrides)
        hidden = kit.run_chunks(kit.build_runner(decoder, library_dir), torch.arange(5), [5])
        plain = Runner(decoder)
        plain.reserve(5)
        wanted = kit.run_chunks(plain, torch.arange(5), [5])
        torch.testing.assert_close(hidden, wanted, atol=0.1, rtol=0.1)
    assert f"#define MAX_HEAD_DIM {MAX_HEAD_DIM} " in (build.SOURCES / "native.h").read_text()
