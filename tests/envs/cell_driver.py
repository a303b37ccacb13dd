"""Runs attacks.py in a sandbox, by the standard library alone, so that any user can. Prints what came of it as JSON."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from socket import socket

from lockstep.envs.cells import Cells, Files
from lockstep.verifiers.sandbox.isolation import Limits

facts, names, seconds = json.loads(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
program = Path(__file__).with_name("attacks.py")


def greet(connection: socket) -> None:
    connection.sendall(b"from the endpoint")
    connection.close()


limits = Limits(60, facts["memory"], facts["file"], facts["processes"] - 1, 256)
with tempfile.TemporaryDirectory() as folder:
    readable = Path(folder, "readable")
    readable.mkdir()
    (readable / "mine").write_text("to be read")
    for path in (readable, readable / "mine"):
        path.chmod(0o777)  # so that only the sandbox keeps it from being written
    facts["readable"] = str(readable)
    cells = Cells([sys.executable, str(program)], [str(readable)], limits)
    paths = [Path(folder, name) for name in ("in", "out", "err")]
    paths[0].write_text("the task")
    root = Path(folder, "root")
    root.mkdir()
    with paths[0].open("rb") as stdin, paths[1].open("wb") as stdout, paths[2].open("wb") as stderr:
        command = [sys.executable, str(program), json.dumps(facts), *names]
        env = {"PATH": os.environ["PATH"], "TMPDIR": "/tmp/work", "TOKEN": "1"}
        running = cells.start(command, env, facts["port"], Files(stdin, stdout, stderr), root)
        began = time.monotonic()
        status = running.wait(seconds, greet)
        running.close()
    took = time.monotonic() - began
    print(
        json.dumps([status, took, paths[1].read_text(), paths[2].read_text(), [str(path) for path in root.iterdir()]])
    )
