"""Batch arithmetic against the examples of other systems' documentation, by hand."""

from __future__ import annotations

import pytest

from lockstep.config.load import load
from lockstep.plan.batch import batch_lines, equivalents


def line_of(args: list[str], start: str) -> str:
    (found,) = (line for line in batch_lines(load(args)) if line.startswith(start))
    return found


def elsewhere(args: list[str], system: str) -> str:
    (found,) = (line for line in equivalents(load(args)) if line.startswith(f"{system}: "))
    return found


# verl's documentation: 1024 prompts x 8 samples, mini-batches of 256 prompts, 8 ranks
VERL = ["prompts_per_step=1024", "samples_per_prompt=8", "update.samples_per_update=2048", "steps=10"]


def test_the_arithmetic_of_verls_example() -> None:
    recipe = load(VERL)
    assert (recipe.samples_per_step, recipe.samples_per_update) == (8192, 2048)
    assert (recipe.updates_per_epoch, recipe.updates_per_step, recipe.policy_updates) == (4, 4, 40)
    assert line_of(VERL, "off-policy").startswith("off-policy: updates 2 to 4 of each step")
    eight = [*VERL, "placement={kind: colocated, gpus: 8}"]
    assert line_of(eight, "an update").startswith("an update: 2048 samples on 8 processes with 256 each")


def test_it_is_said_in_words() -> None:
    lines = batch_lines(load([*VERL, "rollout.max_tokens=512", "update.epochs=2", "update.tokens_per_microbatch=4096"]))
    assert lines[:5] == [
        "a step: 1024 prompts x 8 samples each = 8192 samples of at most 512 tokens",
        "8192 samples / 2048 an update = 4 updates a pass, x 2 passes = 8 updates a step; each pass deals the samples into its "
        "updates by a permutation of its own, prompts are not kept together",
        "an update: 2048 samples on 1 process, in micro-batches of up to 4096 tokens; their size changes memory and speed, "
        "not the result",
        "off-policy: updates 2 to 8 of each step; the weights have moved since the samples were drawn, so the ratio is not 1",
        "the run: 10 steps x 8 updates = 80 optimizer steps",
    ]


def test_a_single_update_is_on_policy() -> None:
    assert load([]).updates_per_step == 1
    assert line_of([], "off-policy") == (
        "off-policy: none; each update is the only one of its samples, so the ratio is 1 by construction"
    )
    assert "permutation" not in " ".join(batch_lines(load([])))


def test_two_policies_and_two_updates_are_named() -> None:
    assert "engine's own log-probabilities" in line_of(["algorithm.old_logprobs=rollout"], "off-policy: none")
    two = line_of(["update.epochs=2", "algorithm.old_logprobs=rollout"], "off-policy: update 2 of each step")
    assert two.endswith("so it differs from 1 by rounding even in update 1")
    bare = line_of(["update.epochs=2", "algorithm.kind=rloo"], "off-policy: update 2 of each step")
    assert bare.endswith("and the loss has no ratio that accounts for it")


def test_a_critic_that_warms_up_takes_steps_from_the_policy() -> None:
    args = ["algorithm.kind=ppo", "algorithm.critic.warmup_steps=10", "steps=40", "update.epochs=2"]
    recipe = load(args)
    assert (recipe.critic_steps, recipe.policy_updates) == (10, 60)
    assert line_of(args, "the run") == (
        "the run: 40 steps, of which the first 10 train the critic alone; 30 x 2 updates = 60 optimizer steps of the policy"
    )


def test_dynamic_sampling_is_said_with_its_cap() -> None:
    args = ["algorithm.kind=dapo", "algorithm.dynamic_sampling.max_rounds=3", "prompts_per_step=5"]
    assert "in up to 3 rounds of at most 5 prompts" in line_of(args, "dynamic sampling")
    assert not [line for line in batch_lines(load([])) if line.startswith("dynamic")]


def test_names_elsewhere() -> None:
    assert elsewhere(VERL, "verl") == (
        "verl: data.train_batch_size=1024 (prompts), rollout.n=8, actor.ppo_mini_batch_size=256 (prompts: verl multiplies by n, "
        "so 256 x 8 samples), actor.ppo_epochs=1"
    )
    # OpenRLHF of the notes: 16 prompts x 8 samples, train_batch_size 16 are samples: 8 updates of 2 prompts
    sixteen = ["prompts_per_step=16", "samples_per_prompt=8", "update.samples_per_update=16"]
    assert load(sixteen).updates_per_step == 8
    assert elsewhere(sixteen, "OpenRLHF") == (
        "OpenRLHF: rollout_batch_size=16 (prompts), n_samples_per_prompt=8, train_batch_size=16 (samples), max_epochs=1"
    )
    trl = elsewhere([*sixteen, "update.epochs=3", "steps=5"], "TRL")
    assert "num_generations=8, generation_batch_size=128 (samples)" in trl
    assert "per_device_train_batch_size x processes x gradient_accumulation_steps = 16 (samples)" in trl
    assert "steps_per_generation = 8 x gradient_accumulation_steps" in trl
    assert "num_iterations=3, max_steps=120 (optimizer steps)" in trl
    assert elsewhere([], "prime-rl") == "prime-rl: batch_size=64 (rollouts), rollouts_per_example=8"


@pytest.mark.parametrize(
    ("args", "system", "reason"),
    [
        (["update.samples_per_update=4"], "verl", "4 samples are those of 0.5 prompts"),
        (
            ["prompts_per_step=3", "samples_per_prompt=8", "update.samples_per_update=12"],
            "verl",
            "those of 1.5 prompts",
        ),
        (["update.samples_per_update=32"], "prime-rl", "a step of 64 samples makes 2"),
        (["update.epochs=2"], "prime-rl", "it makes one update of each batch"),
        (["algorithm.kind=reinforce", "samples_per_prompt=1"], "TRL", "GRPOConfig refuses num_generations=1"),
        (["algorithm.kind=dapo"], "TRL", "it has no dynamic sampling"),
    ],
)
def test_where_there_is_no_equivalent_it_says_so(args: list[str], system: str, reason: str) -> None:
    line = elsewhere(args, system)
    assert line.startswith(f"{system}: no equivalent: ")
    assert reason in line
    assert "=" not in line.replace("num_generations=1", "")


def test_trls_own_configuration_agrees(tmp_path: object) -> None:
    """The numbers that are printed for TRL, put into its GRPOConfig: it derives the steps per generation that is claimed."""
    trl = pytest.importorskip("trl")
    recipe = load(["prompts_per_step=16", "samples_per_prompt=8", "update.samples_per_update=32"])
    config = trl.GRPOConfig(
        output_dir=str(tmp_path),
        num_generations=recipe.samples_per_prompt,
        generation_batch_size=recipe.samples_per_step,
        per_device_train_batch_size=recipe.samples_per_update // 4,
        gradient_accumulation_steps=4,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    assert config.steps_per_generation == recipe.updates_per_epoch * 4


def test_sampling_that_is_cut_is_said() -> None:
    (line,) = [line for line in batch_lines(load(["rollout.top_p=0.9", "rollout.top_k=50"])) if "warning" in line]
    assert line.startswith(
        "warning: rollout.top_k=50, rollout.top_p=0.9: what is sampled from is cut and what is learnt is not"
    )
    assert not [line for line in batch_lines(load([])) if "warning" in line]
