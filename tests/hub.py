"""A hub on this machine that serves models or data sets from folders, as much of the protocol as a download needs.

huggingface_hub reads its environment when it is imported, so what asks it runs in a process of its own (`ask`).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
HERE: tuple[list[str], ...] = ([], ["revision", "main"], ["revision", "v1"], ["revision", COMMIT])


@dataclass
class Hub:
    """Every folder org/name below `folder` is a repository; org/gated is listed but not readable."""

    folder: Path
    kind: str
    """models or datasets"""
    url: str = ""
    fetched: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Files at which the connection is reset."""


def handler_for(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            match parts[1:] if hub.kind == "datasets" and parts[0] == "datasets" else parts:
                case ["org", "gated", "resolve", *_]:
                    self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
                case ["api", hub.kind, org, name, *at] if self.known(org, name) and at in HERE:
                    siblings = [{"rfilename": file} for file in self.files(org, name)]
                    body = {"id": f"{org}/{name}", "sha": COMMIT, "siblings": siblings, "private": False}
                    self.reply(200, json.dumps(body).encode())
                case ["api", hub.kind, org, name, "revision", _] if self.known(org, name):
                    self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                case ["api", hub.kind, org, name, "tree", *_] if self.known(org, name):
                    entries = [self.entry(org, name, file) for file in self.files(org, name)]
                    self.reply(200, json.dumps(entries).encode())
                case [org, name, "resolve", _, *path] if self.known(org, name) and "/".join(path) in self.files(
                    org, name
                ):
                    self.send_file(org, name, "/".join(path))
                case _:
                    self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def known(self, org: str, name: str) -> bool:
            return (hub.folder / org / name).is_dir()

        def files(self, org: str, name: str) -> list[str]:
            root = hub.folder / org / name
            return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

        def entry(self, org: str, name: str, file: str) -> dict[str, object]:
            content = (hub.folder / org / name / file).read_bytes()
            return {"type": "file", "path": file, "size": len(content), "oid": blob(content)}

        def send_file(self, org: str, name: str, file: str) -> None:
            hub.fetched += [file] if self.command == "GET" else []
            content = (hub.folder / org / name / file).read_bytes()
            if file in hub.broken and self.command == "GET":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()  # without lingering: the client sees a reset
                return
            self.reply(200, content, {"ETag": f'"{blob(content)}"', "X-Repo-Commit": COMMIT})

        def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serving(folder: Path, kind: str) -> Iterator[Hub]:
    hub = Hub(folder, kind)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(hub_url: str, home: Path, *words: str, offline: bool = False, cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and output (stdout, then stderr) of Python with these arguments and this hub."""
    environment = {**os.environ, "HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_ETAG_TIMEOUT": "2"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False, timeout=600, cwd=cwd
    )
    return done.returncode, done.stdout + done.stderr


def run(hub_url: str, home: Path, *words: str, offline: bool = False, cwd: Path | None = None) -> tuple[int, str]:
    """`ask` of `lockstep`."""
    return ask(hub_url, home, "-m", "lockstep", *words, offline=offline, cwd=cwd)
