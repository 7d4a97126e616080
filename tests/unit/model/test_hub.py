"""Models of the hub by name, with the real client: a server of one model, its cache, no network."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from rlmath.model.hub import hub_name, is_hub_model
from tests.unit.documented import TINY, write_model

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path):
    """Address of a hub that has org/tiny."""
    folder = tmp_path / "served"
    write_model(folder, TINY)
    (folder / "pytorch_model.bin").write_text("the same weights again")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    tree = [
        {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }
        for name, content in files.items()
    ]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = self.path.split("?")[0]
            name = path.rpartition("/")[2]
            if path.startswith("/api/models/org/tiny/tree/"):
                self.send(json.dumps(tree).encode(), body)
            elif path.startswith("/api/models/org/tiny"):
                found = {"id": "org/tiny", "sha": COMMIT, "siblings": []}
                self.send(json.dumps(found).encode(), body)
            elif path.startswith("/org/tiny/resolve/") and name in files:
                etag = hashlib.sha1(files[name]).hexdigest()
                self.send(files[name], body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send(self, content, body, headers=None):
            self.send_response(200)
            for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_):
            """Nothing on the terminal."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def run(code, folder, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_name_is_downloaded_once_and_checked_like_a_folder(tmp_path, hub):
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1?", "solutions": ["\\boxed{2}"]}) + "\n")
    settings = ["model.path=org/tiny", f"data.train_paths=[{rows}]", "runner.run_dir=run"]
    settings += ["cluster.device=cpu", "rollout.max_response_tokens=64", "--check"]
    settings += ["data.max_prompt_tokens=128", "model.dtype=float32"]
    code = (
        "from rlmath.cli import main\n"
        "from rlmath.model.hub import cached_model, download_model, hub_name\n"
        "assert cached_model('org/tiny') is None\n"
        f"assert main(['train', *{settings!r}]) == 0\n"
        "folder = download_model('org/tiny')\n"
        "print(sorted(path.name for path in folder.iterdir()))\n"
        "assert cached_model('org/tiny') == folder\n"
        "assert hub_name(folder) == 'org/tiny'\n"
        f"assert main(['train', *{settings!r}]) == 0\n"
    )
    done = run(code, tmp_path, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = done.stdout.split("['config.json'")
    assert "org/tiny will be downloaded" in before
    assert "model.safetensors" in after
    assert "pytorch_model.bin" not in after
    assert "org/tiny (in the hub's cache): Qwen2ForCausalLM" in after


def test_without_a_network_the_message_has_the_command(tmp_path):
    code = "from rlmath.model.hub import download_model\ndownload_model('org/tiny')\n"
    done = run(code, tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode != 0
    assert "UserError" in done.stderr
    assert "hf download org/tiny --local-dir models/tiny" in done.stderr


def test_hub_names_differ_from_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_model("Qwen/Qwen3-8B")
    assert not any(map(is_hub_model, ("tiny", "./a/b", "/a/b", "a/b/c", "runs/../b", "Qwen/")))
    refused_by_the_hub = ("a/b--c", "a/b..c", "a/b.git", "a/b-", "a/b.", "a/modèle")
    assert not any(map(is_hub_model, refused_by_the_hub))
    for name in refused_by_the_hub[:-1]:
        with pytest.raises(HFValidationError):
            validate_repo_id(name)
    (tmp_path / "models").mkdir()
    assert not is_hub_model("models/Qwen3-8B"), "a folder that is missing a model is a folder"
    assert hub_name("models/Qwen3-8B") is None
