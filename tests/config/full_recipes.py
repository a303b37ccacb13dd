"""Valid recipes that together name every setting, and recipes impossible as a whole: what test_mutations.py mutates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lockstep.config.load import load_mapping

Tree = dict[str, Any]

TREES: Tree = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
GIVEN, SFT, FILE_TASK, PYTHON_TASK = (TREES[name] for name in ("GIVEN", "SFT", "FILE_TASK", "PYTHON_TASK"))
OTHER_ADAPTER, NOISE, PLATEAU = (TREES[name] for name in ("OTHER_ADAPTER", "NOISE", "PLATEAU"))
ALGORITHMS, OPTIMIZERS, VERIFIERS, TASKS = (TREES[name] for name in ("ALGORITHMS", "OPTIMIZERS", "VERIFIERS", "TASKS"))
"""Variants that GIVEN does not have."""
COMPOSITE: Tree = {
    "kind": "composite",
    "combine": "weighted",
    "parts": [
        {"name": f"p{i}", "verifier": kind, "weight": 0.5**i} for i, kind in enumerate((*VERIFIERS, {"kind": "text"}))
    ],
}


def complete(given: Tree) -> Tree:
    """With every setting that `given` leaves out: a setting that is added to the schema is mutated without a change here."""
    return load_mapping(given).model_dump(mode="json")


FULL = complete(GIVEN)
FULL_FILE = complete(GIVEN | {"task": FILE_TASK, "epochs": 1.5})
FULL_PYTHON = complete(GIVEN | {"task": PYTHON_TASK})
FULL_ADAPTER = complete(GIVEN | {"adapter": OTHER_ADAPTER})
FULL_PLATEAU = complete(GIVEN | {"eval": GIVEN["eval"] | {"stop": PLATEAU}})
FULL_ALGORITHMS = tuple(complete(GIVEN | {"algorithm": algorithm}) for algorithm in ALGORITHMS)
FULL_OPTIMIZERS = tuple(complete(GIVEN | {"optimizer": optimizer}) for optimizer in OPTIMIZERS)
SUPERVISED: Tree = {"loop": "sft", "sft": SFT, "algorithm": {"kind": "grpo"}, "update": {}}
FULL_VERIFIERS = tuple(
    complete(GIVEN | {"task": GIVEN["task"] | {"verifier": verifier}}) for verifier in (*VERIFIERS, COMPOSITE)
)
FULL_TASKS = tuple(complete(GIVEN | {"task": task}) for task in TASKS)
FULL_NOISE = complete(GIVEN | {"noise": NOISE})
PLACED: Tree = {"kind": "colocated", "gpus": 2, "restarts": 1, "timeout_s": 60.0}
FULL_PLACED = complete(GIVEN | {"placement": PLACED, "sync": {"transport": "shared"}})
FULL_SPLIT = complete(
    GIVEN | {"placement": {"kind": "split", "train": 2, "rollout": 3}, "sync": {"transport": "shared"}}
)
NOT_OF_SFT = ("noise", "prompts_per_step", "samples_per_prompt")
FULL_SFT = complete({name: value for name, value in GIVEN.items() if name not in NOT_OF_SFT} | SUPERVISED)
BASES = (
    FULL_SFT,
    FULL_NOISE,
    FULL_PLACED,
    FULL_SPLIT,
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
