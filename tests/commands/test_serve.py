"""`lockstep serve`: what it prints, that it answers with the proven weights, and that Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lockstep.cli import main


def test_a_model_is_served_until_ctrl_c(tiny_model_dir: Path, tmp_path: Path):
    token = tmp_path / "token"
    words = [
        sys.executable,
        "-m",
        "lockstep",
        "serve",
        str(tiny_model_dir),
        "--name",
        "mine",
        "--token-file",
        str(token),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        try:
            assert re.search(r"weights [0-9a-f]{16} in fp32, context \d+", lines[0]), (lines, process.poll())
            address = lines[1].split()[1]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", address)
            assert token.read_text().strip() not in "".join(lines)
            assert token.stat().st_mode & 0o077 == 0
            body = {"model": "mine", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
            headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
            asked = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] <= 3
            asked.add_header("Authorization", "Bearer no")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(asked, timeout=60)
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def test_a_short_token_and_two_targets_are_refused(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "token").write_text("short")
    assert main(["serve", str(tiny_model_dir), "--token-file", str(tmp_path / "token")]) == 2
    assert "at least 16" in capsys.readouterr().err
    assert main(["serve", str(tiny_model_dir), "other"]) == 2
    assert "only one target can be served" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "nothing")]) != 0
    assert "nothing" in capsys.readouterr().err


def test_a_token_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model_dir: Path
):
    assert main(["serve", str(tiny_model_dir), "--token-file", str(tmp_path)]) == 2
    assert f"{tmp_path}: it cannot be read" in capsys.readouterr().err
