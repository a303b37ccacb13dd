"""What the sandbox's processes do not share with the machine, also where the filter of system calls stops a program first."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.code import Code
from lockstep.verifiers.gym_scores import LIMITS
from lockstep.verifiers.sandbox.host import Sandbox
from lockstep.verifiers.sandbox.isolation import FILES
from tests.verifiers.test_sandbox import processes_of


@pytest.fixture(scope="module")
def code() -> Iterator[Code]:
    verifier = build_verifier(schema.CodeVerifier(workers=1))
    assert isinstance(verifier, Code)
    yield verifier
    verifier.pool.close()


@pytest.mark.parametrize("kind", ["net", "ipc", "uts", "mnt"])
def test_a_namespace_is_the_sandboxs_own(code: Code, kind: str) -> None:
    theirs = []
    for process in processes_of(code):
        with suppress(FileNotFoundError):  # the program that the sandbox was tried with may be ending just now
            theirs.append(Path(f"/proc/{process.pid}/ns/{kind}").readlink())
    assert theirs
    assert Path(f"/proc/self/ns/{kind}").readlink() not in theirs


LATE = """
import json, os, pathlib
from lockstep.verifiers.sandbox.plain import send

def load():
    return lambda role: serve

def serve(requests, answers):
    json.loads(requests.readline())
    import late_part
    pathlib.Path("mine").write_text("written")
    send(answers, {"value": late_part.VALUE, "folder": os.getcwd()})
    os._exit(0)
"""


def test_python_in_a_folder_of_tmp_is_still_there_when_a_program_imports() -> None:
    """The program has a /tmp of its own, which must not cover what it is made of."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # another user runs the program
        Path(folder, "late_worker.py").write_text(LATE)
        Path(folder, "late_part.py").write_text("VALUE = 7")
        sandbox = Sandbox(LIMITS, paths=[folder], module="late_worker")
        try:
            with sandbox.spawn("role", (), time.monotonic() + 60) as run:
                run.start()
                said = run.ask({})
        finally:
            sandbox.close()
    if FILES in sandbox.in_force:
        assert said == {"value": 7, "folder": "/var/tmp"}
