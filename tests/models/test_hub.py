"""Against a hub on this machine that speaks as much of the protocol as a download needs.

huggingface_hub reads its environment when it is imported, so each case runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHOW = """
import sys
from lockstep.config.schema import Model
from lockstep.errors import ModelError
from lockstep.models import resolve
try:
    resolved = resolve(Model(path=sys.argv[1], revision=sys.argv[2] or None))
    print(resolved.source, resolved.revision, resolved.path)
except ModelError as error:
    print(error)
"""


@dataclass
class Hub:
    """org/tiny is free, org/gated is listed but not readable; everything else does not exist."""

    folder: Path
    url: str = ""
    fetched: list[str] = field(default_factory=list)


def handler_for(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            match parts:
                case ["api", "models", "org", "tiny" | "gated", "revision", "main" | "v1"]:
                    self.reply(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
                case ["api", "models", "org", "tiny", "revision", _]:
                    self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                case ["api", "models", "org", "tiny" | "gated", "tree", *_]:
                    self.reply(200, json.dumps([self.entry(path) for path in sorted(hub.folder.rglob("*"))]).encode())
                case ["org", "tiny", "resolve", _, *path]:
                    name = "/".join(path)
                    hub.fetched += [name] if self.command == "GET" else []
                    content = (hub.folder / name).read_bytes()
                    self.reply(200, content, {"ETag": f'"{self.blob(content)}"', "X-Repo-Commit": COMMIT})
                case ["org", "gated", "resolve", *_]:
                    self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
                case _:
                    self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def blob(self, content: bytes) -> str:
            return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

        def entry(self, path: Path) -> dict[str, object]:
            name = path.relative_to(hub.folder).as_posix()
            if path.is_dir():
                return {"type": "directory", "path": name, "oid": "0" * 40}
            content = path.read_bytes()
            return {"type": "file", "path": name, "size": len(content), "oid": self.blob(content)}

        def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


@pytest.fixture
def hub(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    (folder / "onnx").mkdir(parents=True)
    for path in tiny_model_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for unwanted in ("pytorch_model.bin", "model.gguf", "modeling_own.py", "onnx/model.onnx", "onnx/config.json"):
        (folder / unwanted).write_text("never to be fetched")
    hub = Hub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def ask(hub_url: str, home: Path, name: str, revision: str = "", *, offline: bool = False) -> str:
    """What resolving `name` prints in a fresh process: source, revision and path, or the error."""
    environment = {**os.environ, "HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", SHOW, name, revision]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_model_is_fetched_without_what_is_not_needed_then_served_offline(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    source, revision, path = ask(hub.url, home, "org/tiny").split()
    assert (source, revision) == ("hub", COMMIT)
    assert Path(path).name == COMMIT
    wanted = {path.name for path in hub.folder.glob("*.json")} | {"model.safetensors", "chat_template.jinja"}
    assert set(hub.fetched) == wanted
    assert hub.fetched[-1] == "model.safetensors", "the weights come last"

    hub.fetched.clear()
    assert ask(hub.url, home, "org/tiny", offline=True).split()[1] == COMMIT
    assert ask("http://127.0.0.1:9", home, "org/tiny").split()[1] == COMMIT, "an unreachable hub is like offline"
    assert ask(hub.url, home, "org/tiny", "v1").split()[1] == COMMIT
    assert hub.fetched == []


def test_a_model_that_will_not_do_is_refused_before_its_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert "quant_method: fp8" in ask(hub.url, tmp_path / "home", "org/tiny")
    assert "model.safetensors" not in hub.fetched


@pytest.mark.parametrize(
    ("name", "revision", "message", "fix"),
    [
        ("org/gated", "", "access to this model is gated", "/org/gated, then set HF_TOKEN"),
        ("org/missing", "", "the hub has no such model", "check the spelling"),
        ("org/tiny", "v9", "no revision 'v9'", "model.revision"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    hub: Hub, tmp_path: Path, name: str, revision: str, message: str, fix: str
) -> None:
    what, to_fix = ask(hub.url, tmp_path / "home", name, revision).splitlines()
    assert what.startswith(name)
    assert message in what
    assert fix in to_fix


def test_offline_and_not_cached_says_which_of_both_and_what_to_do(hub: Hub, tmp_path: Path) -> None:
    what, to_fix = ask(hub.url, tmp_path / "home", "org/tiny", offline=True).splitlines()
    assert "HF_HUB_OFFLINE is set" in what
    assert str(tmp_path / "home") in what
    assert "unset it" in to_fix
    what, to_fix = ask("http://127.0.0.1:9", tmp_path / "home", "org/tiny").splitlines()
    assert "cannot be reached" in what
    assert "check the network" in to_fix
