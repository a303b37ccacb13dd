"""`lockstep attempt`: branch and tag before, notes and a proposed commit after."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from lockstep import cli
from tests.gallery import Gallery
from tests.saying import Printed


def git(*arguments: str) -> str:
    return subprocess.check_output(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], text=True, stderr=subprocess.STDOUT
    )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    (tmp_path / "recipe.yaml").write_text("name: a\n")
    git("add", ".")
    git("commit", "-qm", "begin")
    return tmp_path


def test_an_attempt_is_a_branch_and_a_tag(project: Path, printed: Printed):
    (project / "runs").mkdir()
    (project / "runs" / "old").write_text("need not be committed")
    assert cli.main(["attempt", "start", "27-clip"]) == 0
    assert git("rev-parse", "--abbrev-ref", "HEAD").strip() == "attempt-27-clip"
    assert git("rev-parse", "attempt-27-clip-start") == git("rev-parse", "HEAD")
    assert "already exists" in printed("attempt", "start", "27-clip", code=2)


def test_the_next_commands_name_the_folder_of_the_runs(project: Path, printed: Printed):
    _, train, finish = printed("attempt", "start", "30", "--runs-dir", "my runs").splitlines()
    assert shlex.split(train)[-3:] == ["name=30", "runs_dir=my runs", "--require-clean"]
    assert shlex.split(finish)[-1] == "my runs/30"


def test_what_is_not_committed_begins_no_attempt(project: Path, printed: Printed):
    (project / "recipe.yaml").write_text("name: b\n")
    assert "everything committed: these files are not committed: recipe.yaml" in printed(
        "attempt", "start", "28", code=2
    )
    assert "attempt" not in git("branch", "--all") + git("tag")
    assert cli.main(["attempt", "start", "--name with blanks"]) == 2


def test_a_refusal_of_git_is_told(project: Path, printed: Printed):
    (project / ".git" / "refs" / "heads" / "attempt-29").mkdir()  # a branch of this name cannot be made
    (project / ".git" / "refs" / "heads" / "attempt-29" / "a").write_text(git("rev-parse", "HEAD"))
    assert "git failed: fatal: " in printed("attempt", "start", "29", code=2)


def test_the_proposed_commands_record_the_run(project: Path, gallery: Gallery, capsys: pytest.CaptureFixture[str]):
    gallery.copy("plain", project / "my runs" / "it's plain")
    capsys.readouterr()  # of its training, if it was not there
    assert cli.main(["attempt", "finish", "my runs/it's plain"]) == 0
    add, commit = capsys.readouterr().out.splitlines()[1:]
    git(*shlex.split(add)[1:])
    git(*shlex.split(commit)[1:])
    assert git("log", "-1", "--format=%s").startswith("it's plain: finished, reward 0.")
    assert git("show", "--stat", "--format=", "HEAD").split(" | ")[0].strip() == "my runs/NOTES.md"
