"""Translation rules that need more than one foreign setting: batch sizes, rows, graders and the rollout correction."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from lockstep.config.foreign_settings import Foreign, Missing
from lockstep.config.section import Json

Found: TypeAlias = dict[str, Json]
Rule: TypeAlias = Callable[[Foreign, Json], Found]
NUMERIC: Json = {"kind": "numeric"}
GSM8K: Json = {"kind": "regex", "pattern": "#### (-?[0-9.,]+)", "compare": "number", "shown_as": "#### ANSWER"}
"""Grader that reads a reply as verl's default reward for openai/gsm8k does."""
TRUTH = "reward_model.ground_truth"


def _prompt(model: str, f: Foreign, value: Json) -> Found:
    """Return the filter of a longest prompt, which is counted by the tokenizer of the model that the setting `model` names."""
    counted = {"model": f[model]} if isinstance(f[model], str) else {}
    return {"task.data.filters": [{"kind": "tokens", "high": value, **counted}]} if value is not None else {}


def _one_file(value: Json) -> str:
    if isinstance(value, list) and len(value) > 1:
        raise Missing("several files: put them into one folder, and set it as the source")
    return str(value[0] if isinstance(value, list) else value)


def _verl_reward(f: Foreign, value: Json) -> Found:
    if value is None:
        return {"task.verifier": GSM8K if "gsm8k" in str(f["data.train_files"]) else NUMERIC}
    function = f["custom_reward_function.name"] or "compute_score"
    return {"task.verifier": {"kind": "verl", "path": f"{value}:{function}"}}


def _openrlhf_reward(f: Foreign, value: Json) -> Found:
    if value is None:
        return {"task.verifier": NUMERIC}
    raise Missing("write its function as a grader of one reply: task.verifier=own.py:grade (docs/coming_from.md)")


def _trl_reward(f: Foreign, value: Json) -> Found:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if value is None:
        return {"task.verifier": NUMERIC}
    return {"task.verifier": {"kind": "trl", "path": [n if ".py:" in n else f"rewards.py:{n}" for n in names]}}


def _modes(temperature: str, samples: str, sampled: str, f: Foreign, value: Json) -> Found:
    hot = f.number(temperature) if not sampled or f[sampled] else 0
    count = int(f.number(samples))
    if hot == 0:
        return {"eval.modes": [{"name": "greedy"}]}
    return {"eval.modes": [{"name": f"avg@{count}" if count > 1 else "sampled", "temperature": hot, "samples": count}]}


def _gpus(estimator: str, f: Foreign, value: Json) -> Found:
    if value not in (None, 1) and f[estimator] == "gae":
        raise Missing("a run with a critic is one process here: one GPU")
    return {} if value in (None, 1) else {"placement.gpus": value}


def _engine(gpus: str, f: Foreign, value: Json) -> Found:
    if not value or value == "hf":
        return {}
    if value in ("sglang", "trtllm"):
        raise Missing("the engines here are native, which is taken, and vllm")
    if f.number(gpus) != 1:
        raise Missing("workers that train sample with the native engine; vLLM needs others: placement.kind=split")
    return {"rollout.engine": "vllm"}


def _verl_correction(f: Foreign, value: Json) -> Found:
    cap = f["algorithm.rollout_correction.rollout_is_threshold"]
    return {} if value is None else {"algorithm.correction": {"kind": "tis", "level": value, "cap": cap}}


def _openrlhf_correction(f: Foreign, value: Json) -> Found:
    limits, kind = f["algo.advantage.is_correction_threshold"], f["algo.advantage.is_correction_type"]
    if not value or not isinstance(limits, list):
        return {}
    match kind:
        case "icepop":
            return {"algorithm.correction": {"kind": "mis", "level": "token", "low": limits[0], "high": limits[1]}}
        case "tis":
            return {"algorithm.correction": {"kind": "tis", "level": "token", "cap": limits[1]}}
    raise Missing(
        "this masks by the geometric mean and weighs by the token's ratio; take kind mis, level geometric, or tis"
    )


def _trl_correction(f: Foreign, value: Json) -> Found:
    level, _, kind = str(f["vllm_importance_sampling_mode"]).partition("_")
    low, high = f["vllm_importance_sampling_clip_min"], f["vllm_importance_sampling_clip_max"]
    if not value:
        return {}
    mask: Json = {"kind": "mis", "level": level, "low": low or 0.0, "high": high}
    return {"algorithm.correction": {"kind": "tis", "level": level, "cap": high} if kind == "truncate" else mask}


def _openrlhf_clip(f: Foreign, value: Json) -> Found:
    both = f["actor.eps_clip_low_high"]
    low, high = both if isinstance(both, list) else (value, value)
    return {"algorithm.loss.clip_low": low, "algorithm.loss.clip_high": high}


def _openrlhf_kl(f: Foreign, value: Json) -> Found:
    kind, estimator, in_loss = f["algo.advantage.estimator"], f["algo.kl.estimator"], f["algo.kl.use_loss"] is True
    instead = f"set algorithm.kl={{coef: {value}, estimator: k3}}"
    if not value:
        return {}
    if not in_loss and kind not in ("gae", "reinforce", "reinforce_baseline"):
        raise Missing(f"a KL in the rewards of {kind}: {instead}, which is a KL in the loss")
    if in_loss and estimator == "k1":
        raise Missing(f"the KL estimator k1 gives no gradient on average when used in the loss: {instead}")
    return {"algorithm.kl": {"coef": value, "estimator": estimator, "placement": "loss" if in_loss else "reward"}}


def _trl_generation(f: Foreign) -> tuple[int, int]:
    """Return the samples of a step and those of an optimizer step."""
    device = int(f.number("per_device_train_batch_size")) * int(f.number("ranks"))
    update = device * int(f.number("gradient_accumulation_steps"))
    if f["generation_batch_size"] is not None:
        return int(f.number("generation_batch_size")), update
    return (update if f["steps_per_generation"] is None else device * int(f.number("steps_per_generation"))), update


def _trl_batch(f: Foreign, value: Json) -> Found:
    samples, update = _trl_generation(f)
    each = int(f.number("num_generations"))
    if samples % each:
        why = "TRL refuses it, too" if f.processes else "with ranks=1; for several processes give --ranks"
        raise Missing(f"{samples} samples of a generation are no whole number of prompts with {each} samples; {why}")
    if samples % update:
        raise Missing(
            f"an optimizer step of {update} samples reaches over several generations of {samples}: set the batch"
        )
    found: Found = {"prompts_per_step": samples // each, "update.samples_per_update": update}
    return found | ({"placement.gpus": f.processes} if (f.processes or 1) > 1 else {})


def _trl_ranks(f: Foreign, value: Json) -> Found:
    if not isinstance(value, int) and f.ranks is None:
        raise Missing("not a number of processes: give --ranks")
    return {}


def _trl_steps(path: str, f: Foreign, value: Json) -> Found:
    """Translate a number of optimizer steps, which is one of steps here."""
    if not isinstance(value, int | float) or value <= 0:
        return {}
    if value < 1:
        raise Missing(f"a share of the run: set {path} in steps")
    samples, update = _trl_generation(f)
    return {path: max(1, round(value / (max(1, samples // update) * f.number("num_iterations"))))}


def _trl_warmup(f: Foreign, value: Json) -> Found:
    steps = f.number("warmup_steps")
    return {"optimizer.warmup_ratio": steps} if 0 < steps < 1 else {"optimizer.warmup_steps": int(steps)}


def _trl_high(f: Foreign, value: Json) -> Found:
    if f["loss_type"] == "cispo":
        return {} if value is None else {"algorithm.loss.weight_cap": max(1.0, f.number("epsilon_high"))}
    return {"algorithm.loss.clip_high": f["epsilon"] if value is None else value}


def _name(f: Foreign, value: Json) -> Found:
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")[:100]
    return {"name": text} if text else {}


def _sinks(f: Foreign, value: Json) -> Found:
    names = value if isinstance(value, list) else [value]
    known: list[Json] = [name for name in names if name in ("wandb", "trackio", "tensorboard")]
    if others := [str(name) for name in names if name not in (*known, "console", "file", "none", None)]:
        raise Missing(f"{', '.join(others)}: see lockstep config help track.sinks")
    return {"track.sinks": known} if known else {}


_VAL = "actor_rollout_ref.rollout.val_kwargs"
RULES: Mapping[str, Rule] = {
    "verl_prompt": partial(_prompt, "actor_rollout_ref.model.path"),
    "openrlhf_prompt": partial(_prompt, "actor.model_name_or_path"),
    "trl_prompt": partial(_prompt, "model_name_or_path"),
    "verl_files": lambda f, value: {"task.data.source": _one_file(value), "task.data.answer": TRUTH},
    "verl_heldout": lambda f, value: {
        "task.heldout.id_probe": {"source": _one_file(value), "prompt": f["data.prompt_key"], "answer": TRUTH}
    },
    "verl_reward": _verl_reward,
    "openrlhf_reward": _openrlhf_reward,
    "trl_reward": _trl_reward,
    "verl_modes": partial(_modes, f"{_VAL}.temperature", f"{_VAL}.n", f"{_VAL}.do_sample"),
    "openrlhf_modes": partial(_modes, "eval.temperature", "eval.n_samples_per_prompt", ""),
    "verl_gpus": partial(_gpus, "algorithm.adv_estimator"),
    "openrlhf_gpus": partial(_gpus, "algo.advantage.estimator"),
    "verl_engine": partial(_engine, "trainer.n_gpus_per_node"),
    "openrlhf_engine": partial(_engine, "actor.num_gpus_per_node"),
    "trl_engine": partial(_engine, "ranks"),
    "verl_correction": _verl_correction,
    "openrlhf_correction": _openrlhf_correction,
    "trl_correction": _trl_correction,
    "openrlhf_clip": _openrlhf_clip,
    "openrlhf_kl": _openrlhf_kl,
    "trl_batch": _trl_batch,
    "trl_ranks": _trl_ranks,
    "trl_steps": partial(_trl_steps, "steps"),
    "trl_eval": partial(_trl_steps, "eval.every"),
    "trl_save": partial(_trl_steps, "save.every"),
    "trl_warmup": _trl_warmup,
    "trl_betas": lambda f, value: {"optimizer.betas": [value, f["adam_beta2"]]},
    "trl_high": _trl_high,
    "name": _name,
    "sinks": _sinks,
}
"""Rules by the name that the table uses: a function from the file's settings and the value to settings here."""
