"""The user's side of a run: their repository, and hashes and copies of their files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.errors import ConfigError
from lockstep.evaluation.plan import verifier_label
from lockstep.loops.start import resume_run, start_run
from lockstep.track.facts import project_diff
from lockstep.track.provenance import keep_sources, require_clean
from lockstep.track.rundir import RunDirectory
from lockstep.user_code import code_files
from tests.loops.runs import LORA, NO_EVAL, events, words


def git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> list[str]:
    """A committed repository with a recipe, rows and a grader that imports a file beside it; the words of `train`."""
    given = words(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "runs_dir=runs", "steps=1")
    grader = tmp_path / "grader.py"
    (tmp_path / "bytes_of.py").write_text("def bytes_of(text):\n    return text.encode()\n")
    grader.write_text(
        "import sys; sys.path.insert(0, __file__.rpartition('/')[0])\nfrom bytes_of import bytes_of\n"
        + grader.read_text()
    )
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "begin")
    monkeypatch.chdir(tmp_path)
    return given


def test_a_run_keeps_commit_diff_and_copies_of_what_the_recipe_names(project: list[str], tmp_path: Path):
    (tmp_path / "bytes_of.py").write_text(
        "# token hf_abcdefghijklmnop\ndef bytes_of(text):\n    return text.encode()\n"
    )
    run = start_run(load(project))
    manifest = run.manifest()
    head = subprocess.check_output(["git", "-C", tmp_path, "rev-parse", "HEAD"], text=True).strip()
    assert manifest["project"]["commit"] == head
    assert [line[3:] for line in manifest["project"]["changed"]] == ["bytes_of.py"]  # and not runs/
    sources = {Path(one["path"]).name: one for one in manifest["sources"]}
    assert sources.keys() == {"grader.py", "bytes_of.py", "sums.jsonl"}
    for name, one in sources.items():
        assert (run.path / one["copy"]).read_bytes() == (tmp_path / name).read_bytes()
    diff = (run.path / "code" / "project.diff").read_text()
    assert "+# token ***" in diff
    assert "hf_abc" not in diff


def test_a_file_that_changes_before_a_resume_is_reported_and_kept(project: list[str], tmp_path: Path):
    run = start_run(load([*project, "steps=2"]))
    for step in ("000002",):
        subprocess.run(["rm", "-r", run.checkpoints_path / f"step_{step}"], check=True)
    with (tmp_path / "bytes_of.py").open("a") as file:
        file.write("# changed\n")
    resume_run(run.path, allow_fallback=True)
    assert any("bytes_of.py has changed since the run began" in text for text in events(run, "warning"))
    assert "# changed" in next((run.path / "code").glob("attempt2_*bytes_of.py")).read_text()


def test_a_resume_keeps_the_commit_and_the_diff_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "begin")
    (tmp_path / "a.txt").write_text("two\n")
    with RunDirectory.create("runs/r", "steps: 1\n", {}) as run:
        keep_sources(run, {"names": "no file"}, "runs")
    began = run.manifest()["project"]
    git(tmp_path, "commit", "-qam", "more")
    (tmp_path / "a.txt").write_text("three\n")
    with RunDirectory.resume("runs/r", {}) as run:
        assert keep_sources(run, {"names": "no file"}, "runs") == []
    assert run.manifest()["project"] == began
    assert "+two" in (run.path / "code" / "project.diff").read_text()


def test_a_failed_start_that_kept_files_burns_no_name(project: list[str], tmp_path: Path):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    run = RunDirectory.create(tmp_path / "runs" / "begun", "steps: 1\n", {})
    (run.path / "code").mkdir()
    (run.path / "code" / "1_grader.py").write_text("old")
    run.close()
    again = RunDirectory.create(run.path, "steps: 1\n", {})
    assert again.replaced
    assert not (run.path / "code").exists()
    again.close()


def test_require_clean_names_what_is_not_committed(project: list[str], tmp_path: Path):
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / "x").write_text("")
    require_clean(tmp_path, "runs")
    (tmp_path / "grader.py").write_text("def grade(p, r):\n    return 0\n")
    with pytest.raises(ConfigError, match=r"these files are not committed: grader\.py"):
        require_clean(tmp_path, "runs")
    outside = tmp_path.parent / f"{tmp_path.name}_outside"
    outside.mkdir()
    with pytest.raises(ConfigError, match="not in a git repository"):
        require_clean(outside, "runs")


@pytest.mark.parametrize("name", ["runs", "./x/../runs", "run[s]", "{absolute}/runs", ".", "{absolute}"])
def test_the_folder_of_the_runs_alone_does_not_count(project: list[str], tmp_path: Path, name: str):
    runs_dir = name.replace("{absolute}", str(tmp_path))
    runs = tmp_path / runs_dir
    if runs != tmp_path and ".." not in name:
        runs.mkdir(exist_ok=True)
        (runs / "metrics.jsonl").write_text("")
        require_clean(tmp_path, runs_dir)
    (tmp_path / "grader.py").write_text("def grade(p, r):\n    return 0\n")
    assert "return 0" in project_diff(tmp_path, runs_dir)
    with pytest.raises(ConfigError, match=r"these files are not committed: grader\.py"):
        require_clean(tmp_path, runs_dir)


def test_graders_of_one_name_with_other_content_are_two_graders(project: list[str], tmp_path: Path):
    made = load(project)
    before = verifier_label(made)
    assert verifier_label(made) == before
    (tmp_path / "bytes_of.py").write_text("def bytes_of(text):\n    return b''\n")
    assert verifier_label(made) != before
    assert before.partition("#")[0] == verifier_label(made).partition("#")[0]
    assert verifier_label(load(["sums"])) == "numeric"
    rows = f"task={{kind: file, data: {{source: '{tmp_path}/bytes_of.py:rows'}}, verifier: text}}"
    assert verifier_label(load(["sums", rows])) == "text"  # code that makes rows does not grade


def test_code_files_follow_imports_of_their_folder_once(tmp_path: Path):
    (tmp_path / "a.py").write_text("import b, json\nfrom c.d import e\n")
    (tmp_path / "b.py").write_text("import a\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "__init__.py").write_text("")
    found = code_files([f"{tmp_path}/a.py:grade", "steps: 3", f"{tmp_path}/gone.py:x"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.py", "b.py", "c/__init__.py"]


@pytest.mark.parametrize("text", ["You add two numbers. " * 14, "~ Add the two numbers.", "~ See sums.py: add."])
def test_a_prompt_is_not_taken_for_a_path(project: list[str], text: str):
    run = start_run(load([*project, f"chat.system={text!r}"]))
    assert {Path(one["path"]).name for one in run.manifest()["sources"]} == {"grader.py", "bytes_of.py", "sums.jsonl"}
