"""TRL's own trainers without a model: its advantage, correction and loss code runs as it is, on numbers that we give.

`__init__`, generation, scoring and the forward pass are the only things replaced. A batch is padded to the right, as TRL has it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

os.environ["DISABLE_MLFLOW_INTEGRATION"] = "TRUE"  # two seconds of imports in each worker; nothing is tracked here
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

del os.environ["DISABLE_MLFLOW_INTEGRATION"]

NAN = float("nan")


@dataclass(frozen=True)
class Rows:
    """Ragged rows as padded [N, T] float64 tensors and their mask."""

    lengths: tuple[int, ...]
    mask_NT: Tensor
    """1 where trained: 0 for padding and for the holes of tool output."""
    logprobs_NT: Tensor
    old_NT: Tensor
    rollout_NT: Tensor
    ref_NT: Tensor
    entropy_NT: Tensor
    advantages_N: Tensor


def padded(rows: Sequence[Sequence[float]], filler: float = 0.0) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows], dtype=torch.float64)


class _Logs(defaultdict[str, Any]):
    """TRL's log of completions, written and never read here."""

    def __init__(self) -> None:
        super().__init__(list, rewards=defaultdict(list), extra=defaultdict(list))


def _bare(trainer: Any, lengths: Sequence[int], **settings: Any) -> None:
    """What `__init__` would set, with TRL's defaults for what these functions read."""
    arguments: dict[str, Any] = {
        "num_iterations": 1,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": len(lengths),
        "gradient_checkpointing_kwargs": None,
        "report_to": [],
        "delta": None,
        "use_bias_correction_kl": True,
    }
    trainer.args = SimpleNamespace(**{key: settings.pop(key, value) for key, value in arguments.items()})
    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        process_index=0,
        num_processes=1,
        is_main_process=True,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    defaults = {
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "state": SimpleNamespace(global_step=0),
        "_metrics": {"train": defaultdict(list)},
        "_logs": _Logs(),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "log_multimodal": False,
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "beta": 0.0,
        "ref_model": object(),
        "reward_funcs": [None],
        "reward_func_names": ["reward"],
        "reward_weights": torch.ones(1, dtype=torch.float64),
        "aux_loss_enabled": False,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "lengths": lengths,
    }
    for key, value in {**defaults, **settings}.items():
        setattr(trainer, key, value)


class _Given:
    """Stands in for the model: hands out the numbers that it was given, policy or reference."""

    rewards: Tensor
    rows: Rows
    lengths: Sequence[int]
    model: Any
    ref_model: Any

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        ids = [[1] * n for n in self.lengths]
        rollout = [row[:n].tolist() for row, n in zip(self.rows.rollout_NT, self.lengths, strict=True)]
        tool_mask = [row[:n].int().tolist() for row, n in zip(self.rows.mask_NT, self.lengths, strict=True)]
        return [[1]] * len(ids), ids, tool_mask, ["x"] * len(ids), rollout, {}, None, []

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return self.rewards[:, None]

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        if model is self.ref_model:
            return self.rows.ref_NT, self.rows.entropy_NT, None
        values = self.rows.old_NT if model is self.model else self.rows.logprobs_NT
        return values, self.rows.entropy_NT, None


class Grpo(_Given, GRPOTrainer):
    """GRPOTrainer. `settings` are its attributes; defaults are those of GRPOConfig in TRL 1.16."""

    def __init__(self, rows: Rows, **settings: Any) -> None:
        self.rows = rows
        defaults = {
            "loss_type": "dapo",
            "scale_rewards": "group",
            "multi_objective_aggregation": "sum_then_normalize",
            "importance_sampling_level": "token",
            "max_completion_length": 64,
            "off_policy_mask_threshold": None,
            "top_entropy_quantile": 1.0,
            "use_vllm": False,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_min": None,
            "vllm_importance_sampling_clip_max": 3.0,
            "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False,
            "use_adaptive_entropy": False,
        }
        _bare(self, rows.lengths, **{**defaults, **settings})

    def advantages(self, rewards: Sequence[float | None], group: int) -> list[float]:
        """TRL's advantages of a step's rewards, `group` samples a prompt."""
        self.rewards = torch.tensor([NAN if r is None else r for r in rewards], dtype=torch.float64)
        self.num_generations = group
        output = self._generate_and_score_completions([{"prompt": "x"}] * len(rewards))
        found: list[float] = output["advantages"].tolist()
        return found

    def correction(self) -> Tensor:
        """TRL's weights for the mismatch between engine and learner, [N, T] or [N, 1]."""
        self.use_vllm = True
        count = len(self.lengths)
        self.rewards, self.num_generations = torch.arange(count, dtype=torch.float64), count
        output = self._generate_and_score_completions([{"prompt": "x"}] * count)
        weights: Tensor = output["importance_sampling_ratio"]
        return weights

    def loss(self, weights: Tensor | None = None, **more: Tensor) -> Tensor:
        """TRL's loss of the rows; `weights` are those of `correction`."""
        self.use_vllm = weights is not None
        inputs = _inputs(self.rows, old_per_token_logps=self.rows.old_NT, **more)
        return self._compute_loss(None, inputs if weights is None else {**inputs, "importance_sampling_ratio": weights})


class Rloo(_Given, RLOOTrainer):
    """RLOOTrainer, its clipped sequence ratio and its advantages."""

    def __init__(self, rows: Rows, **settings: Any) -> None:
        self.rows = rows
        defaults = {"normalize_advantages": False, "reward_clip_range": None}
        _bare(self, rows.lengths, **{**defaults, **settings})

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, ids, _, completions, *_ = super()._generate(prompts)
        return prompt_ids, ids, completions

    def advantages(self, rewards: Sequence[float | None], group: int) -> list[float]:
        self.rewards = torch.tensor([NAN if r is None else r for r in rewards], dtype=torch.float64)
        self.num_generations = group
        output = self._generate_and_score_completions([{"prompt": "x"}] * len(rewards))
        found: list[float] = output["advantages"].tolist()
        return found

    def loss(self) -> Tensor:
        old_N = (self.rows.old_NT * self.rows.mask_NT).sum(-1)
        return self._compute_loss(None, _inputs(self.rows, old_logps=old_N))


def _inputs(rows: Rows, **more: Tensor) -> dict[str, Any]:
    ids_NT = rows.mask_NT.long()
    one_N1 = torch.ones_like(ids_NT[:, :1])
    return {
        "prompt_ids": one_N1,
        "prompt_mask": one_N1,
        "completion_ids": ids_NT,
        "completion_mask": rows.mask_NT,
        "advantages": rows.advantages_N,
        "ref_per_token_logps": rows.ref_NT,
        "num_items_in_batch": rows.mask_NT.sum(),
        **more,
    }
