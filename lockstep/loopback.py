"""Base class of servers for this machine only. Limits the connections, and the time that a request may take to arrive."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lockstep.errors import MachineError

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
IDLE_S = 30.0
"""A connection that sends or takes nothing for this long is closed."""
REQUEST_S = 60.0
"""So is one whose request has not arrived as a whole after this time: a client may send a byte now and then for ever."""


class LoopbackServer(ThreadingHTTPServer):
    """Serves until `shutdown`, one thread for each connection."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    most_at_once = 64
    """Connections that are served at once; others are closed."""

    def __init__(self, handler: type[LoopbackHandler], port: int, where: str) -> None:
        """Raises MachineError if the port is taken."""
        self._free = threading.BoundedSemaphore(self.most_at_once)
        self.due: dict[Any, float] = {}
        """Connections that are sending a request, and when it must be there."""
        self._connections: set[Any] = set()
        try:
            super().__init__((HOST, port), handler)
        except OSError as error:
            raise MachineError(
                f"port {port} cannot be opened: {error.strerror}",
                where=where,
                fix="choose another port with --port, or leave --port out",
            ) from error

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere. From any thread."""
        self.process_request(connection, self.server_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.discard(request)
            self.due.pop(request, None)
            self._free.release()

    def service_actions(self) -> None:
        """Close connections that are late; called twice a second."""
        for connection, due in list(self.due.items()):
            if time.monotonic() > due and self.due.pop(connection, None) is not None:
                _end(connection)

    def server_close(self) -> None:
        """Close the port and all connections."""
        super().server_close()
        for connection in list(self._connections):
            _end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away; the next request is served as before."""
        log.debug("a connection broke", exc_info=True)


class LoopbackHandler(BaseHTTPRequestHandler):
    """Reads requests; `do_GET` and the like answer them."""

    server: LoopbackServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "Lockstep", ""
    timeout = IDLE_S

    def handle_one_request(self) -> None:
        self.server.due[self.connection] = time.monotonic() + REQUEST_S
        super().handle_one_request()

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        if parsed and self.command == "GET":
            self.arrived()
        return parsed

    def arrived(self) -> None:
        """Note that the request is there as a whole."""
        self.server.due.pop(self.connection, None)

    def of_this_machine(self) -> bool:
        """Return False for another Host, which a name bound to this address by its owner (DNS rebinding) has."""
        hosts = self.headers.get_all("Host", [])  # any port: it may be forwarded from another machine
        return len(hosts) == 1 and re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", hosts[0]) is not None

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep requests, which may hold a token, out of the terminal."""


def _end(connection: Any) -> None:
    """Close a connection that another thread reads or writes."""
    with contextlib.suppress(OSError):  # it is gone
        connection.shutdown(socket.SHUT_RDWR)
