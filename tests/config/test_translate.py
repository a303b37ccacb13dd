"""Runs of verl, OpenRLHF and TRL become recipes that validate, and every setting of theirs is accounted for."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.foreign_files import read_settings, system_of
from lockstep.config.foreign_settings import SYSTEMS, Json, System, entry_of, table
from lockstep.config.help import groups
from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.config.translate import Field, translate
from lockstep.config.translate_rules import RULES
from lockstep.errors import ConfigError
from tests.docs.translation_table import PAGE, page
from tests.saying import Printed

VERL_LORA = {  # settings of verl's example of GSM8K with Qwen2.5-3B and LoRA, at b178a3c
    "algorithm.adv_estimator": "grpo", "trainer.val_before_train": False, "data.train_files": "gsm8k/train.parquet",
    "data.val_files": "gsm8k/test.parquet", "data.train_batch_size": 16, "data.max_prompt_length": 512,
    "data.max_response_length": 1024, "data.filter_overlong_prompts": True, "data.truncation": "error", "data.shuffle": False,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B-Instruct", "actor_rollout_ref.model.lora_rank": 64,
    "actor_rollout_ref.model.lora_alpha": 32, "actor_rollout_ref.actor.optim.lr": 3e-6,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 40,
    "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl", "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2, "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 5, "actor_rollout_ref.rollout.layered_summon": True, "trainer.critic_warmup": 0,
    "trainer.logger": ["console", "wandb"], "trainer.experiment_name": "qwen2.5_3b_grpo_lora", "trainer.n_gpus_per_node": 2,
    "trainer.save_freq": 20, "trainer.test_freq": 5, "trainer.total_epochs": 15,
}  # fmt: skip
OPENRLHF_DAPO = {  # settings of OpenRLHF's DAPO example, at 3c3be62
    "actor.num_gpus_per_node": 8, "vllm.num_engines": 4, "algo.kl.init_coef": 1e-3, "algo.kl.use_loss": True,
    "algo.kl.estimator": "k3", "algo.advantage.estimator": "group_norm", "algo.dynamic_filtering_enable": True,
    "algo.dynamic_filtering_range": [0, 1], "actor.eps_clip_low_high": [0.2, 0.27], "train.micro_batch_size": 8,
    "actor.model_name_or_path": "OpenRLHF/Llama-3-8b-sft-mixture", "train.batch_size": 128, "rollout.batch_size": 128,
    "rollout.n_samples_per_prompt": 8, "data.max_len": 2048, "data.max_samples": 20000, "actor.adam.lr": 5e-7,
    "data.prompt_dataset": "OpenRLHF/prompt-collection-v0.1", "data.input_key": "context_messages", "ds.zero_stage": 3,
    "actor.gradient_checkpointing_enable": True, "algo.advantage.is_correction_enable": True, "ckpt.save_steps": 20,
}  # fmt: skip
NOTES_20B: dict[str, Any] = {  # a gpt-oss run of OpenRLHF 0.9.3, as the field notes describe it
    "pretrain": "openai/gpt-oss-20b", "actor_learning_rate": 5e-7, "init_kl_coef": 0.001, "use_kl_loss": True,
    "kl_estimator": "k3", "lora_rank": 32, "lora_alpha": 64, "n_samples_per_prompt": 8, "rollout_batch_size": 16,
    "train_batch_size": 16, "micro_train_batch_size": 1, "eps_clip": 0.1, "generate_max_len": 4096, "prompt_max_len": 1024,
    "lr_warmup_ratio": 0.05, "num_episodes": 20, "advantage_estimator": "group_norm", "prompt_data": "pool.jsonl",
    "input_key": "input", "label_key": "label", "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "entropy_loss_coef": 0.0, "vllm_num_engines": 1, "actor_num_gpus_per_node": 1, "zero_stage": 3,
}  # fmt: skip
TWO_KLS: dict[str, Json] = {  # beside VERL_LORA's in the loss
    "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02, "algorithm.adv_estimator": "gae",
    "trainer.n_gpus_per_node": 1,
}  # fmt: skip
SCHEDULES: dict[str, Json] = {
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.actor.optim.warmup_style": "cosine",
}
UNNAMED = """activation_checkpointing activation_checkpointing_kwargs auto_find_batch_size average_tokens_across_devices
batch_eval_metrics cache_implementation data_seed debug do_predict enable_jit_checkpoint entropy_coef_delta entropy_coef_max
entropy_coef_min entropy_target eval_accumulation_steps eval_delay eval_do_concat_batches eval_use_gather_object
full_determinism greater_is_better ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
label_smoothing_factor length_column_name lr_scheduler_kwargs liger_kernel_config local_rank max_tool_calling_iterations
metric_for_best_model neftune_noise_alpha num_generations_eval optim_args optim_target_modules prediction_loss_only
ref_model_mixup_alpha ref_model_sync_steps restore_callback_states_from_checkpoint resume_from_checkpoint
router_aux_loss_coef save_on_each_node skip_memory_metrics torch_empty_cache_steps trackio_bucket_id trackio_space_id
trackio_static_space_id train_sampling_strategy transformers_continuous_batching_config use_bias_correction_kl use_cache
use_transformers_continuous_batching use_transformers_paged"""
TRL_CALL = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
raise SystemExit("this file was executed")
RATE = 1e-5
config = GRPOConfig(output_dir="out", learning_rate=RATE, num_generations=8, per_device_train_batch_size=4,
                    gradient_accumulation_steps=4, steps_per_generation=8, max_completion_length=256, max_steps=200, beta=0.04,
                    loss_type="grpo", warmup_steps=0.1, use_vllm=True, save_steps=100, report_to="wandb", epsilon_high=0.28)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[accuracy, "style.py:tone"], args=config,
                      train_dataset=load_dataset(), peft_config=LoraConfig(r=16, lora_alpha=64, lora_dropout=0.05))
"""


def fields(found: tuple[Field, ...]) -> dict[str, Field]:
    return {one.name: one for one in found}


def recipe_of(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load([str(path)])


def test_every_entry_of_the_table_names_settings_and_rules_that_exist() -> None:
    paths = {one.path for group in groups() for one in group.settings} | {group.path for group in groups()}
    used = set()
    for system, entries in table().items():
        for entry in entries:
            assert entry.source, (system, entry.name)
            assert entry.ours or entry.here or entry.missing or entry.idle or entry.values, entry.name
            ours = [entry.ours] if ", " not in entry.ours else []
            ours += [path for value in entry.values.values() if isinstance(value, dict) for path in value]
            assert all(not path or {path, path.rpartition(".")[0]} & paths for path in ours), entry.name
            used |= {entry.rule} - {""}
            assert all(entry_of(system, other) for other in (*entry.when, *entry.unless))
    assert used == set(RULES)


@pytest.mark.slow
def test_the_defaults_of_trl_are_those_of_the_installed_one() -> None:
    trl = pytest.importorskip("trl")
    installed = {one.name: one.default for one in dataclasses.fields(trl.GRPOConfig)}
    for entry in table()["trl"]:
        if entry.name in installed and entry.there is not None:
            assert installed[entry.name] == entry.there, entry.name
    unnamed = {name for name in installed if not any(entry.is_named(name) for entry in table()["trl"])}
    assert unnamed == set(UNNAMED.split()), "settings of TRL that the table does not have"


def test_verl_prompts_become_samples_and_its_defaults_are_said(tmp_path: Path) -> None:
    found = translate("verl", VERL_LORA)
    recipe, said = recipe_of(tmp_path, found.text()), fields(found.fields)
    assert set(VERL_LORA) <= set(said)
    assert (recipe.prompts_per_step, recipe.samples_per_prompt, recipe.samples_per_update) == (16, 5, 80)
    assert recipe.update.tokens_per_microbatch == 40 * (512 + 1024)
    assert (recipe.epochs, recipe.lr, recipe.rollout.max_tokens) == (15, 3e-6, 1024)
    algorithm = recipe.algorithm
    assert (algorithm.kind, algorithm.aggregation, algorithm.loss.model_dump()["dual_clip"]) == (
        "grpo",
        "token-mean",
        3,
    )
    assert (algorithm.kl.coef, algorithm.kl.estimator, algorithm.kl.placement) == (0.001, "k3", "loss")
    assert (recipe.adapter.kind, recipe.placement.kind) == ("lora", "colocated")
    assert said["actor_rollout_ref.actor.loss_agg_mode"].fate == "default there"
    assert "actor_rollout_ref.actor.ppo_epochs" not in said  # 1, as here
    assert said["trainer.critic_warmup"].fate == "no effect there"
    assert said["actor_rollout_ref.rollout.tensor_model_parallel_size"].fate == "no counterpart"
    assert said["actor_rollout_ref.rollout.layered_summon"].fate == "nothing to set"


@pytest.mark.parametrize(
    ("changes", "name", "fate", "says"),
    [
        ({"actor_rollout_ref.actor.clip_ratio": 0.1}, "actor_rollout_ref.actor.clip_ratio", "no effect there", "of their own"),
        ({"algorithm.kl_ctrl.kl_coef": 0.1}, "algorithm.kl_ctrl.kl_coef", "no effect there", "use_kl_in_reward is false"),
        ({"actor_rollout_ref.actor.optim.clip_grad": 9}, "actor_rollout_ref.actor.optim.clip_grad", "no counterpart", "no"),
        ({"algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator", "no counterpart", "greedy reply"),
        ({"trainer.total_trainig_steps": 5}, "trainer.total_trainig_steps", "nothing to set", ""),
        (TWO_KLS, "actor_rollout_ref.actor.kl_loss_coef", "no counterpart", "one KL"),
        (TWO_KLS, "algorithm.kl_ctrl.kl_coef", "translated", "algorithm.kl.coef=0.02"),
        (SCHEDULES, "actor_rollout_ref.actor.optim.lr_scheduler_type", "no counterpart", "optim.warmup_style sets"),
        ({"trainer.project_name": "a ${X}"}, "trainer.project_name", "no counterpart", "does not say what ${X} is"),
        ({"actor_rollout_ref.rollout.n": "$N"}, "actor_rollout_ref.actor.ppo_mini_batch_size", "no counterpart", "not a number"),
        ({"algorithm.adv_estimater": 5}, "algorithm.adv_estimater", "unknown", "did you mean algorithm.adv_estimator"),
    ],
)  # fmt: skip
def test_nothing_of_verl_is_left_out_silently(changes: dict[str, Json], name: str, fate: str, says: str) -> None:
    one = fields(translate("verl", VERL_LORA | changes).fields)[name]
    assert one.fate == fate
    assert says in one.said


def test_openrlhf_counts_samples_where_verl_counts_prompts(tmp_path: Path) -> None:
    found = translate("openrlhf", OPENRLHF_DAPO)
    recipe, said = recipe_of(tmp_path, found.text()), fields(found.fields)
    assert (recipe.prompts_per_step, recipe.samples_per_step, recipe.samples_per_update) == (128, 1024, 128)
    assert recipe.updates_per_step == 8
    assert recipe.update.tokens_per_microbatch == 8 * 2048
    loss = recipe.algorithm.loss.model_dump()
    assert (loss["clip_low"], loss["clip_high"]) == (0.2, 0.27)
    assert recipe.algorithm.dynamic_sampling.enabled
    assert recipe.algorithm.correction.model_dump() == {"kind": "tis", "level": "token", "cap": 5.0}
    settings = recipe.optimizer
    assert (settings.schedule, settings.warmup_ratio, settings.min_lr_ratio) == ("cosine", 0.03, 0.1)
    assert said["actor.lr_warmup_ratio"].fate == "default there"


def test_the_notes_run_under_its_older_names_shows_what_it_amounts_to(tmp_path: Path) -> None:
    """A train batch of 16 samples, read as prompts, made eight updates a step."""
    found = translate("openrlhf", NOTES_20B)
    recipe, said = recipe_of(tmp_path, found.text()), fields(found.fields)
    assert set(NOTES_20B) <= set(said)
    assert not [one for one in found.fields if one.fate == "unknown"]
    assert (recipe.updates_per_step, recipe.samples_per_update, recipe.epochs) == (8, 16, 20)
    assert (recipe.rollout.max_tokens, recipe.optimizer.warmup_ratio) == (4096, 0.05)
    assert recipe.adapter.model_dump()["targets"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    in_reward = translate("openrlhf", NOTES_20B | {"use_kl_loss": False, "kl_estimator": "k1"})
    assert "a KL in the rewards of group_norm" in fields(in_reward.fields)["init_kl_coef"].said


def test_a_call_of_trl_is_read_and_not_executed(tmp_path: Path, printed: Printed) -> None:
    (tmp_path / "grpo.py").write_text(TRL_CALL)
    text = printed("config", "translate", tmp_path / "grpo.py", "--ranks", "2")
    recipe = recipe_of(tmp_path, text)
    assert (recipe.samples_per_step, recipe.samples_per_update) == (4 * 2 * 8, 4 * 2 * 4)
    assert (recipe.prompts_per_step, recipe.steps, recipe.save.every) == (8, 100, 50)  # two updates a step
    assert (recipe.lr, recipe.optimizer.warmup_ratio, recipe.optimizer.schedule) == (1e-5, 0.1, "linear")
    assert recipe.task.model_dump()["verifier"]["path"] == ["rewards.py:accuracy", "style.py:tone"]
    assert (recipe.adapter.model_dump()["rank"], recipe.adapter.model_dump()["alpha"]) == (16, 64)
    assert recipe.algorithm.correction.model_dump()["level"] == "sequence"
    assert re.search(r"#   trainer.train_dataset = \"load_dataset\(\)\": objects of the program", text)
    assert "lora.lora_dropout = 0.05: adapters have no dropout" in text


@pytest.mark.parametrize(("ranks", "says"), [(None, "for several processes give --ranks"), (3, "TRL refuses it, too")])
def test_what_trl_refuses_is_refused(ranks: int | None, says: str) -> None:
    found = fields(translate("trl", {"per_device_train_batch_size": 3, "num_generations": 8}, ranks).fields)
    assert "no whole number of prompts" in found["per_device_train_batch_size"].said
    assert says in found["per_device_train_batch_size"].said


@pytest.mark.parametrize(
    ("launcher", "ranks", "samples"),
    [
        ("accelerate launch --num_processes 4 grpo.py", None, 32),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --multi_gpu --num-processes=2 a/grpo.py", None, 16),
        ("torchrun --nnodes 2 --nproc_per_node 4 grpo.py", None, 64),
        ("torchrun --nproc_per_node 4 grpo.py", 2, 16),
        ("python grpo.py", None, 8),
    ],
)
def test_the_launcher_says_how_many_processes(tmp_path: Path, launcher: str, ranks: int | None, samples: int) -> None:
    (tmp_path / "a.sh").write_text(f"{launcher} --num_generations 8 --beta 0.04 2>&1 | tee log.txt\n")
    given = read_settings(tmp_path / "a.sh")[1]
    assert (given["num_generations"], given["beta"]) == (8, 0.04)
    assert translate("trl", given, ranks).tree["update"]["samples_per_update"] == samples
    given["nproc_per_node"] = "gpu"
    del given["num_processes" if "num_processes" in given else "beta"]
    assert "give --ranks" in fields(translate("trl", given).fields)["nproc_per_node"].said


def test_what_a_loraconfig_does_not_name_is_what_peft_takes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(TRL_CALL.replace("r=16, lora_alpha=64", 'task_type="CAUSAL_LM"'))
    found = translate("trl", read_settings(tmp_path / "a.py")[1])
    assert (found.tree["adapter"]["rank"], found.tree["adapter"]["alpha"]) == (8, 8)
    assert "PEFT's list for the model family" in fields(found.fields)["lora_target_modules"].said


def test_two_names_of_one_setting_are_both_accounted_for() -> None:
    found = fields(translate("openrlhf", NOTES_20B | {"rollout.max_new_tokens": 8}).fields)
    assert found["generate_max_len"].fate == "no counterpart"
    assert "rollout.max_tokens=8" in found["rollout.max_new_tokens"].said


def test_a_loss_without_a_clip_range_is_translated(tmp_path: Path) -> None:
    found = translate("verl", VERL_LORA | {"actor_rollout_ref.actor.policy_loss.loss_mode": "gpg"})
    assert recipe_of(tmp_path, found.text()).algorithm.loss.kind == "reinforce"


def test_a_script_is_read_with_its_variables(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "prompt=512\nreply=$((prompt * 2))\nMODEL=${MODEL:-Qwen/Qwen3-4B}\n# data.train_batch_size=9\n"
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n  data.max_response_length=$reply \\\n"
        '  +actor_rollout_ref.model.path="${MODEL}" actor_rollout_ref.actor.optim.lr=1e-6 trainer.logger=\'["console"]\' $@\n'
    )
    text, given = read_settings(path)
    assert system_of(text) == "verl"
    assert given == {
        "algorithm.adv_estimator": "grpo", "data.max_response_length": 1024, "actor_rollout_ref.model.path": "Qwen/Qwen3-4B",
        "actor_rollout_ref.actor.optim.lr": 1e-6, "trainer.logger": ["console"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("A=1 B=2 python -m verl.x data.seed=3", {"data.seed": 3}),
        ("env A=1 python -m verl.x data.seed=3 > log.txt 2>&1 &", {"data.seed": 3}),
        ('name="x"; lr=1e-6; export size=4  # data.seed=1; data.seed=2\nrun a.lr=$lr && run a.n=$name a.s=$size',
         {"a.lr": 1e-6, "a.n": "x", "a.s": 4}),
        ('D=${D:-"${HOME}/d"}\nT=${T:-"${D}/t"}\nrun a.t="${T}" a.n=8', {"a.t": "~/d/t", "a.n": 8}),
        ('run a.t="${T:-"${D:-x}/t"}" a.n=${N:-${M}} a.m=${M%/*}', {"a.t": "x/t", "a.n": "${M}", "a.m": "${M%/*}"}),
        ('X="$X y"\nrun a.n="$X" a.m=1', {"a.n": "$X y", "a.m": 1}),
        ("N=$(wc --lines x | cat -)\nrun a.n=$N a.d=x_$(date +%s) a.m=1", {"a.n": "$(wc)", "a.d": "x_$(date)", "a.m": 1}),
        ('ARGS=(a.n=1\n a.s=2 )\nrun "${ARGS[@]}" --flag "$@"', {"a.n": 1, "a.s": 2, "flag": True}),
        ("run a.day=2024-01-01 a.odd=2024-13-45", {"a.day": "2024-01-01", "a.odd": "2024-13-45"}),
    ],
)  # fmt: skip
def test_what_a_shell_would_do_with_a_line(tmp_path: Path, script: str, given: dict[str, Json]) -> None:
    (tmp_path / "a.sh").write_text(script + "\n")
    assert read_settings(tmp_path / "a.sh")[1] == given


@pytest.mark.parametrize("system", SYSTEMS)
def test_yaml_and_json_and_options_are_the_same(tmp_path: Path, system: System) -> None:
    flat = {
        "verl": VERL_LORA,
        "openrlhf": OPENRLHF_DAPO,
        "trl": {"num_generations": 4, "beta": 0.1, "report_to": "none"},
    }[system]
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    (tmp_path / "a.json").write_text(json.dumps(nested))
    (tmp_path / "a.yaml").write_text(json.dumps(nested))
    (tmp_path / "a.sh").write_text("run " + " ".join(f"{name}='{json.dumps(value)}'" for name, value in flat.items()))
    read = [read_settings(tmp_path / f"a.{kind}")[1] for kind in ("json", "yaml", "sh")]
    assert read[0] == read[1] == read[2] == flat


def test_what_cannot_be_a_recipe_is_said(tmp_path: Path, printed: Printed) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m verl.x data.train_batch_size=10 actor_rollout_ref.actor.ppo_mini_batch_size=3\n")
    assert "update.samples_per_update=3 does not divide" in printed("config", "translate", path, code=2)
    path.write_text("echo hello\n")
    with pytest.raises(ConfigError, match="no settings found"):
        read_settings(path)
    with pytest.raises(ConfigError, match="no setting in the file shows whether it was written for verl"):
        system_of("steps: 3")


def test_the_reason_of_a_missing_source_is_said(tmp_path: Path, printed: Printed) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m verl.x data.train_files=\"['a.parquet','b.parquet']\"\n")
    said = printed("config", "translate", path, code=2)
    assert "task.data.source: required" in said
    assert "several files: put them into one folder" in said


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "a: &x {b: *x}", "nested too deeply, or one holds itself"),
        ("a.json", '{"a":' * 9000, "nested too deeply"),
        ("a.py", "\0", "not Python"),
        ("pipe.sh", "", "a folder, pipe or device"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    os.mkfifo(path) if name == "pipe.sh" else path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_settings(path)


def test_a_value_that_python_would_refuse_is_kept_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("GRPOConfig(beta={[1]: 2}, seed=3)")
    assert read_settings(tmp_path / "a.py")[1] == {"beta": "{[1]: 2}", "seed": 3}


def test_a_name_that_holds_itself_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "f = [f]\nrest = {'beta': 0.1}\nGRPOConfig(max_steps=5, **rest, **more)\nGRPOTrainer(reward_funcs=f)\n"
    )
    assert read_settings(tmp_path / "a.py")[1] == {
        "max_steps": 5,
        "beta": 0.1,
        "**": "more",
        "trainer.reward_funcs": ["f"],
    }


@pytest.mark.parametrize(
    ("suffix", "text"), [("py", "GRPOConfig(beta=1)"), ("json", '{"beta": 1}'), ("sh", "--beta 1")]
)
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text(text, "utf-8-sig")
    assert read_settings(path)[1] == {"beta": 1}


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tests.docs.translation_table"
