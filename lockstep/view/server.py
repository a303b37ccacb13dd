"""The web server of `lockstep view`: loopback only, a secret token in each address, and no requests from or to other origins."""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import time
from http import HTTPStatus
from importlib import resources
from urllib.parse import parse_qsl, urlsplit

from lockstep.errors import LockstepError
from lockstep.loopback import HOST, LoopbackHandler, LoopbackServer
from lockstep.report.data import page_data
from lockstep.view.api import Viewer

log = logging.getLogger(__name__)
MOST_BYTES = 2_000_000
"""Longest body of a request."""

ASSETS = {
    "": ("lockstep.view", "index.html"), "uplot.min.js": ("lockstep.report", ""), "uplot.min.css": ("lockstep.report", ""),
    "charts.js": ("lockstep.report", ""), "base.css": ("lockstep.report", ""),
    **dict.fromkeys(("view.css", "app.js", "curves.js", "rollouts.js", "reply.js"), ("lockstep.view", "")),
    **dict.fromkeys(("tables.js", "prompt.js", "time.js"), ("lockstep.view", "")),
}  # fmt: skip
"""The files of the page, by their address: package, and the name if it is another."""
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server(LoopbackServer):
    """Serves a viewer until `shutdown`; `address` is what to open in a browser."""

    def __init__(self, viewer: Viewer, port: int = 0) -> None:
        """Raises MachineError if the port is taken."""
        self.viewer, self.token = viewer, secrets.token_urlsafe(24)
        super().__init__(Handler, port, "view")

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class Handler(LoopbackHandler):
    """Answers requests of the page itself."""

    server: Server

    def do_GET(self) -> None:
        refused = self._refused()
        if refused is not None:
            return self._send(refused, "text/plain", refused.phrase.encode())
        split = urlsplit(self.path)
        name = split.path.split("/", 2)[2]
        if name.startswith("api/"):
            return self._answer(name.removeprefix("api/"), split.query)
        if name not in ASSETS:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found")
        package, other = ASSETS[name]
        name = other or name
        body = resources.files(package).joinpath("assets", name).read_bytes()
        return self._send(HTTPStatus.OK, TYPES[name.rpartition(".")[2]], body)

    def do_POST(self) -> None:
        """Answer a question whose parameters are too long for an address: they are the body, as in an address."""
        name = urlsplit(self.path).path.split("/", 2)[-1]
        refused, length = self._refused(), self.headers.get("Content-Length", "")
        if refused is None and not (name.startswith("api/") and re.fullmatch(r"\d{1,9}", length)):
            refused = HTTPStatus.BAD_REQUEST
        if refused is None and int(length) > MOST_BYTES:
            refused = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        if refused is not None:
            self.close_connection = True  # its body is not read
            return self._send(refused, "text/plain", refused.phrase.encode())
        body = self.rfile.read(int(length)).decode(errors="replace")
        self.arrived()
        return self._answer(name.removeprefix("api/"), body)

    def _refused(self) -> HTTPStatus | None:
        """Refuse another Host, requests of other sites, and a wrong token."""
        if not self.of_this_machine():
            return HTTPStatus.MISDIRECTED_REQUEST
        site, mode = (self.headers.get(f"Sec-Fetch-{name}", "") for name in ("Site", "Mode"))
        if site not in ("", "none", "same-origin") and mode != "navigate":
            return HTTPStatus.FORBIDDEN
        parts = urlsplit(self.path).path.split("/", 2)
        given = parts[1] if len(parts) == 3 else ""
        if not hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode()):
            return HTTPStatus.FORBIDDEN
        return None

    def _answer(self, name: str, query: str) -> None:
        question = self.server.viewer.answers.get(name)
        if question is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found")
        began = time.thread_time()
        try:
            status, answer = HTTPStatus.OK, question(dict(parse_qsl(query, max_num_fields=40)))
        except LockstepError as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except ValueError as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": f"no such question: {error}"}
        except Exception:  # a page that stays open must say that something broke, and go on
            log.exception("the view could not answer %s", name)
            status, answer = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                {"error": "something broke; the terminal has the details"},
            )
        body = json.dumps(page_data(answer), allow_nan=False, separators=(",", ":")).encode()
        self.server.viewer.spend(time.thread_time() - began)
        return self._send(status, "application/json", body)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.answer(status, body, HEADERS | {"Content-Type": f"{kind}; charset=utf-8"})
