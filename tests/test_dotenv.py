from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.dotenv import read_env
from lockstep.errors import ConfigError
from lockstep.text import hide_values


def test_the_file_fills_what_the_environment_lacks_and_values_are_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text('# keys\nexport HF_TOKEN=hf_secretsecret\nWANDB_API_KEY="of the file"\nEMPTY=\n')
    environment = {"WANDB_API_KEY": "of the shell"}
    assert read_env(environment) == ["HF_TOKEN"]
    assert environment == {"WANDB_API_KEY": "of the shell", "HF_TOKEN": "hf_secretsecret"}
    told = capsys.readouterr().err
    assert told == "from .env: HF_TOKEN\n"


def test_another_file_may_be_named_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("A=1\n")
    (tmp_path / "other").write_text("B=2\n")
    assert read_env({"LOCKSTEP_ENV_FILE": "other"}) == ["B"]
    assert read_env({"LOCKSTEP_ENV_FILE": ""}) == []
    with pytest.raises(ConfigError, match="there is no such file"):
        read_env({"LOCKSTEP_ENV_FILE": "nowhere"})


def test_values_of_secrets_are_hidden_and_folders_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789")
    monkeypatch.setenv("PWD", "/home/someone/work")
    monkeypatch.setenv("COLOUR", "ultramarine")
    assert hide_values("0123456789 ultramarine /home/someone/work/x") == "*** ultramarine /home/someone/work/x"
