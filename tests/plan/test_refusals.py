"""A run that could not work is refused by name, in the same words by plan, doctor and train, before it has a folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config.load import load
from lockstep.doctor.recipe import check_recipe
from lockstep.errors import RefusedError
from lockstep.loops.start import start_run
from lockstep.plan.refusals import refusals
from tests.loops.runs import terminate_in, words
from tests.saying import Printed

LORA, PISSA = ("adapter.kind=lora",), ("adapter.kind=lora", "adapter.init=pissa")
A26 = ("prompts_per_step=16", "samples_per_prompt=8", "update.samples_per_update=16", "eval.enabled=false",
       "task.heldout_rows=0", "optimizer.warmup_ratio=0.05")  # fmt: skip
"""Attempt 26 of the field notes: 50,000 rows, 20 passes, 16 prompts of 8 samples, read as 16 samples an update."""
SPEC = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE = {"model_type": "phi3", "max_position_embeddings": 65536, "pad_token_id": 0, "original_max_position_embeddings": 4096,
            "rope_parameters": SPEC | {"original_max_position_embeddings": 4096}}  # fmt: skip
HUGE = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 64, "head_dim": 1024}  # fmt: skip
MOE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
VLLM = ("rollout.engine=vllm", "device=auto", "rollout.slots=auto")

TABLE: list[tuple[dict[str, Any], tuple[str, ...], str, str]] = [
    ({}, ("steps=100", "optimizer.warmup_steps=66"), "long_warmup", "the warm-up takes 66 of the run's 100"),
    ({}, ("steps=200", "optimizer.warmup_steps=80"), "slow_warmup", "only 25.00% of its peak, after 20 of 80"),
    ({}, ("steps=200", "optimizer.warmup_ratio=0.4"), "slow_warmup", "after 20 of 80 warm-up updates (the run has 200)"),
    ({}, ("steps=30", "optimizer.warmup_ratio=0.7"), "long_warmup", "takes 21 of the run's 30 optimizer steps"),
    ({}, (*A26, "steps=62500"), "slow_warmup", "is only 0.64% of its peak, after 160 of 25000"),
    ({}, (*A26, "steps=62500", "update.samples_per_update=64"), "slow_warmup", "after 40 of 6250 warm-up updates (the run"),
    ({}, ("steps=200", "epochs=1", "task.heldout_rows=0", "eval.enabled=false"), "short_horizon", "end after 20 steps"),
    ({}, ("steps=200", "epochs=1.5"), "short_horizon", "1.5 passes over 32 rows, 2 per step, end after 24 steps"),
    ({}, ("steps=1000000", "samples_per_prompt=100000", "eval.enabled=false"), "disk", "of disk"),
    ({}, ("save.keep_best=loss/policy",), "best_metric", "a higher value is not better"),
    ({}, ("save.keep_best=validation/logprob",), "best_metric", "or the run does not measure it"),
    ({}, ("optimizer.weight_decay=1000", "optimizer.lr=0.0005"), "extreme", "takes 50% of every matrix in each"),
    ({}, ("algorithm.kl.coef=1000",), "extreme", "algorithm.kl.coef=1000 outweighs every reward"),
    ({}, ("rollout.temperature=0.02",), "extreme", "replies to a prompt are nearly the same"),
    ({}, (*LORA, "adapter.targets=[q_prj]"), "adapter", "'q_prj' names no linear layer"),
    ({}, (*LORA, "adapter.targets=[lm_head]"), "adapter", "lm_head"),
    ({}, ("adapter.kind=peft", "adapter.method=oft", "adapter.targets=[q_prj]"), "adapter", "'q_prj' names no linear layer"),
    ({}, (*PISSA, "adapter.rank=1024"), "adapter", "rank 1024 is more than the"),
    ({}, ("numerics.train=mxfp4-w4a4", "numerics.exclude=[foo]"), "numerics", "'foo' names no linear layer"),
    ({}, ("noise.stages=3", "noise.targets=[foo]"), "noise", "foo"),
    ({}, ("rollout.max_tokens=100000",), "context", "rollout.max_tokens=100000 leaves no room for a prompt"),
    ({}, ("eval.max_tokens=100000",), "context", "eval.max_tokens=100000 leaves no room for a prompt"),
    (LONGROPE, ("rollout.max_tokens=5000",), "context", "in the model's context of 4096"),
    ({}, ("steps=1000000", "eval.enabled=false", "save={every: 1, keep_last: 1000000}"), "disk", "the run needs"),
    (HUGE, (*LORA, "adapter.rank=4"), "memory", "weights and optimizer state take"),
    ({"model_type": "bloom", "n_head": 4}, (), "family", "bloom (BloomForCausalLM)"),
    ({"model_type": "mamba"}, (), "family", "its layers with a state (MambaMixer) are not told where sequences begin"),
    ({"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, (), "model", "needs its own Python code"),
    ({"quantization_config": {"quant_method": "awq"}}, (), "model", "the weights are quantised (quant_method: awq)"),
    (MOE, (*LORA, "adapter.targets=[gate_proj]"), "adapter", "'gate_proj' names no linear layer"),
]  # fmt: skip
"""Changes of the tiny model's config, settings, and the refusal that they must have. Nothing else may be refused."""


MORE: list[tuple[dict[str, Any], tuple[str, ...], str, str]] = [
    ({}, ("steps=60", "optimizer.warmup_steps=31"), "long_warmup", "31 of the run's 60"),
    ({}, ("steps=40", "update.epochs=2", "optimizer.warmup_ratio=0.6"), "long_warmup", "48 of the run's 80"),
    (
        {},
        ("steps=300", "optimizer.warmup_steps=120"),
        "slow_warmup",
        "at step 20 the learning rate is only 16.67% of its peak",
    ),
    ({}, ("steps=200", "epochs=2"), "short_horizon", "2 passes over 32 rows, 2 per step, end after 32 steps"),
    ({}, ("save.keep_best=grad/norm",), "best_metric", "a higher value is not better"),
    ({}, ("save.keep_best=length/mean",), "best_metric", "a higher value is not better"),
    ({}, (*LORA, "adapter.targets=['re:.*nothing']"), "adapter", "'re:.*nothing' names no linear layer"),
    ({}, (*LORA, "adapter.init=olora", "adapter.rank=1024"), "adapter", "rank 1024 is more than the 64"),
    ({}, ("adapter.kind=peft", "adapter.method=ia3", "adapter.targets=[q_prj]"), "adapter", "'q_prj' names no linear"),
    ({}, ("numerics.rollout=mxfp4-w4a16", "numerics.exclude=[foo]"), "numerics", "'foo' names no linear layer"),
    ({}, ("numerics.train=nvfp4-w4a4", "numerics.exclude=[foo]"), "numerics", "'foo' names no linear layer"),
    ({}, ("rollout.max_tokens=4096",), "context", "in the model's context of 4096"),
    ({}, ("algorithm.kind=ppo", "algorithm.critic.lr=9"), "extreme", "algorithm.critic.lr=9 moves every weight of the"),
    ({}, ("optimizer.lr=1e300",), "extreme", "optimizer.lr=1e+300 moves every weight"),
    ({}, ("optimizer.lr=1e-12",), "extreme", "optimizer.lr=1e-12 moves no weight by more than"),
    ({}, ("algorithm.kind=ppo", "algorithm.critic.lr=1e-12"), "extreme", "leaves the critic where it began"),
    ({}, ("algorithm.advantage.std_eps=1e6",), "extreme", "std_eps=1e+06 is added to the divisor"),
    ({}, ("algorithm.entropy_coef=100",), "extreme", "algorithm.entropy_coef=100 outweighs every reward"),
    (
        {},
        ("algorithm.overlong={buffer: 2, penalty: 1000}",),
        "extreme",
        "algorithm.overlong.penalty=1000 outweighs every",
    ),
    ({}, (*LORA, "adapter.rank=4", "adapter.alpha=1e5", "optimizer.lr=0.01"), "extreme", "changes by 25000"),
    ({}, ("rollout.temperature=9", "algorithm.kl.coef=11"), "extreme", "rollout.temperature=9: replies are noise"),
    ({"max_position_embeddings": 16}, ("rollout.max_tokens=16",), "context", "in the model's context of 16"),
    ({"quantization_config": {"quant_method": "gptq"}}, (), "model", "quant_method: gptq"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, (), "model", "quant_method: bitsandbytes"),
    ({"model_type": "rwkv"}, (), "family", "recurrent layers"),
]
"""The same, for a test that asks doctor's checks without the command around them."""


def changed(folder: Path, model: Path, changes: dict[str, Any]) -> Path:
    """Return a copy of the model's folder with another config, and without weights, which would not belong to it."""
    if not changes:
        return model
    shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    if "model_type" in changes:
        config = {k: v for k, v in config.items() if k not in ("architectures", "rope_parameters", "rope_scaling")}
    (folder / "model" / "config.json").write_text(json.dumps(config | changes))
    return folder / "model"


def still(text: str) -> str:
    """Leave out what others change while a test runs: the free bytes of the disk."""
    return re.sub(r"[\d.,]+ GB are free", "… GB are free", text)


def test_the_table_covers_every_name_but_serving() -> None:
    assert len(TABLE) + len(MORE) >= 40
    names = "slow_warmup long_warmup short_horizon memory disk best_metric extreme model family context adapter numerics noise"
    assert {name for _, _, name, _ in TABLE} == set(names.split())


@pytest.mark.parametrize(("changes", "overrides", "name", "says"), TABLE)
def test_plan_doctor_and_train_say_the_same_refusal(
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    overrides: tuple[str, ...],
    name: str,
    says: str,
) -> None:
    args = words(tmp_path, changed(tmp_path, tiny_model_dir, changes), *overrides)
    (found,) = refusals(load(args))
    assert (found.name, found.allowed) == (name, False)
    assert says in (what := still(found.what))
    assert found.fix
    assert main(["plan", *args]) == 2
    planned = still(capsys.readouterr().err)
    assert main(["train", *args]) == 2
    refused = still(capsys.readouterr().err)
    assert planned == refused
    assert f"{name}: {what}\n    to fix: {found.fix}" in refused
    assert not (tmp_path / "runs").exists()
    assert main(["doctor", *args, "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    check = checks[name]
    assert (check["verdict"], still(check["found"]), check["fix"]) == ("fail", what, found.fix)


@pytest.mark.parametrize(("changes", "overrides", "name", "says"), MORE)
def test_further_refusals_are_the_same_three_times(
    tiny_model_dir: Path,
    tmp_path: Path,
    printed: Printed,
    changes: dict[str, Any],
    overrides: tuple[str, ...],
    name: str,
    says: str,
) -> None:
    args = words(tmp_path, changed(tmp_path, tiny_model_dir, changes), *overrides)
    (check,) = [one for one in check_recipe(load(args)) if one.verdict == "fail"]
    assert (check.name, says in check.found) == (name, True)
    said = []
    for command in ("plan", "train"):
        said.append(still(printed(command, *args, code=2)))
    assert said[0] == said[1]
    assert f"{name}: {still(check.found)}\n    to fix: {check.fix}" in said[0]
    assert not (tmp_path / "runs").exists()


def test_200_steps_that_were_25(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Attempt 28: 400 rows, 16 prompts of 8 samples, 200 of what are optimizer steps."""
    args = words(tmp_path, tiny_model_dir, *A26, "steps=200", "epochs=1", "optimizer.warmup_ratio=0")
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(20) for b in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = refusals(load(args))
    assert found.name == "short_horizon"
    assert not found.allowed
    assert "1 passes over 400 rows, 16 per step, end after 25 steps (200 optimizer steps)" in found.what
    assert refusals(load([*args, "steps=25"])) == []


@pytest.mark.parametrize("size", ["-5", "nan", "0", "inf"])
def test_a_gpu_has_a_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipes/smoke.yaml", f"--gpu-gib={size}"]) == 2
    assert "must be a number above 0" in capsys.readouterr().err


def test_experts_that_vllm_cannot_take_are_refused_before_it_starts(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = changed(tmp_path, tiny_model_dir, MOE)
    found = refusals(load(words(tmp_path, model, *VLLM)))
    assert [(one.name, "mixtral" in one.what) for one in found] == [("serving", True)]
    assert refusals(load(words(tmp_path, tiny_model_dir, *VLLM))) == []


def test_a_gpu_that_is_not_here_can_be_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
             "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))  # no weights at all
    args = ["plan", f"model.path={tmp_path}", "task=reasoning_gym", "--gpu-gib", "80"]
    assert main(args) == 2
    said = capsys.readouterr()
    assert "memory: memory plan: full fine-tuning of 7.62e9 parameters does not fit" in said.err
    assert main([*args, "--allow", "memory"]) == 0
    assert "Let through\n  memory: memory plan: full fine-tuning" in capsys.readouterr().out


def test_all_of_them_are_shown_at_once(tiny_model_dir: Path, tmp_path: Path, printed: Printed) -> None:
    recipe = words(tmp_path, tiny_model_dir, *LORA, "adapter.targets=[nope]", "rollout.max_tokens=100000")
    said = printed("train", *recipe, code=2)
    assert "  context: " in said
    assert "  adapter: " in said


def test_what_is_let_through_stands_in_the_manifest_and_stays_on_a_resume(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = words(tmp_path, tiny_model_dir, "steps=2", "optimizer.warmup_ratio=0.9", "eval.enabled=false")
    assert main(["train", *args]) == 2
    assert main(["train", *args, "--allow", "slow_warmup"]) == 2  # of another name
    run = tmp_path / "runs" / "run"
    terminate_in(tmp_path, run, 2)
    assert main(["train", *args, "--allow", "long_warmup"]) == 75
    (line,) = json.loads((run / "manifest.json").read_text())["allowed"]
    assert line.startswith("long_warmup: the warm-up takes 2 of the run's 2 optimizer steps")
    assert "let through: long_warmup: " in (run / "log.txt").read_text()
    assert main(["train", "--resume", str(run), "--allow", "disk"]) == 0
    assert load([str(run / "recipe.yaml")]).allow == ["disk", "long_warmup"]
    capsys.readouterr()


def test_epochs_are_the_horizon_of_a_run(tiny_model_dir: Path, tmp_path: Path, printed: Printed) -> None:
    args = words(tmp_path, tiny_model_dir, "epochs=0.25", "eval.enabled=false")
    text = (tmp_path / "recipe.yaml").read_text().replace("steps: 3\n", "")
    (tmp_path / "recipe.yaml").write_text(text)
    out = printed("plan", *args)
    assert "run: rl, task file, 4 steps" in out
    assert "32 rows to train on: 8 are asked, 75% never (4 steps x 2), with 4 replies each time" in out
    run = start_run(load(args))
    assert load([str(run.recipe_path)]).steps == 4
    with pytest.raises(RefusedError, match="short_horizon"):
        start_run(load([*args, "steps=50", "name=other"]))
    assert "task.kind=reasoning_gym has no fixed number: set steps" in printed("plan", "smoke", "epochs=2", code=2)


@pytest.mark.parametrize("lie", [{"hidden_size": "64"}, {"max_position_embeddings": None}, {"hidden_size": -4}])
def test_a_config_that_lies_is_the_loaders_to_refuse(
    tiny_model_dir: Path, tmp_path: Path, printed: Printed, lie: dict[str, object]
) -> None:
    args = words(tmp_path, changed(tmp_path, tiny_model_dir, lie))
    assert refusals(load(args)) == []
    assert "Traceback" not in printed("train", *args, code=4)


def test_a_recipe_that_fits_and_a_model_that_is_not_here_have_none(tiny_model_dir: Path, tmp_path: Path) -> None:
    good = ("steps=100", "optimizer.warmup_steps=50", "optimizer.schedule=cosine")
    assert refusals(load(words(tmp_path, tiny_model_dir, *PISSA, "adapter.rank=4", *good))) == []
    assert refusals(load(words(tmp_path, tmp_path / "gone", *LORA, "adapter.targets=[nope]"))) == []


@pytest.mark.parametrize("settings", [("steps=200", "optimizer.warmup_ratio=0.4"), ("steps=30", "optimizer.warmup_ratio=0.7"),
                                      ("steps=200", "optimizer.warmup_steps=80"), ("algorithm.kl.coef=99",),
                                      ("optimizer.weight_decay=1000", "optimizer.lr=0.0006")])  # fmt: skip
def test_a_fix_that_is_pasted_ends_the_refusal(settings: tuple[str, ...]) -> None:
    (refused,) = refusals(load([*settings, "model.path=/nowhere"]))
    name, value = re.search(r"set ([\w.]+) to ([\w.-]+)", refused.fix).groups()  # type: ignore[union-attr]
    kept = [one for one in settings if not one.startswith(f"{name}=")]
    assert refusals(load([*kept, f"{name}={value}", "model.path=/nowhere"])) == []


@pytest.mark.parametrize(
    "metric", ["reward/mean", "answer/correct", "answer/steps", "task/file/reward", "eval/greedy/accuracy"]
)
def test_the_best_may_be_kept_by_what_is_better_the_higher_it_is(metric: str) -> None:
    assert refusals(load([f"save.keep_best={metric}", "model.path=/nowhere"])) == []
