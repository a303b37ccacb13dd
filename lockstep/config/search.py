"""Settings found by a word that is no path: the field's words, the names of other systems, the last part of a path."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from lockstep.config.help import groups, setting_line
from lockstep.config.mistakes import ELSEWHERE

WORDS: Mapping[str, tuple[str, ...]] = {
    "reward": ("task.verifier.kind", "task.verifier.path", "algorithm.overlong.penalty"),
    "reward function": ("task.verifier.kind", "task.verifier.path"),
    "grader": ("task.verifier.kind", "task.verifier.path"),
    "judge": ("task.verifier.kind", "task.verifier.model"),
    "learning rate": ("optimizer.lr", "optimizer.schedule", "optimizer.warmup_steps"),
    "batch size": (
        "prompts_per_step", "samples_per_prompt", "update.samples_per_update", "sft.sequences_per_step",
        "update.tokens_per_microbatch",
    ),
    "batch": ("prompts_per_step", "samples_per_prompt", "update.samples_per_update", "sft.sequences_per_step"),
    "group": ("samples_per_prompt",),
    "epochs": ("update.epochs", "sft.epochs"),
    "kl": ("algorithm.kl.coef", "algorithm.kl.estimator", "algorithm.kl.placement"),
    "beta": ("algorithm.kl.coef",),
    "clip": ("algorithm.loss.clip_low", "algorithm.loss.clip_high", "optimizer.max_grad_norm"),
    "entropy": ("algorithm.entropy_coef",),
    "data": ("task.data.source", "task.heldout", "sft.data"),
    "dataset": ("task.data.source", "task.dataset", "sft.data"),
    "data set": ("task.data.source", "task.dataset", "sft.data"),
    "prompt": ("chat.system", "chat.suffix", "chat.examples", "task.data.source"),
    "system prompt": ("chat.system",),
    "few-shot": ("chat.examples",),
    "lora": ("adapter.kind", "adapter.rank", "adapter.alpha", "adapter.targets"),
    "gpu": ("device", "rollout.engine", "update.tokens_per_microbatch"),
    "memory": ("update.tokens_per_microbatch", "update.recompute", "rollout.slots"),
    "gradient checkpointing": ("update.recompute",),
    "precision": ("model.dtype", "numerics.train", "numerics.rollout", "numerics.eval"),
    "checkpoint": ("save.every", "save.keep_last", "save.keep_best", "warm_start"),
    "wandb": ("track.sinks", "track.project"),
    "logging": ("track.sinks", "track.rollouts_every"),
    "temperature": ("rollout.temperature", "eval.modes"),
    "max length": ("rollout.max_tokens", "eval.max_tokens", "sft.max_tokens"),
    "early stopping": ("eval.stop.kind",),
    "validation": ("eval.every", "eval.items", "sft.validation", "sft.validation_rows"),
    "tools": ("task.tools", "task.turns.limit"),
    "multi-turn": ("task.turns.limit", "task.turns.credit"),
    "environment": ("task.kind", "task.turns.limit"),
    "curriculum": ("task.curriculum",),
}  # fmt: skip
"""Words of the field, and the settings that they mean, the nearest first."""
SHOWN = 12


def find(word: str) -> list[str]:
    """Help lines of the settings that a word means, under a line that says so. Empty if nothing is like it."""
    lines: dict[str, str] = {}
    for group in groups():
        for one in group.settings:
            lines.setdefault(one.path, setting_line(one))
    meant = [path for path in dict.fromkeys(_meant(word, list(lines))) if path in lines][:SHOWN]
    if not meant:
        return []
    sections = dict.fromkeys(path.rpartition(".")[0] for path in meant)
    more = ", ".join(f"lockstep config help {name}" for name in sections if name)
    head = f"no setting starts with {word!r}; these are nearest" + (f" (all of a section: {more})" if more else "")
    return [f"{head}:", *(lines[path] for path in meant)]


def nearest(word: str) -> list[str]:
    """Paths that are spelled like a word, each once."""
    known = {name for group in groups() for name in (group.path, *(one.path for one in group.settings)) if name}
    return difflib.get_close_matches(word, sorted(known), n=3)


def _meant(word: str, paths: list[str]) -> Iterator[str]:
    """Synonyms, then what other systems call so, then settings whose last part it is, then those within such a section."""
    plain = word.lower().replace("_", " ").strip()
    for known in (plain, plain.removesuffix("s"), plain.replace(" ", "")):
        yield from WORDS.get(known, ())
    leaf = plain.replace(" ", "_").replace("-", "_").rpartition(".")[2]
    yield from ELSEWHERE.get(leaf, ())
    yield from sorted((path for path in paths if path.rpartition(".")[2] == leaf), key=_order)
    yield from (path for path in paths if leaf in path.split("."))


def _order(path: str) -> tuple[int, bool]:
    """Shallow settings first, and of those the optimizer's."""
    return path.count("."), not path.startswith("optimizer.")
