from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lockstep.errors import MachineError
from lockstep.track.rundir import RunDirectory
from lockstep.view import server as module
from lockstep.view.api import Viewer
from lockstep.view.server import ASSETS, HOST, Server
from tests.view.conftest import CORPUS

Start = Callable[..., Server]


def get(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    found = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return found


def test_the_page_is_on_loopback_and_every_part_of_it_needs_the_token(serve: Start, run: RunDirectory) -> None:
    server = serve(run.path)
    assert server.socket.getsockname()[0] == "127.0.0.1"
    base = urlsplit(server.address).path
    assert len(server.token) >= 32
    for name in (*ASSETS, "api/state"):
        assert get(server, base + name)[0] == 200, name
        for wrong in (
            f"/{name}",
            f"/{server.token[:-1]}/{name}",
            f"/{server.token}x/{name}",
            f"//{name}",
            f"/{name}?token={server.token}",
        ):
            assert get(server, wrong)[0] == 403, wrong
    assert get(server, "/")[0] == 403
    assert get(server, f"/{server.token}")[0] == 403
    assert get(server, f"{base}../view/server.py")[0] == 404
    assert get(server, f"{base}api/__init__")[0] == 404


def test_another_host_or_site_is_refused(serve: Start, run: RunDirectory) -> None:
    server = serve(run.path)
    path = f"{urlsplit(server.address).path}api/state"
    for host in (
        "evil.example",
        f"evil.example:{server.server_port}",
        "127.0.0.1.evil.example",
        "",
        "localhost@evil.example",
    ):
        assert get(server, path, Host=host)[0] == 421, host
    for host in (f"localhost:{server.server_port}", "127.0.0.1", "localhost:8080"):  # the last: forwarded by ssh -L
        assert get(server, path, Host=host)[0] == 200, host
    site = {"Sec-Fetch-Site": "cross-site"}
    assert get(server, path, **site, **{"Sec-Fetch-Mode": "cors"})[0] == 403
    assert get(server, path, **site, **{"Sec-Fetch-Mode": "navigate"})[0] == 200


def test_it_only_answers_questions(serve: Start, run: RunDirectory) -> None:
    server = serve(run.path)
    base = urlsplit(server.address).path
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE"):
        assert get(server, f"{base}api/state", method)[0] == 501
    status, _, body = get(server, f"{base}api/rollouts?result=maybe")
    assert status == 400
    assert "result" in json.loads(body)["error"]
    for name in ("first", "last", "length_min", "length_max", "offset", "run"):
        status, _, body = get(server, f"{base}api/rollouts?{name}={10**40}")
        assert (status, f"the parameter {name} is wrong" in json.loads(body)["error"]) == (400, True), name
    assert get(server, f"{base}api/rollouts?" + "&".join("a=b" for _ in range(60)))[0] == 400
    assert get(server, f"{base}api/rollout?step=99")[0] == 400
    status, _, body = get(server, f"{base}api/rollout?step=1&row=99")
    assert (status, "and none of number 99; they are counted from 0" in json.loads(body)["error"]) == (400, True)
    for question in (f"rollout?step=1&row={10**20}", f"funnel?last={10**20}"):
        status, _, body = get(server, f"{base}api/{question}")
        assert status == 400
        assert "is wrong" in json.loads(body)["error"]


def test_answers_forbid_whatever_the_page_does_not_need(serve: Start, run: RunDirectory) -> None:
    server = serve(run.path)
    for name in ("", "api/state", "nothing"):
        _, headers, _ = get(server, urlsplit(server.address).path + name)
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


def test_the_scripts_write_text_and_never_markup() -> None:
    from importlib import resources

    for package, other in ASSETS.values():
        for path in resources.files(package).joinpath("assets").iterdir():
            if path.name.endswith(".js") and not path.name.startswith("uplot"):
                source = path.read_text(encoding="utf-8")
                for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
                    assert word not in source, f"{path.name}: {word}"
                assert "http://" not in source, other
                assert "https://" not in source


def test_hostile_texts_are_json_and_nothing_else(serve: Start, hostile: RunDirectory) -> None:
    server = serve(hostile.path)
    base = urlsplit(server.address).path
    for name in (
        "state",
        "curves",
        "metrics?text=eval",
        "events",
        "rollouts?limit=500",
        "funnel",
        "settings",
        "scores",
    ):
        status, headers, body = get(server, f"{base}api/{name}")
        assert status == 200, (name, body)
        assert headers["content-type"].startswith("application/json")
        assert not set(range(32)) & set(body), name
        json.loads(body, parse_constant=pytest.fail)
    for place in range(3 * len(CORPUS)):
        status, _, body = get(server, f"{base}api/rollout?step=1&row={place}")
        assert status == 200
        assert "\x1b" not in json.loads(body)["text"]
        assert "\u202e" not in json.loads(body)["text"]


def test_clients_that_go_or_stay_silent_do_not_stop_the_others(
    serve: Start, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.Handler, "timeout", 1.0)
    server = serve(run.path)
    path = f"{urlsplit(server.address).path}api/rollouts?limit=500"
    silent = [socket.create_connection((HOST, server.server_port)) for _ in range(server.most_at_once)]
    time.sleep(0.3)
    extra = socket.create_connection((HOST, server.server_port))
    extra.settimeout(5)
    assert extra.recv(1) == b"", "one too many is closed at once"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # the silent ones are dropped after their second
        try:
            assert get(server, path)[0] == 200
            break
        except (ConnectionError, http.client.HTTPException):
            time.sleep(0.1)
    else:
        pytest.fail("the page did not come back")
    for one in silent:
        one.close()
    for _ in range(20):  # asks and leaves without reading
        with socket.create_connection((HOST, server.server_port)) as one:
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    with socket.create_connection((HOST, server.server_port)) as one:
        one.sendall(b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n\x00\xff")
    assert get(server, path)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_many_ask_at_once(serve: Start, run: RunDirectory) -> None:
    server = serve(run.path)
    base = urlsplit(server.address).path
    found: list[int] = []

    def ask(number: int) -> None:
        for name in ("rollouts?text=boxed", "funnel", f"rollout?step={1 + number % 4}", "curves"):
            found.append(get(server, f"{base}api/{name}")[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 64


def test_a_taken_port_is_said(serve: Start, run: RunDirectory) -> None:
    with pytest.raises(MachineError, match="cannot be opened"):
        Server(Viewer([run.path]), port=serve(run.path).server_port)


def test_the_page_of_a_run_that_has_just_begun(serve: Start, tmp_path: Path) -> None:
    from tests.track.runs import FACTS

    RunDirectory.create(tmp_path / "a", "name: a\n", FACTS).close()
    server = serve(tmp_path / "a")
    for name in ("state", "curves", "metrics", "events", "rollouts", "funnel", "settings", "scores"):
        assert get(server, f"{urlsplit(server.address).path}api/{name}")[0] == 200, name
