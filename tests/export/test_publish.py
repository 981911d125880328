"""Publishing to a loopback hub: one commit with every file, under the token given, and never without a verifier."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ar2diff.cli import run as run_command
from ar2diff.errors import ConfigError, ModelError, SourceError
from ar2diff.export.publish import parse_repo, publish_export

# The client library's own upload call.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_" + "t" * 20


class UploadHub:
    """What a hub needs for uploads: repositories, pre-upload, large files, commits."""

    def __init__(self):
        self.requests, self.large, self.commits, self.status = [], {}, [], 200
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self._answer()

            def do_POST(self):
                self._answer()

            def do_PUT(self):
                self._answer()

            def _answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.requests.append((self.command, self.path, dict(self.headers)))
                content = json.dumps(hub.reply(self.path, body)).encode()
                self.send_response(hub.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, path, body):
        if path == "/api/repos/create":
            return {"url": f"{self.endpoint}/owner/name", "name": "owner/name", "id": "owner/name"}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
            return {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [
                {**o, "actions": {"upload": {"href": f"{self.endpoint}/large/{o['oid']}", "header": {}}}}
                for o in objects
            ]
            return {"transfer": "basic", "objects": upload}
        if path.startswith("/large/"):
            self.large[path.rpartition("/")[2]] = body
            return {}
        if "/commit/" in path:
            self.commits.append([json.loads(line) for line in body.splitlines()])
            return {
                "success": True,
                "commitOid": "c" * 40,
                "commitUrl": f"{self.endpoint}/owner/name/commit/{'c' * 40}",
            }
        return {"errors": [], "warnings": []}


@pytest.fixture
def hub():
    hub = UploadHub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def push(folder, hub, **changes):
    settings = {"token": TOKEN, "license_id": "apache-2.0", "endpoint": hub.endpoint, **changes}
    return publish_export(folder, "hf", "owner/name", **settings)


def test_every_file_arrives_in_one_commit_with_a_card(exported, hub):
    folder = exported("hf")
    assert push(folder, hub) == "c" * 40
    (commit,) = hub.commits
    small = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in commit if line["key"] == "file"
    }
    large = {line["value"]["path"] for line in commit if line["key"] == "lfsFile"}
    assert {*small, *large} == {path.name for path in folder.iterdir()}
    assert small["README.md"].startswith(b"---\nlicense: apache-2.0\n")
    assert small["README.md"].endswith((folder / "README.md").read_bytes())
    assert list(hub.large.values()) == [(folder / "model.safetensors").read_bytes()]


def test_only_the_token_given_is_ever_sent(exported, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_from_the_environment")
    push(exported("hf"), hub)
    sent = {headers["Authorization"] for _, _, headers in hub.requests if "Authorization" in headers}
    sent |= {headers["authorization"] for _, _, headers in hub.requests if "authorization" in headers}
    assert sent == {f"Bearer {TOKEN}"}


def test_a_folder_that_fails_its_verifier_is_not_sent(exported, hub, tmp_path):
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(exported("hf"), folder)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ModelError, match="no valid hf export"):
        push(folder, hub)
    shutil.copytree(exported("hf"), tmp_path / "more")
    (tmp_path / "more" / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(ModelError, match="no export has"):
        push(tmp_path / "more", hub)
    assert hub.requests == []


@pytest.mark.parametrize("changes", [{"license_id": "other"}, {"license_id": "cc-by-nc-4.0"}, {"token": "  "}])
def test_without_a_licence_or_a_token_nothing_is_sent(changes, exported, hub):
    with pytest.raises(ConfigError):
        push(exported("hf"), hub, **changes)
    assert hub.requests == []


def test_a_hub_that_refuses_is_one_line_without_the_token(exported, hub):
    hub.status = 403
    with pytest.raises(SourceError, match="refuses the upload") as caught:
        push(exported("hf"), hub)
    assert TOKEN not in caught.value.one_line()


def test_an_address_must_name_a_repository():
    assert parse_repo("hub:owner/some-name") == "owner/some-name"
    for text in ("owner/name", "hub:name", "hub:a/b/c", "hub:../x", "https://x/y"):
        with pytest.raises(ConfigError):
            parse_repo(text)


def test_the_command_publishes(exported, hub, tmp_path, capsys):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    arguments = ["publish", str(exported("hf")), "hub:owner/name", "--to", "hf", "--base-license", "mit"]
    code = run_command([*arguments, "--token-file", str(tmp_path / "token"), "--endpoint", hub.endpoint])
    assert code == 0
    assert "published" in capsys.readouterr().out
    assert run_command([*arguments, "--token-file", str(tmp_path / "none")]) == 2
