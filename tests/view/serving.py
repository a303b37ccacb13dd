"""Servers of a page that end with their test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.view.api import Viewer
from lockstep.view.server import Server


@contextmanager
def serving() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*paths: Path) -> Server:
        viewer = Viewer(paths)
        viewer.index.refresh()
        viewer.follow()
        server = Server(viewer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()
        server.viewer.close()
