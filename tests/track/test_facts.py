from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from lockstep.track.facts import code_facts, manifest_facts, mask, package_versions


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_commit_and_the_changes_of_a_checkout_are_recorded(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", "a.py")
    assert code_facts(tmp_path)["commit"] is None  # tracked, but nothing is committed yet
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = code_facts(tmp_path)
    assert len(clean["commit"]) == 40
    assert (clean["changed_files"], clean["diff_sha256"]) == (0, None)
    (tmp_path / "a.py").write_text("x = 2\n")
    (tmp_path / "new.py").write_text("y = 1\n")
    dirty = code_facts(tmp_path)
    assert dirty["commit"] == clean["commit"]
    assert dirty["changed"] == [" M a.py", "?? new.py"]
    assert "1 insertion" in dirty["diff"]
    assert len(dirty["diff_sha256"]) == 64


def test_a_package_installed_inside_someone_elses_repository_is_not_in_git(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "own.py").write_text("")
    git(tmp_path, "add", "own.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    installed = tmp_path / ".venv" / "lib" / "lockstep"
    installed.mkdir(parents=True)
    (installed / "a.py").write_text("")
    assert code_facts(installed) == {"commit": None, "why": "not tracked by git"}


def test_outside_of_git_the_reason_is_recorded(tmp_path: Path) -> None:
    facts = code_facts(tmp_path)
    assert facts["commit"] is None
    assert "not a git repository" in facts["why"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--token", "abc", "x"], ["--token", "***", "x"]),
        (["--api-key=abc"], ["--api-key=***"]),
        (["track.api_key=abc", "HF_TOKEN=abc"], ["track.api_key=***", "HF_TOKEN=***"]),
        (["rollout.max_tokens=64"], ["rollout.max_tokens=64"]),
        (["update.tokens_per_microbatch=4096"], ["update.tokens_per_microbatch=4096"]),
        (["model.path=hf_abcdefghijklmnopqrstuvwx"], ["model.path=***"]),
        (["task.path=https://me:pw@host/x.jsonl"], ["task.path=https://***@host/x.jsonl"]),
        (["--token", "--resume"], ["--token", "--resume"]),
        (["train", "recipe.yaml", "seed=1"], ["train", "recipe.yaml", "seed=1"]),
        (["a.url=https://judge/v1?v=2&api_key=hush#x"], ["a.url=https://judge/v1?v=2&api_key=***#x"]),
        (["https://me:hush@host/a"], ["https://***@host/a"]),
    ],
)
def test_secrets_on_the_command_line_are_masked_and_settings_are_not(words: list[str], shown: list[str]) -> None:
    assert mask(words) == shown


def test_facts_are_json_and_hold_the_variables_that_change_how_a_run_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PRIVATE_SETTING", "do-not-write-this-down")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "a-private-word")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:a-private-word@hub.example")
    facts = manifest_facts(["lockstep", "train", "--token", "hush"])
    text = json.dumps(facts, allow_nan=False)
    assert "do-not-write-this-down" not in text
    assert "hush" not in text
    assert facts["pid"] == os.getpid()
    assert facts["packages"]["torch"]
    assert facts["cpu"]["threads"] >= 1
    assert facts["threads"] >= 1
    assert "a-private-word" not in text
    known = {
        "OMP_WAIT_POLICY": "ACTIVE",
        "NCCL_DEBUG": "WARN",
        "HF_TOKEN": "***",
        "HF_ENDPOINT": "https://***@hub.example",
    }
    assert facts["environment"].items() >= known.items()
    assert facts["python"].startswith("CPython 3")


def test_only_installed_packages_are_listed() -> None:
    versions = package_versions()
    assert "pyarrow" in versions
    assert "vllm" not in versions or versions["vllm"]
