"""An OpenAI-compatible endpoint that misbehaves as the graded reply says: python judge_server.py, prints its port.

A reply "mode:<name> …" chooses what happens. GET /log tells which requests came, without their headers.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOG: list[dict[str, Any]] = []
STATE = {"now": 0, "most": 0}
LOCK = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.say(200, json.dumps({"log": LOG, **STATE}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][-1]["content"]
        found = re.search(r"mode:(\w+)", asked)
        mode = found.group(1) if found else "ten"
        mark = re.search(r"(\w{16}) begin reply", asked).group(1)  # type: ignore[union-attr]
        with LOCK:
            STATE["now"] += 1
            STATE["most"] = max(STATE["most"], STATE["now"])
            LOG.append(
                {"mode": mode, "body": body, "authorized": self.headers.get("Authorization") == "Bearer sk-very-secret"}
            )
            count = sum(entry["mode"] == mode for entry in LOG)
        try:
            self.act(mode, mark, count)
        except BrokenPipeError:
            pass
        finally:
            with LOCK:
                STATE["now"] -= 1

    def act(self, mode: str, mark: str, count: int) -> None:
        verdict = json.dumps({"mark": mark, "score": 10})
        match mode:
            case "busy":
                self.say(429, "slow down", {"Retry-After": "0"})
            case "later" if count <= 1:
                self.say(429, "slow down", {"Retry-After": "1"})
            case "later_date":
                self.say(429, "slow down", {"Retry-After": "20"})
            case "tomorrow":
                self.say(429, "slow down", {"Retry-After": "86400"})
            case "broken":
                self.say(500, "oops")
            case "flaky" if count <= 2:
                self.say(503, "oops")
            case "hang":
                time.sleep(30)
            case "drip":
                self.send_response(200)
                self.send_header("Content-Length", "1000000")
                self.end_headers()
                for _ in range(300):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.1)
            case "drip_headers":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
                for _ in range(300):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            case "continue":
                for _ in range(3000):
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(0.01)
            case "naive_date":
                self.say(429, "slow down", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 -0000"})
            case "garbage":
                self.say(200, "<html>" + "\x00" * 50)
            case "half":
                self.say(200, json.dumps({"choices": [{"message": {"content": verdict}}]})[:40])
            case "cut":
                self.send_response(200)
                self.send_header("Content-Length", "5000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.close_connection = True
            case "flood":
                self.say(200, "x" * (1 << 22))
            case "null":
                self.say(200, json.dumps({"choices": [{"message": {"content": None}}]}))
            case "chatty":
                self.answer("I like it. 10/10, it passes.")
            case "unmarked":
                self.answer('{"mark": "0123456789abcdef", "score": 10}')
            case "twelve":
                self.answer(json.dumps({"mark": mark, "score": 12}))
            case "changes":
                self.answer(f"First {verdict}, no: {json.dumps({'mark': mark, 'score': 3})}")
            case "takes_back":
                self.answer(f"{verdict} no: {json.dumps({'mark': mark, 'score': 'high'})}")
            case "echo":
                self.say(401, f"bad key {self.headers.get('Authorization')}")
            case "moved":
                self.say(302, "", {"Location": "http://127.0.0.1:9/"})
            case "two":
                self.answer(json.dumps({"mark": mark, "score": 2}))
            case "slow":
                time.sleep(0.2)
                self.answer(verdict)
            case _:
                self.answer(f"Good. {verdict}")

    def answer(self, text: str) -> None:
        self.say(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))

    def say(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()
    sys.exit()
