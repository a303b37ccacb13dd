"""Predicts the disk space of a run before it starts, in bytes: checkpoints, rollouts, scores.

A checkpoint holds the trained weights and the optimizer's state: fp32 masters of weights in bf16, and the moments. At most
save.keep_last of them exist at once, and one for save.keep_best, and the one that is being written.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from lockstep.checkpoint.state import files_beside
from lockstep.config.adapter import RESIDUAL_INITS, Lora, NoAdapter
from lockstep.config.schema import AdamW, Muon, Recipe
from lockstep.errors import DoesNotFitError
from lockstep.evaluation.plan import replies_in_all
from lockstep.plan.memory_inputs import adapter_size, critic_parameters, element_bytes, state_bytes, targeted
from lockstep.plan.shapes import ModelShape
from lockstep.track.files import existing

FP32 = 4
TENSOR_HEADER = 110
"""Bytes of a tensor in a safetensors file: name, dtype, shape and offsets as JSON."""
SMALL_FILES = 1_800
"""state.json and COMMIT.json."""
ADAPTER_FILES = 1_400
"""adapter_config.json and adapter_base.json."""
ROLLOUT_TOKEN = 14.0
"""Bytes of a sampled token in rollouts/*.parquet: id, log-probability, mask, and its text, compressed."""
ROLLOUT_ROW = 1500.0
"""Bytes of a sample there: its prompt, grade and metrics."""
ROLLOUT_FILE = 16e3
"""Bytes of a file there: its columns' names and statistics."""
SCORE_REPLY = 600.0
"""Bytes of a reply in scores/*.json, without its text."""
SCORE_TOKEN = 4.5
"""Bytes of a reply's text there, for each token."""
SPARE = 1 << 28
"""Free bytes that a run leaves."""
TOLERANCE = 0.05
"""The first checkpoint may be off the plan by this share before it is warned of."""
LEAK = 2.0
"""A checkpoint this many times the plan holds what it should not."""
NOTICEABLE = 4 << 20
"""Bytes below which no difference is worth a word."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Bytes."""

    weights: float
    """Weights of one checkpoint."""
    optimizer: float
    files: float
    """Config, tokenizer, headers."""
    kept: int
    """Checkpoints that stand at once, the one that is being written among them."""
    rollouts: float
    """Rollouts of all steps, if every reply is as long as it may be."""
    scores: float

    @property
    def checkpoint(self) -> float:
        return self.weights + self.optimizer + self.files

    @property
    def total(self) -> float:
        return self.kept * self.checkpoint + self.rollouts + self.scores


def forecast(recipe: Recipe, shape: ModelShape, device: Literal["cuda", "cpu"], model: Path) -> DiskPlan | None:
    """Return the plan for the model in a folder; None for a user's optimizer or another method of PEFT, whose sizes cannot be
    told.
    """
    if recipe.adapter.kind == "peft" or recipe.optimizer.kind == "python":
        return None
    full = recipe.adapter.kind == "none"
    element = element_bytes(recipe, device)
    _, added = adapter_size(recipe.adapter, shape)
    trained = shape.parameters if full else added
    master = FP32 if element < FP32 else 0.0
    optimizer = (master + state_bytes(recipe, shape)) * trained
    critic = recipe.algorithm.critic
    if critic is not None and critic.backbone == "own":
        optimizer += (element + master + state_bytes(recipe, shape)) * critic_parameters(shape, added)
    tensors = _tensors(recipe, shape, masters=element < FP32)
    if critic is not None and critic.backbone == "own":
        tensors *= 2
    kept = min(recipe.save.keep_last, saves(recipe)) + (1 if recipe.save.keep_best else 0)
    return DiskPlan(
        weights=element * _saved(recipe, shape, trained),
        optimizer=optimizer,
        files=(sum(path.stat().st_size for path in files_beside(model)) if full else ADAPTER_FILES)
        + TENSOR_HEADER * tensors
        + SMALL_FILES,
        kept=kept + (1 if saves(recipe) > recipe.save.keep_last else 0),
        rollouts=_rollouts(recipe),
        scores=_scores(recipe),
    )


def _saved(recipe: Recipe, shape: ModelShape, trained: int) -> float:
    """Numbers in the file of weights: one that began as PiSSA or OLoRA is written as a LoRA of twice the rank."""
    adapter = recipe.adapter
    if not (isinstance(adapter, Lora) and adapter.init in RESIDUAL_INITS):
        return float(trained)
    return float(
        trained + shape.layers * sum(adapter.rank * (x.inputs + x.outputs) for x in targeted(adapter.targets, shape))
    )


def _tensors(recipe: Recipe, shape: ModelShape, *, masters: bool) -> float:
    """Tensors of weights, and of what the optimizer keeps of each (master, step, moments and their scales)."""
    match recipe.optimizer:
        case AdamW(states="8bit"):
            each = 5.0
        case Muon():
            each = 1.3
        case _:
            each = 3.0
    each += 1 + masters
    adapter = recipe.adapter
    if isinstance(adapter, NoAdapter):
        return (len(shape.all_linears) + 2 * shape.layers + 2) * each
    per_layer = 3 if isinstance(adapter, Lora) and adapter.dora else 2
    return shape.layers * per_layer * len(targeted(adapter.targets, shape)) * each


def saves(recipe: Recipe) -> int:
    """Checkpoints that are written in the whole run."""
    return -(-recipe.steps // recipe.save.every)


def _rollouts(recipe: Recipe) -> float:
    if recipe.loop == "sft":
        return 0.0
    files = -(-recipe.steps // recipe.track.rollouts_every)
    return files * (ROLLOUT_FILE + recipe.samples_per_step * (ROLLOUT_ROW + ROLLOUT_TOKEN * recipe.rollout.max_tokens))


def _scores(recipe: Recipe) -> float:
    if not recipe.eval.enabled:
        return 0.0
    tokens = recipe.eval.max_tokens or recipe.rollout.max_tokens
    return replies_in_all(recipe) * (SCORE_REPLY + SCORE_TOKEN * tokens)


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a plan that goes to one disk. Bytes."""

    folders: tuple[Path, ...]
    needs: float
    free: float


def shares(plan: DiskPlan, run: Path, checkpoints: Path) -> list[Share]:
    """Divide a plan between the disks of a run and of its checkpoints; the folders need not exist."""
    saved = plan.kept * plan.checkpoint
    if existing(run).stat().st_dev == existing(checkpoints).stat().st_dev:
        return [Share((run, checkpoints), plan.total, free_bytes(run))]
    return [
        Share((run,), plan.total - saved, free_bytes(run)),
        Share((checkpoints,), saved, free_bytes(checkpoints)),
    ]


def disk_lines(plan: DiskPlan, disks: Sequence[Share]) -> list[str]:
    """Return the forecast as text, for the log and `lockstep plan`."""
    left = f", {size(disks[0].free)} are free" if disks else ""
    if len(disks) > 1:
        left = "; " + ", ".join(f"{size(one.needs)} of {size(one.free)} free in {one.folders[0]}" for one in disks)
    return [
        f"disk: a checkpoint is {size(plan.checkpoint)} (weights {size(plan.weights)}, optimizer {size(plan.optimizer)}); "
        f"up to {plan.kept} at once, rollouts at most {size(plan.rollouts)}, scores {size(plan.scores)}: "
        f"{size(plan.total)} in all{left}"
    ]


def free_bytes(folder: Path) -> float:
    """Return the free bytes of the disk that `folder` will be on; it need not exist."""
    return float(shutil.disk_usage(existing(folder)).free)


def require_room(plan: DiskPlan, disks: Sequence[Share]) -> None:
    """Raise DoesNotFitError if the run would fill a disk."""
    for one in disks:
        if one.needs + SPARE > one.free:
            free = (
                f"only {size(one.free)} are free"
                if one.free
                else "none is free: it is full, or holds no files, as /proc"
            )
            raise DoesNotFitError(
                [f"the run needs {size(one.needs + SPARE)} of disk space, but {free}"],
                where=str(one.folders[0]),
                fix="free space, put runs_dir or paths.checkpoints on a larger disk, or keep fewer checkpoints "
                f"(lower save.keep_last; now {plan.kept} exist at once)",
            )


Verdict: TypeAlias = Literal["fine", "off", "leak"]


def judge_first(plan: DiskPlan, found: int) -> tuple[Verdict, str]:
    """Compare the size of the first checkpoint with the plan, with a sentence."""
    gap = found - plan.checkpoint
    told = f"the first checkpoint is {size(found)}, planned were {size(plan.checkpoint)}"
    if abs(gap) <= NOTICEABLE or abs(gap) <= TOLERANCE * plan.checkpoint:
        return "fine", told
    return ("leak" if found > LEAK * plan.checkpoint else "off"), told


def size(number: float) -> str:
    """Example: "1.53 GB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if number >= scale:
            return f"{number / scale:,.2f} {unit}"
    return f"{number / 1e3:.1f} kB"
