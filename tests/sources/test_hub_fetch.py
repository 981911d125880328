"""A hub repository at a commit arrives whole and verified, or one line says what is wrong."""

import hashlib

import pytest

from ar2diff.errors import ConfigError, SourceError, SpaceError
from ar2diff.provenance.git_objects import digest_file, prove_file
from ar2diff.sources.cache import Expected
from ar2diff.sources.fetch import verify_files
from ar2diff.sources.git_fetch import OBJECTS_NAME
from ar2diff.sources.receipt import RECEIPT_NAME, read_receipt
from ar2diff.sources.spec import HubSource
from ar2diff.sources.transfer import Network

# The shared fixtures' files, repeated where a claim needs the content.
WEIGHTS = bytes(range(256)) * 400
ALLOWED = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]


def file_requests(hub):
    return [request for request in hub.requests if "/resolve/" in request.path and "/cdn/" not in request.path]


def test_allowed_files_arrive_and_pickles_and_others_are_not_even_asked_for(hub, model, fetch_here, tmp_path):
    receipt = fetch_here(model)
    assert [file.path for file in receipt.files] == ALLOWED
    assert (tmp_path / "base/model.safetensors").read_bytes() == WEIGHTS
    assert verify_files(tmp_path / "base", receipt) == []
    assert not any(".bin" in request.path or "notes" in request.path for request in file_requests(hub))
    assert sorted(p.name for p in (tmp_path / "base").iterdir()) == sorted([RECEIPT_NAME, OBJECTS_NAME, *ALLOWED])


def test_the_receipt_names_what_the_server_answered(hub, model, fetch_here, tmp_path):
    receipt = fetch_here(model)
    assert (receipt.kind, receipt.source, receipt.revision) == ("hub", str(model), model.revision)
    for file in receipt.files:
        assert file.status == 200
        assert file.url == f"{hub.endpoint}/owner/name/resolve/{model.revision}/{file.path}"
    weights = next(file for file in receipt.files if file.path == "model.safetensors")
    assert weights.etag == weights.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert {entry.path for entry in receipt.tree} >= {"extra", "pytorch_model.bin", "model.safetensors"}
    assert read_receipt(tmp_path / "base") == receipt


def test_a_fetched_file_is_proven_by_the_commit_id_alone(hub, model, fetch_here, tmp_path):
    fetch_here(model)
    objects = hub.repos["owner/name"]["main"].objects
    for path in ALLOWED:
        assert prove_file(model.revision, path, digest_file(tmp_path / "base" / path), objects).holds


def test_no_credential_is_sent_whatever_the_environment_holds(hub, model, fetch_here, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "token"))
    (home / "token").write_text("hf_secret")
    hub.faults.cut_after_bytes, hub.faults.cut_times = 1000, 1
    fetch_here(HubSource(repo_id="owner/name", revision="main"), allow_branch=True)
    assert len(hub.requests) > 5
    for request in hub.requests:
        assert not {"authorization", "cookie", "proxy-authorization"} & set(request.headers)
        assert "secret" not in str(request)


def test_an_address_with_a_password_is_refused_without_repeating_it(hub, model, fetch_here):
    with pytest.raises(SourceError, match="user name or password") as caught:
        fetch_here(model, endpoint=hub.endpoint.replace("://", "://user:secret@"))
    assert "secret" not in str(caught.value)
    assert hub.requests == []


def test_a_dataset_brings_its_parquet_files(hub, fetch_here, tmp_path):
    files = {"data/train-0.parquet": b"PAR1", "README.md": b"card", "script.py": b"import os"}
    commit = hub.add_repo("owner/rows", files, dataset=True)
    receipt = fetch_here(f"hub:datasets/owner/rows@{commit}")
    assert [file.path for file in receipt.files] == ["README.md", "data/train-0.parquet"]
    assert all("/datasets/owner/rows/" in file.url for file in receipt.files)


def test_a_glob_chooses_among_several_sets_of_files(hub, fetch_here, tmp_path):
    files = {f"{folder}/train-{part}.parquet": b"PAR1" for folder in ("all", "data") for part in range(2)}
    commit = hub.add_repo("owner/rows", files | {"README.md": b"card"}, dataset=True)
    receipt = fetch_here(f"hub:datasets/owner/rows@{commit}#files=data/*")
    assert [file.path for file in receipt.files] == ["README.md", "data/train-0.parquet", "data/train-1.parquet"]
    assert receipt.source.endswith("#files=data/*")
    with pytest.raises(SourceError, match=r"no test/\* file to download"):
        fetch_here(f"hub:datasets/owner/rows@{commit}#files=test/*", out="other")


def test_the_same_weights_for_other_programs_are_left_unless_asked_for(hub, fetch_here):
    files = {"model.safetensors": b"a", "consolidated.safetensors": b"a", "original/model.safetensors": b"a"}
    commit = hub.add_repo("owner/twice", files)
    assert [file.path for file in fetch_here(f"hub:owner/twice@{commit}").files] == ["model.safetensors"]
    asked = fetch_here(f"hub:owner/twice@{commit}#files=original/*", out="other")
    assert [file.path for file in asked.files] == ["original/model.safetensors"]


@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
def test_wrong_bytes_of_the_right_length_are_refused_and_a_rerun_succeeds(hub, model, fetch_here, tmp_path, path):
    hub.faults.corrupt.add(path)
    with pytest.raises(SourceError, match="wrong bytes") as caught:
        fetch_here(model)
    assert path in str(caught.value)
    assert str(model) in str(caught.value)
    assert not (tmp_path / "base" / path).exists()
    assert not (tmp_path / "base" / RECEIPT_NAME).exists()
    hub.faults.corrupt.clear()
    assert verify_files(tmp_path / "base", fetch_here(model)) == []


def test_a_cut_connection_goes_on_where_it_stopped(hub, model, fetch_here, tmp_path):
    hub.faults.cut_after_bytes, hub.faults.cut_times = 30_000, 3
    receipt = fetch_here(model)
    ranges = [r.headers["range"] for r in file_requests(hub) if "range" in r.headers]
    assert ranges == ["bytes=30000-", "bytes=60000-", "bytes=90000-"]
    assert verify_files(tmp_path / "base", receipt) == []
    assert next(file.status for file in receipt.files if file.path == "model.safetensors") == 206


def test_a_cut_connection_on_a_server_without_ranges_starts_again(hub, model, fetch_here, tmp_path):
    hub.faults.cut_after_bytes, hub.faults.cut_times, hub.faults.ignore_range = 30_000, 1, True
    receipt = fetch_here(model)
    assert verify_files(tmp_path / "base", receipt) == []


def test_a_partial_file_of_a_killed_download_is_gone_on_from(hub, fetch_here, tmp_path, cache):
    commit = hub.add_repo("owner/one", {"model.safetensors": WEIGHTS})
    partial = cache.partial(Expected(sha256=hashlib.sha256(WEIGHTS).hexdigest()))
    partial.parent.mkdir()
    partial.write_bytes(WEIGHTS[:50_000])
    hub.faults.cut_after_bytes, hub.faults.cut_times = 0, 1000
    with pytest.raises(SourceError, match=r"model.safetensors of hub:owner/one.* stopped at 50,000 of 102,400 bytes"):
        fetch_here(f"hub:owner/one@{commit}")
    hub.faults.cut_times = 0
    hub.requests.clear()
    assert verify_files(tmp_path / "base", fetch_here(f"hub:owner/one@{commit}")) == []
    assert [r.headers["range"] for r in file_requests(hub)] == ["bytes=50000-"]


def test_more_bytes_than_promised_are_refused(hub, model, fetch_here):
    hub.faults.longer.add("model.safetensors")
    with pytest.raises(SourceError, match="more than the promised 102,400 bytes"):
        fetch_here(model)
    hub.faults.longer.clear()
    fetch_here(model)


def test_a_partial_file_longer_than_promised_is_started_again(hub, model, fetch_here, cache, tmp_path):
    partial = cache.partial(Expected(sha256=hashlib.sha256(WEIGHTS).hexdigest()))
    partial.parent.mkdir()
    partial.write_bytes(WEIGHTS + b"x")
    assert verify_files(tmp_path / "base", fetch_here(model)) == []


def test_a_complete_partial_file_is_verified_and_used(hub, model, fetch_here, cache, tmp_path):
    partial = cache.partial(Expected(sha256=hashlib.sha256(WEIGHTS).hexdigest()))
    partial.parent.mkdir()
    partial.write_bytes(WEIGHTS)
    assert verify_files(tmp_path / "base", fetch_here(model)) == []
    assert not any("model.safetensors" in request.path for request in file_requests(hub))


def test_a_busy_server_is_asked_again(hub, model, fetch_here, tmp_path):
    hub.faults.status_times = [503, 429]
    assert verify_files(tmp_path / "base", fetch_here(model)) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hub:owner/absent@" + "0" * 40, r"hub:owner/absent@0+ does not exist or is private .*Check the name"),
        ("hub:owner/name@" + "0" * 40, r"owner/name has no revision 0{40}.*Check the commit"),
    ],
)
def test_an_unknown_repository_or_revision_is_named(hub, model, fetch_here, source, message):
    with pytest.raises(SourceError, match=message):
        fetch_here(source)


def test_a_missing_file_is_named(hub, model, fetch_here):
    hub.faults.missing.add("tokenizer.json")
    with pytest.raises(SourceError, match=r"tokenizer.json is missing from hub:owner/name@.*Choose another"):
        fetch_here(model)


@pytest.mark.parametrize("fault", ["gated", "forbidden"])
def test_a_gated_repository_is_named_and_no_credentials_are_offered(hub, model, fetch_here, fault):
    if fault == "gated":
        hub.faults.gated.add("owner/name")
    else:
        hub.faults.status_times = [403]
    with pytest.raises(SourceError, match=r"hub:owner/name@.* is gated.*local:"):
        fetch_here(model)


def test_a_failing_server_is_named(hub, model, fetch_here):
    hub.faults.status_times = [400]
    with pytest.raises(SourceError, match=r"the hub failed on README.md of hub:owner/name@.*HTTP 400"):
        fetch_here(model)


def test_a_hub_that_is_not_there_is_named(model, fetch_here, monkeypatch):
    # The client library waits between its own tries.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with pytest.raises(SourceError, match=r"cannot reach the hub for hub:owner/name@.*Check the network"):
        fetch_here(model, endpoint="http://127.0.0.1:9")


def test_a_slow_hub_runs_into_the_time_limit(hub, fetch_here):
    commit = hub.add_repo("owner/name", {"model.safetensors": WEIGHTS})
    hub.faults.delay_s = 0.5
    with pytest.raises(SourceError, match="Timeout"):
        fetch_here(
            HubSource(repo_id="owner/name", revision="main"),
            allow_branch=True,
            network=Network(num_retries=0, retry_wait_s=0, timeout_s=0.05),
        )
    assert commit


def test_offline_mode_is_named(hub, model, fetch_here, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(SourceError, match=r"offline mode.*HF_HUB_OFFLINE"):
        fetch_here(model)


def test_a_listed_path_that_leaves_the_folder_is_refused(hub, model, fetch_here, tmp_path):
    hub.faults.extra_paths = ["../evil.safetensors"]
    with pytest.raises(SourceError, match="outside its folder"):
        fetch_here(model)
    assert not (tmp_path / "evil.safetensors").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"pytorch_model.bin": b"x", "config.json": b"{}"},
            "only pickled weights, which are refused: pytorch_model.bin",
        ),
        ({"config.json": b"{}"}, r"no \*.safetensors file to download"),
    ],
)
def test_a_repository_without_readable_weights_is_refused_before_any_download(hub, fetch_here, files, message):
    commit = hub.add_repo("owner/old", files)
    with pytest.raises(SourceError, match=message):
        fetch_here(f"hub:owner/old@{commit}")
    assert file_requests(hub) == []


def test_too_little_space_is_noticed_before_the_first_byte(hub, model, fetch_here, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 150_000})())
    with pytest.raises(SpaceError, match=r"hub:owner/name|not enough free space"):
        fetch_here(model)
    assert file_requests(hub) == []


def test_a_cache_on_another_disk_is_asked_for_its_own_space(hub, model, fetch_here, tmp_path, monkeypatch):
    # Each needs one copy: 0.1 MB; together they would need twice that.
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 150_000})())
    monkeypatch.setattr("ar2diff.sources.cache._device", lambda folder: folder.name)
    assert verify_files(tmp_path / "base", fetch_here(model)) == []


def test_a_branch_is_refused_unless_it_is_resolved_and_then_both_are_recorded(hub, model, fetch_here):
    branch = HubSource(repo_id="owner/name", revision="main")
    with pytest.raises(SourceError, match="--resolve"):
        fetch_here(branch)
    receipt = fetch_here(branch, allow_branch=True)
    assert (receipt.revision, receipt.resolved_from) == (model.revision, "main")
    assert receipt.source == str(model)


def test_a_short_hash_is_resolved_too(hub, model, fetch_here):
    receipt = fetch_here(HubSource(repo_id="owner/name", revision=model.revision[:8]), allow_branch=True)
    assert (receipt.revision, receipt.resolved_from) == (model.revision, model.revision[:8])


def test_a_branch_that_moved_is_not_mixed_with_the_old_files(hub, model, fetch_here):
    branch = HubSource(repo_id="owner/name", revision="main")
    fetch_here(branch, allow_branch=True)
    hub.add_repo("owner/name", {"model.safetensors": b"new"})
    with pytest.raises(SourceError, match="holds another source"):
        fetch_here(branch, allow_branch=True)


def test_a_hub_that_answers_with_no_commit_is_refused(hub, model, fetch_here):
    hub.faults.info_sha = "main"
    with pytest.raises(SourceError, match="another commit"):
        fetch_here(HubSource(repo_id="owner/name", revision="main"), allow_branch=True)


def test_long_listings_come_in_pages(hub, fetch_here):
    files = {f"part-{index:02}.safetensors": bytes([index]) for index in range(10)}
    receipt = fetch_here(f"hub:owner/many@{hub.add_repo('owner/many', files)}")
    assert len(receipt.files) == 10
    assert sum("/tree/" in request.path for request in hub.requests) == 4


def test_progress_counts_every_byte_once_even_over_cuts_and_restarts(hub, model, fetch_here):
    class Counter:
        here = 0
        totals = 0

        def start_file(self, name, total_bytes, done_bytes):
            self.here += done_bytes
            self.totals += total_bytes

        def advance(self, num_bytes):
            self.here += num_bytes

    counter = Counter()
    hub.faults.cut_after_bytes, hub.faults.cut_times, hub.faults.ignore_range = 30_000, 2, True
    receipt = fetch_here(model, progress=counter)
    assert counter.here == counter.totals == sum(file.size_bytes for file in receipt.files)


def test_network_settings_are_checked():
    with pytest.raises(ConfigError):
        Network(timeout_s=0)


def test_rows_as_text_come_only_where_the_glob_ends_like_them(hub, fetch_here):
    files = {"test.jsonl": b"{}\n", "rows.csv": b"a\n1\n", "data/a.parquet": b"PAR1", "data/b.jsonl": b"{}\n"}
    commit = hub.add_repo("owner/rows", files | {"run.py": b"import os", "x.pkl": b"."}, dataset=True)
    wanted = {
        "": ["data/a.parquet"],
        "#files=test.jsonl": ["test.jsonl"],
        "#files=*.csv": ["rows.csv"],
        "#files=data/*": ["data/a.parquet"],
    }
    for idx, (glob, paths) in enumerate(wanted.items()):
        receipt = fetch_here(f"hub:datasets/owner/rows@{commit}{glob}", out=f"out{idx}")
        assert [file.path for file in receipt.files] == paths
    for glob in ("*.py", "*.pkl", "*.jso"):
        with pytest.raises(SourceError, match="file to download"):
            fetch_here(f"hub:datasets/owner/rows@{commit}#files={glob}", out="none")
