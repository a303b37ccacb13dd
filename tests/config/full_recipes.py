"""Valid recipes that together name every setting, and recipes impossible as a whole: what test_mutations.py mutates."""

from __future__ import annotations

from typing import Any

import yaml

from lockstep.config.load import dump, load_mapping

Tree = dict[str, Any]

GIVEN: Tree = {
    "name": "full",
    "runs_dir": "runs",
    "seed": 3,
    "device": "cpu",
    "threads": 2,
    "steps": 40,
    "prompts_per_step": 4,
    "samples_per_prompt": 8,
    "model": {"path": "org/model", "revision": "main", "dtype": "fp32", "trust_remote_code": False},
    "adapter": {"kind": "lora", "rank": 8, "alpha": 16.0, "targets": ["q_proj", "v_proj"]},
    "task": {
        "kind": "reasoning_gym",
        "dataset": "chain_sum",
        "settings": {"min_terms": 2},
        "seed": 1,
        "size": 100,
        "verifier": {"kind": "numeric", "fallback": "last_number", "tolerance": 0.001},
    },
    "chat": {
        "system": "Be brief.",
        "examples": [{"user": "1 + 1 =", "assistant": "2"}],
        "suffix": "!",
        "template_kwargs": {"enable_thinking": False},
    },
    "rollout": {
        "engine": "native",
        "slots": 32,
        "max_tokens": 48,
        "temperature": 0.9,
        "top_k": 5,
        "top_p": 0.95,
        "min_p": 0.05,
        "stop": ["\n"],
        "ignore_eos": False,
    },
    "algorithm": {
        "kind": "grpo",
        "advantage": {"kind": "group", "divide_by_std": False, "std_eps": 1e-5, "std_ddof": 0},
        "loss": {"kind": "clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0},
        "aggregation": "token-mean",
        "old_logprobs": "recompute",
        "kl": {"coef": 0.01, "estimator": "k2", "placement": "loss", "target": 0.1, "horizon": 100},
        "correction": {"kind": "mis", "level": "geometric", "low": 0.99, "high": 1.01, "weigh": False},
        "entropy_coef": 0.001,
        "critic": None,
        "dynamic_sampling": {"enabled": True, "max_rounds": 4},
        "overlong": {"buffer": 4, "penalty": 0.5, "drop_truncated": True},
    },
    "optimizer": {
        "lr": 3e-6,
        "betas": [0.9, 0.95],
        "eps": 1e-9,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "states": "8bit",
        "schedule": "cosine",
        "warmup_steps": 4,
        "min_lr_ratio": 0.1,
    },
    "update": {
        "samples_per_update": 16,
        "epochs": 2,
        "tokens_per_microbatch": 4096,
        "share_prompts": False,
        "drop_zero_advantage": False,
        "recompute": "selective",
        "max_skipped": 5,
    },
    "sync": {"transport": "copy", "probe_first": 3, "probe_every": 5, "probe_sequences": 2, "probe_tokens": 16},
    "eval": {
        "enabled": True,
        "every": 10,
        "at_start": False,
        "items": 50,
        "role": "ood_probe",
        "modes": [
            {"name": "greedy", "temperature": 0.0, "samples": 1},
            {"name": "hot", "temperature": 1.0, "samples": 4, "estimates": ["pass@2", "maj@4"]},
        ],
        "also": [{"role": "sanity", "items": 18}],
        "stop": {"kind": "drops", "metric": "eval/greedy/accuracy", "in_a_row": 3, "min_delta": 0.02},
        "max_tokens": 96,
    },
    "save": {"every": 10, "keep_last": 3, "keep_best": "eval/greedy/accuracy"},
    "track": {"sinks": ["wandb"], "project": "p", "tags": ["a"], "rollouts_every": 2},
    "health": {
        "max_unscored": 0.1,
        "warn_unscored": 0.05,
        "clipping": {"tier": "stop", "limit": 50.0, "steps": 4, "within": 6},
    },
}
FILE_TASK: Tree = {
    "kind": "file",
    "data": {
        "source": "train.jsonl",
        "prompt": "question",
        "answer": "result",
        "id": "key",
        "keep": ["level"],
        "max_rows": 100,
        "on_bad_row": "drop",
        "filters": [{"kind": "length", "low": 5}, {"kind": "among", "columns": ["level"], "values": [1, "a"]}],
    },
    "heldout": {"id_probe": {"source": "test.jsonl"}},
    "heldout_rows": 10,
    "near_overlap": "refuse",
    "verifier": {"kind": "text", "fallback": "last_line"},
}
PYTHON_TASK: Tree = {"kind": "python", "path": "my.py:Mine", "settings": {"level": 3}}
OTHER_ADAPTER: Tree = {"kind": "peft", "method": "vera", "options": {"r": 4}, "targets": ["q_proj"]}
PPO: Tree = {
    "kind": "ppo",
    "advantage": {"kind": "gae", "gamma": 0.99, "lam": 0.95, "whiten": False, "whiten_eps": 1e-6},
    "loss": {"kind": "python", "path": "my.py:loss", "settings": {"a": 1}},
    "kl": {"coef": 0.01, "estimator": "k1", "placement": "reward"},
    "correction": {"kind": "tis", "level": "sequence", "cap": 3.0},
    "critic": {"backbone": "shared", "lr": 1e-4, "value_clip": 0.3, "coef": 0.1, "warmup_steps": 2},
}
ALGORITHMS: tuple[Tree, ...] = (
    PPO,
    {
        "kind": "reinforce_pp_baseline",
        "advantage": {"kind": "whitened", "baseline": "group_mean", "gamma": 0.9, "whiten_eps": 1e-6},
        "loss": {"kind": "cispo", "weight_floor": 0.1, "weight_cap": 3.0},
    },
    {"kind": "gspo", "advantage": {"kind": "max_rl", "mean_eps": 1e-3}, "loss": {"kind": "gspo", "clip_low": 1e-3}},
    {"kind": "reinforce", "advantage": {"kind": "reward", "baseline": 0.5}},
)
"""The variants that GIVEN does not have."""
RATE: Tree = {
    "lr": 3e-6,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "schedule": "wsd",
    "warmup_steps": 4,
    "min_lr_ratio": 0.1,
    "decay_share": 0.3,
}
OPTIMIZERS: tuple[Tree, ...] = (
    RATE
    | {"kind": "muon", "momentum": 0.9, "nesterov": False, "iterations": 4, "scale": "original"}
    | {"betas": [0.9, 0.99], "eps": 1e-9, "rest_lr_ratio": 0.5},
    RATE | {"kind": "python", "path": "my.py:Mine", "settings": {"level": 3}, "state_bytes": 4.0},
)
VERIFIERS: tuple[Tree, ...] = (
    {"kind": "math", "fallback": "last_line", "written_out": True},
    {"kind": "choice", "options": 5, "several": True},
    {"kind": "set", "repeats": "ignore"},
    {"kind": "regex", "pattern": "#### (.*)", "shown_as": "#### ANSWER"},
    {"kind": "json", "json_schema": {"type": "object"}, "equal": False},
    {"kind": "python", "path": "my.py:grade", "seconds": 2.0},
    {"kind": "code", "tests": "checks", "isolation": "best_effort"},
    {"kind": "judge", "url": "http://localhost:8000/v1", "model": "m", "key_env": "KEY", "rule": {"kind": "text"}},
)
COMPOSITE: Tree = {
    "kind": "composite",
    "combine": "weighted",
    "parts": [
        {"name": f"p{i}", "verifier": kind, "weight": 0.5**i} for i, kind in enumerate((*VERIFIERS, {"kind": "text"}))
    ],
}
QUESTIONS = GIVEN["task"]
TASKS: tuple[Tree, ...] = (
    {
        "kind": "tools",
        "questions": QUESTIONS,
        "tools": [{"path": "my.py:look", "name": "look", "description": "d", "parameters": {"type": "object"}}],
        "format": "plain",
        "explain": False,
        "turns": {"limit": 3, "reply_tokens": 16, "step_seconds": 5.0, "memory_gib": 2.0, "credit": "end"},
    },
    {"kind": "guess_number", "low": 1, "high": 50, "progress": 0.5},
    {"kind": "env", "path": "my.py:Env", "settings": {"level": 2}, "seeds": 50},
    {"kind": "gymnasium", "env": "my.py:Env", "instructions": "i", "actions": ["left", "right"], "solved": 1.0},
    {"kind": "textarena", "game": "Game-v0", "opponent": "my.py:move", "seat": 1},
    {"kind": "open_spiel", "game_list": ["hex"], "game_configs": {"hex": [{"board_size": 3}]}, "max_random_steps": 5},
    {
        "kind": "open_spiel",
        "games": ["hex"],
        "reward_mode": "outcome",
        "playouts": 4,
        "playout": "mcts",
        "simulations": 8,
    },
    {"kind": "open_spiel", "games": ["hex"], "reward_mode": "game", "opponent": "mcts", "illegal_moves": 1},
    {
        "kind": "open_spiel",
        "games": ["hex"],
        "reward_mode": "game",
        "opponent": "adapter",
        "rival": {"path": "runs/rival", "temperature": 0.5, "max_tokens": 8, "slots": 4},
    },
    {
        "kind": "mixed",
        "tasks": {"a": {"weight": 2.0, "task": {"kind": "guess_number"}}, "b": {"task": QUESTIONS}},
        "curriculum": {"low": 0.2, "high": 0.8, "outside": 0.2, "memory": 0.5},
    },
)
"""Tasks of several turns, and mixed ones."""
NOISE: Tree = {
    "sigma_start": 0.02,
    "sigma_end": 0.001,
    "stages": 5,
    "targets": ["norm"],
    "layer_scale": {"layers": 0.5},
}
SFT: Tree = {
    "data": None,
    "rollouts": {"run": "runs/a", "keep": "all", "per_prompt": 2, "first_step": 3},
    "validation": None,
    "validation_rows": 8,
    "validate_every": 5,
    "epochs": None,
    "sequences_per_step": 4,
    "max_tokens": 64,
    "too_long": "drop",
    "train_on": "all_assistant",
    "aggregation": "sequence_mean",
}


def complete(given: Tree) -> Tree:
    """With every setting that `given` leaves out: a setting that is added to the schema is mutated without a change here."""
    return yaml.safe_load(dump(load_mapping(given)))


FULL = complete(GIVEN)
FULL_FILE = complete(GIVEN | {"task": FILE_TASK})
FULL_PYTHON = complete(GIVEN | {"task": PYTHON_TASK})
FULL_ADAPTER = complete(GIVEN | {"adapter": OTHER_ADAPTER})
PLATEAU: Tree = {"kind": "plateau", "metric": "eval/hot/pass@2", "smooth": 2, "patience": 4, "min_delta": 0.0}
FULL_PLATEAU = complete(GIVEN | {"eval": GIVEN["eval"] | {"stop": PLATEAU}})
FULL_ALGORITHMS = tuple(complete(GIVEN | {"algorithm": algorithm}) for algorithm in ALGORITHMS)
FULL_OPTIMIZERS = tuple(complete(GIVEN | {"optimizer": optimizer}) for optimizer in OPTIMIZERS)
SUPERVISED: Tree = {"loop": "sft", "sft": SFT, "algorithm": {"kind": "grpo"}, "update": {}}
FULL_VERIFIERS = tuple(
    complete(GIVEN | {"task": GIVEN["task"] | {"verifier": verifier}}) for verifier in (*VERIFIERS, COMPOSITE)
)
FULL_TASKS = tuple(complete(GIVEN | {"task": task}) for task in TASKS)
FULL_NOISE = complete(GIVEN | {"noise": NOISE})
NOT_OF_SFT = ("noise", "prompts_per_step", "samples_per_prompt")
FULL_SFT = complete({name: value for name, value in GIVEN.items() if name not in NOT_OF_SFT} | SUPERVISED)
BASES = (
    FULL_SFT,
    FULL_NOISE,
    *FULL_TASKS,
    *FULL_VERIFIERS,
    *FULL_OPTIMIZERS,
    FULL,
    FULL_FILE,
    FULL_PYTHON,
    FULL_ADAPTER,
    FULL_PLATEAU,
    *FULL_ALGORITHMS,
)

IMPOSSIBLE: tuple[tuple[Tree, str], ...] = (
    ({"update.samples_per_update": 5}, "update.samples_per_update"),
    ({"update.samples_per_update": 33}, "update.samples_per_update"),
    ({"update.samples_per_update": 64}, "update.samples_per_update"),
    ({"prompts_per_step": 3}, "update.samples_per_update"),
    ({"samples_per_prompt": 1}, "samples_per_prompt"),
    ({"samples_per_prompt": 1, "update.samples_per_update": 3}, "samples_per_prompt"),
    ({"optimizer.warmup_steps": 160}, "optimizer.warmup_steps"),
    ({"optimizer.warmup_steps": 4, "steps": 1}, "optimizer.warmup_steps"),
    ({"health.warn_unscored": 0.2}, "health.warn_unscored"),
    ({"eval.modes": []}, "eval.modes"),
    ({"eval.modes": [{"name": "a"}, {"name": "a"}]}, "eval"),
    ({"eval.modes": [{"samples": 2}]}, "eval.modes.0"),
    ({"eval.modes": [{"name": "a"}, {"name": "Not A Name"}]}, "eval.modes.1.name"),
    ({"adapter.kind": "none"}, "adapter.rank"),
    ({"adapter": {"rank": 4}}, "adapter.rank"),
    ({"adapter.kind": "loraa"}, "adapter.kind"),
    ({"adapter": "lorra"}, "adapter"),
    ({"task.kind": "file"}, "task.dataset"),
    ({"task.kind": "python"}, "task.size"),
    ({"task": {"kind": "file"}}, "task.data"),
    ({"task": {"kind": "python", "path": "mine.py"}}, "task.path"),
    ({"task": {"kind": "file", "data": "a", "heldout": {"test": "b"}}}, "task.heldout.test"),
    ({"task.verifier.kind": "text"}, "task.verifier.tolerance"),
    ({"task.verifier": {"kind": "python"}}, "task.verifier.path"),
    ({"task.verifier": COMPOSITE | {"parts": COMPOSITE["parts"][:1]}}, "task.verifier.parts"),
    ({"task.verifier": COMPOSITE | {"parts": COMPOSITE["parts"][::-1]}}, "task.verifier"),
    ({"task.verifier": COMPOSITE | {"combine": "all"}}, "task.verifier"),
    ({"task.verifier": COMPOSITE | {"combine": "some"}}, "task.verifier.combine"),
    (
        {
            "task.verifier": COMPOSITE
            | {"parts": [{"name": "a", "verifier": {"kind": "nothing"}}, COMPOSITE["parts"][1]]}
        },
        "task.verifier.parts.0.verifier.kind",
    ),
    ({"task.verifier": {"kind": "regex", "pattern": "(a)(b)"}}, "task.verifier"),
    ({"task.settings": {"a": float("nan")}}, "task.settings.a"),
    ({"chat.template_kwargs": {"a": [1, float("inf")]}}, "chat.template_kwargs.a.1"),
    ({"algorithm.kind": "ppoo"}, "algorithm.kind"),
    ({"algorithm.advantage.std_ddof": 2}, "algorithm.advantage.std_ddof"),
    ({"algorithm.advantage.kind": "leave_one_out"}, "algorithm.advantage.std_ddof"),
    ({"algorithm.advantage": {"kind": "gae"}}, "algorithm"),
    ({"algorithm.critic": {}}, "algorithm"),
    ({"algorithm.loss.kind": "reinforce"}, "algorithm.loss.clip_low"),
    ({"algorithm.loss.clip_low": 1}, "algorithm.loss.clip_low"),
    ({"algorithm.loss.dual_clip": 1}, "algorithm.loss.dual_clip"),
    ({"algorithm.loss": "my.txt:fn"}, "algorithm.loss"),
    ({"algorithm.loss": "cispoo"}, "algorithm.loss"),
    ({"algorithm.aggregation": "mean"}, "algorithm.aggregation"),
    ({"algorithm.kl.coef": 0}, "algorithm.kl"),
    ({"algorithm.kl.estimator": "k1"}, "algorithm.kl"),
    ({"algorithm.kl.estimator": "k4"}, "algorithm.kl.estimator"),
    ({"algorithm.kl.placement": "reward"}, "algorithm"),
    ({"algorithm.old_logprobs": "rollout"}, "algorithm"),
    ({"algorithm.correction.low": 1.02}, "algorithm.correction"),
    ({"algorithm.correction.low": 0.5}, "algorithm.correction"),
    ({"algorithm.correction": {"kind": "mis", "low": 6}}, "algorithm.correction"),
    ({"algorithm.correction": {"kind": "tis", "cap": 0.5}}, "algorithm.correction.cap"),
    ({"algorithm.correction": {"kind": "tis", "high": 5}}, "algorithm.correction.high"),
    ({"optimizer.betas": [0.9]}, "optimizer.betas"),
    ({"optimizer.betas": [0.9, 0.9, 0.9]}, "optimizer.betas"),
    ({"optimizer.betas": [0.9, 1.0]}, "optimizer.betas.1"),
    ({"adapter.rank": 1025}, "adapter.rank"),
    ({"rollout.top_p": 1.01}, "rollout.top_p"),
    ({"rollout.temperature": 0}, "rollout.temperature"),
    ({"rollout.slots": 5000}, "rollout.slots"),
    ({"rollout.stop": ["a", 3]}, "rollout.stop.1"),
    ({"seed": 2**31}, "seed"),
    ({"seed": 10**40}, "seed"),
    ({"name": ""}, "name"),
    ({"name": "../up"}, "name"),
    ({"model.path": ""}, "model.path"),
    ({"learning_rate": 1e-6}, "learning_rate"),
    ({"rollout.lr": 1e-6}, "rollout.lr"),
    ({"optimizer.lora": {"rank": 3}}, "optimizer.lora"),
)
"""Settings that are each fine or nearly so, but impossible together, and bad variants."""
