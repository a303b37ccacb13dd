"""What `lockstep eval` says when it is called."""

from __future__ import annotations

import pytest

from lockstep.cli import main


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["eval", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
