"""PPO end to end with a tiny model: the critic learns, policy and critic resume to the bit, and the sync does not see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.learner.value_head import ValueTraining
from lockstep.loops.start import resume_run, start_run
from tests.loops.runs import LORA, NO_EVAL, column, fingerprints, numbers, recipe, same, trained, weights
from tests.loops.test_resume import stopped

PPO = ("algorithm.kind=ppo", "algorithm.critic.lr=0.01", NO_EVAL)
OWN, SHARED = "algorithm.critic.backbone=own", "algorithm.critic.backbone=shared"
FULL = ("optimizer.lr=0.003",)
LORA_BF16 = (*LORA, "model.dtype=bf16")
KINDS = pytest.mark.parametrize("kind", [FULL, LORA, LORA_BF16], ids=["full", "lora", "lora-bf16"])
BACKBONES = pytest.mark.parametrize("backbone", [OWN, SHARED], ids=["own", "shared"])
LONG = (
    "steps=5",
    "update.samples_per_update=4",
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=2",
    "save.every=3",
)

BY_PROMPT = '''
def by_prompt(prompt, reply):
    """What is still to come can be read off the question, whatever the reply."""
    return float("A" in prompt.messages[-1]["content"])
'''


@pytest.mark.sampled(2)
@KINDS
@BACKBONES
def test_a_stopped_ppo_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, tiny_model_dir: Path, kind: tuple[str, ...], backbone: str
) -> None:
    settings = (*PPO, *kind, *LONG, backbone)
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken")
    run = resume_run(stopped(tmp_path, tiny_model_dir, *settings, step=2))
    assert same(run, unbroken, 5)
    assert len(set(fingerprints(run).values())) == 5, "every step moves the policy"
    assert all(value > 0 for value in column(run, "critic/grad_norm"))


def test_a_resume_that_forgets_the_critic_would_be_noticed(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*PPO, *FULL, *LONG, OWN)
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken")
    path = stopped(tmp_path, tiny_model_dir, *settings, step=2)
    monkeypatch.setattr(ValueTraining, "restore", lambda self, counters, optimizer: None)
    assert not same(resume_run(path), unbroken, 5)


@pytest.mark.sampled(2)
@BACKBONES
@pytest.mark.parametrize("kind", [FULL, LORA], ids=["full", "lora"])
def test_the_critic_comes_to_know_what_can_be_known(
    tmp_path: Path, tiny_model_dir: Path, kind: tuple[str, ...], backbone: str
) -> None:
    settings = (
        *PPO,
        *kind,
        backbone,
        "algorithm.critic.coef=1",
        "steps=12",
        "prompts_per_step=8",
        "samples_per_prompt=2",
    )
    given = recipe(tmp_path, tiny_model_dir, *settings, f"task.verifier.path={tmp_path}/judge.py:by_prompt")
    grader, rows = tmp_path / "judge.py", tmp_path / "sums.jsonl"
    grader.write_text(BY_PROMPT)
    questions = [f"{letter * 30} {number}" for number in range(40) for letter in "A7"]
    rows.write_text("".join(json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in questions))
    run = start_run(given)
    explained = column(run, "critic/explained_variance")
    assert explained[0] == pytest.approx(0, abs=1e-6), "every value is 0 at the start"
    assert sum(explained[-3:]) / 3 > 0.7


@BACKBONES
def test_in_the_warm_up_only_the_critic_is_trained(tmp_path: Path, tiny_model_dir: Path, backbone: str) -> None:
    run = trained(tmp_path, tiny_model_dir, *PPO, *FULL, backbone, "algorithm.critic.warmup_steps=2", "steps=4")
    assert len(set(fingerprints(run).values())) == 3
    assert [changed > 0 for changed in column(run, "weights/changed_tensors")] == [False, False, True, True]
    by_step = numbers(run)
    assert all("critic/loss" in by_step[step] for step in (1, 2, 3, 4))
    assert [float(by_step[step].get("batch/optimizer_steps", "0")) for step in (1, 2, 3, 4)] == [0, 0, 1, 1]


def test_the_policy_file_holds_no_critic(tmp_path: Path, tiny_model_dir: Path) -> None:
    """What other programs load is the same with and without one."""
    from safetensors import safe_open

    names = {}
    for label, settings in {"ppo": PPO, "grpo": (NO_EVAL,)}.items():
        run = trained(tmp_path / label, tiny_model_dir, *settings, "steps=1")
        assert weights(run, 1).keys() == {"model.safetensors", "optimizer.safetensors"}
        with safe_open(run.checkpoints_path / "step_000001" / "model.safetensors", "pt") as file:
            names[label] = set(file.keys())
    assert names["ppo"] == names["grpo"]
