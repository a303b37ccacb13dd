"""What the sandbox's processes do not share with the machine, also where the filter of system calls stops a program first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.code import Code
from tests.verifiers.test_sandbox import processes_of


@pytest.fixture(scope="module")
def code() -> Iterator[Code]:
    verifier = build_verifier(schema.CodeVerifier(workers=1))
    assert isinstance(verifier, Code)
    yield verifier
    verifier.pool.close()


@pytest.mark.parametrize("kind", ["net", "ipc", "uts", "mnt"])
def test_a_namespace_is_the_sandboxs_own(code: Code, kind: str) -> None:
    found = processes_of(code)
    assert found
    ours = Path(f"/proc/self/ns/{kind}").readlink()
    assert ours not in [Path(f"/proc/{one.pid}/ns/{kind}").readlink() for one in found]
