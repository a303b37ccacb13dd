# ruff: noqa: E501
"""Runs of benchmarks.sabotage: ruined ones with what must be said of them, and good ones that nothing may stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sabotage_faults import (
    damaged,
    flipped,
    frozen,
    full_disk,
    hung_engine,
    kept_positive,
    leak,
    lying_engine,
    noisy_weights,
    not_a_number,
    own_reference,
    same_seeds,
    shuffled,
    stale,
    template,
    without_prompts,
    wrong_answers,
)
from benchmarks.sabotage_files import SFT
from lockstep.build.parts import Parts

Spoil = Callable[[Parts], Parts]


@dataclass(frozen=True, slots=True)
class Case:
    """A run, and what must be said of it. Without `named` it is a good one, which nothing may stop."""

    name: str
    settings: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    """Rules, or words of an error or a warning: one of them must come up."""
    remedy: tuple[str, ...] = ()
    """Words of the remedy: one of them must come up with it."""
    spoil: Spoil = lambda parts: parts
    prepare: Callable[[Path], object] = lambda folder: None
    """Changes the files of the run before it starts."""
    apart: bool = False
    """Needs a process of its own."""


def grader(name: str) -> str:
    return f"task.verifier.path={{folder}}/graders.py:{name}"


NUMERIC = "task.verifier={kind: numeric}"
LEARNS = (grader("letters"), "optimizer.lr=0.01", "samples_per_prompt=8")
SEVERAL = ("update.samples_per_update=8", "update.epochs=2")
BAD: tuple[Case, ...] = (
    Case("frozen weights", (), ("unmoved",), ("frozen",), frozen),
    Case("zero gradient", ("algorithm.loss={folder}/losses.py:detached",), ("zero_gradient",), ("lose its gradient",)),
    Case("learning rate 0", ("optimizer.lr=0",), ("unmoved",), ("optimizer.lr 0",)),
    Case("learning rate × 1000", ("optimizer.lr=1",), ("leap",), ("lower optimizer.lr",)),
    Case("never warm", ("steps=900", "optimizer.warmup_steps=850"), ("slow_warmup",), ("warmup_steps",)),
    Case(
        "template without the question", (), ("question", "template", "message"), ("template",),
        prepare=template("{% for message in messages %}<|im_start|>{{ message['role'] }}\n<|im_end|>\n{% endfor %}<|im_start|>assistant\n"),
    ),
    Case("template that raises", (), ("template",), ("template",), prepare=template("{{ raise_exception('no') }}")),
    Case("stale engine", ("sync.transport=copy",), ("SyncError",), ("weights", "engine", "sync"), stale),
    Case("reward always 0", (grader("zero"),), ("flat_start", "reward_flat"), ("grader",)),
    Case("reward always 1", (grader("one"),), ("rewards garbage",), ("look at the answer",)),
    Case("grader that rewards anything", (grader("anything"),), ("rewards garbage",), ("look at the answer",)),
    Case("grader that dies", (grader("dies"),), ("could not be scored",), ("fix the verifier",)),
    Case("grader that hangs", (grader("hangs"),), ("could not be scored",), ("fix the verifier",)),
    Case("grader that fails at times", (grader("fails_at_times"),), ("unscored", "could not be scored", "cannot grade"), ("verifier", "grader")),
    Case("grader that returns NaN", (grader("not_a_number"),), ("could not be scored",), ("fix the verifier",)),
    Case("grader that returns text", (grader("text"),), ("cannot grade",), ("correct the grader",)),
    Case("hung engine", ("health.stall={least_s: 5, first_s: 60, times: 3}",), ("stands still",), ("stall.txt",), hung_engine, apart=True),
    Case("flipped advantages", LEARNS, ("reward_falls",), ("sign of advantage",), flipped),
    Case("advantages lost", (), ("zero_gradient", "flat_start"), ("grader", "detach"), kept_positive),
    Case("advantages of other replies", LEARNS, ("reward_falls", "no improvement"), ("advantage",), shuffled),
    Case("KL against itself", ("algorithm.kl.coef=0.1",), ("kl_dead",), ("frozen copy",), own_reference),
    Case("truncated replies", ("rollout={max_tokens: 3, stop: []}",), ("truncation",), ("rollout.max_tokens",)),
    Case("entropy collapse", (grader("one_letter"), "optimizer.lr=0.06", "samples_per_prompt=8"), ("entropy_collapse", "leap", "reward_flat"), ("optimizer.lr",)),
    Case("length collapse", (grader("short"), "optimizer.lr=0.02", "rollout={max_tokens: 64, stop: [e, \"0\"]}"), ("length_collapse",), ("derivation",)),
    Case("disk full", ("save.every=2",), ("cannot be written",), ("free space",), full_disk, apart=True),
    Case("own loss that is NaN", ("algorithm.loss={folder}/losses.py:nan",), ("is nan",), ("finite loss",)),
    Case("batches of NaN", (), ("were skipped",), ("optimizer.lr",), not_a_number),
    Case("a NaN among the weights", (), ("SyncError", "EngineError"), ("weights", "lower optimizer.lr"), damaged),
    Case("loss × 10000", ("algorithm.loss={folder}/losses.py:huge",), ("clipping",), ("max_grad_norm",)),
    Case("one poisoned row", (grader("poisoned"), "algorithm.advantage.divide_by_std=false", "prompts_per_step=8"), ("cause: advantage",), ("most by row",)),
    Case("reward that can be hacked", (grader("hackable"),), ("reward_hacking",), ("outweigh",)),
    Case("held-out questions in training", ("task.heldout={id_probe: {folder}/held.jsonl}", "task.heldout_rows=0", "eval={enabled: true, items: 8}"), ("held-out", "held out"), ("questions", "remove"), prepare=leak),
    Case("wrong references", (NUMERIC,), ("reference", "cannot grade", "number"), ("answer",), prepare=wrong_answers),
    Case("no answer in any reply", (NUMERIC,), ("no_format", "flat_start"), ("format",)),
    Case("engine half a nat off", (), ("mismatch",), ("template", "dtype"), lying_engine),
    Case("clip range of 0", ("algorithm.loss={kind: clip, clip_low: 0.0, clip_high: 0.0}", *SEVERAL, "optimizer.lr=0.01"), ("clip_share", "clip_high", "clip_low"), ("optimizer.lr", "clip")),
    Case("a far too large rate in two updates", (*SEVERAL, "optimizer.lr=0.2"), ("leap", "ratio_tail", "clip_share"), ("optimizer.lr",)),
    Case("every reply to a prompt is the same", (), ("flat_start", "zero_variance", "reward_flat"), ("temperature",), same_seeds),
    Case("weight decay of 1000", ("optimizer.weight_decay=1000", "optimizer.lr=0.0005"), ("extreme",), ("weight_decay",)),
    Case("KL coefficient of 1000", ("algorithm.kl.coef=1000",), ("extreme",), ("algorithm.kl",)),
    Case("temperature of 0.02", ("rollout.temperature=0.02",), ("extreme",), ("temperature",)),
    Case("adapters scaled by 100,000", ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=100000", "optimizer.lr=0.01"), ("extreme",), ("adapter.alpha",)),
    Case("entropy bonus of 100", ("algorithm.entropy_coef=100",), ("extreme",), ("entropy_coef",)),
    Case("overlong penalty of 1000", ("algorithm.overlong={buffer: 23, penalty: 1000}",), ("extreme",), ("overlong.penalty",)),
    Case("advantages divided by a million", ("algorithm.advantage.std_eps=1e6",), ("extreme",), ("std_eps",)),
    Case("learning rate of 1e-12", ("optimizer.lr=1e-12",), ("extreme",), ("optimizer.lr",)),
    Case("a critic that does not learn", ("algorithm.kind=ppo", "algorithm.critic.lr=1e-12", "optimizer.lr=0.01"), ("extreme",), ("critic.lr",)),
)  # fmt: skip
UNSEEN: tuple[Case, ...] = (
    Case("grader that looks at the question alone", (grader("question_alone"),), ("flat_start", "zero_variance", "rewards garbage"), ("look at the reply", "look at the answer")),
    Case("a reward of 1e30 at times", (grader("astronomical"), "prompts_per_step=8", "algorithm.advantage.divide_by_std=false"), ("cause: advantage", "clipping"), ("most by row", "grader")),
    Case("noise on the weights", (), ("leap", "entropy_explosion", "mismatch"), ("lower optimizer.lr", "checkpoint"), noisy_weights),
    Case("clip norm of 1e-6", ("optimizer.max_grad_norm=1e-6",), ("clipping", "unmoved"), ("max_grad_norm",)),
    Case("stop strings that end nearly every reply at once", ("rollout.stop=[a, e, i, o, u, t, n, s, r]",), ("length_collapse", "flat_start", "zero_variance", "no_format", "short"), ("stop", "max_tokens")),
    Case("replies of one token", ("rollout={max_tokens: 1, stop: []}",), ("truncation",), ("rollout.max_tokens",)),
)  # fmt: skip
"""Written before anyone knew what the rules say of them; no rule was changed for them."""

KINDS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "max_rl",
    "reinforce",
)
LORA = ("adapter.kind=lora", "adapter.rank=4", "optimizer.lr=0.01")
GOOD: tuple[Case, ...] = (
    *(Case(f"{kind}, seed {seed}", (f"algorithm.kind={kind}", f"seed={seed}")) for seed, kind in enumerate(KINDS, 1)),
    *(Case(f"grpo that learns, seed {seed}", (*LEARNS, f"seed={seed}")) for seed in (21, 22, 23)),
    *(Case(f"LoRA, {kind}", (*LORA, f"algorithm.kind={kind}", f"seed={31 + i}")) for i, kind in enumerate(("grpo", "dapo", "gspo"))),
    Case("DoRA", (*LORA, "adapter.dora=true", "seed=35")),
    Case("KL in the loss", ("algorithm.kl.coef=0.05", "seed=36")),
    Case("KL in the reward", ("algorithm.kind=reinforce_pp", "algorithm.kl={coef: 0.05, placement: reward}", "seed=37")),
    Case("several updates", (*SEVERAL, "seed=38")),
    Case("several updates, LoRA", (*SEVERAL, *LORA, "seed=39")),
    Case("truncated replies left out", ("algorithm.overlong.drop_truncated=true", "seed=40")),
    Case("overlong penalty", ("algorithm.overlong={buffer: 8, penalty: 0.5}", "seed=41")),
    Case("dynamic sampling", ("algorithm.dynamic_sampling.enabled=true", "seed=42")),
    Case("warm-up of five steps", ("optimizer.warmup_steps=5", "seed=43")),
    Case("bf16", ("model.dtype=bf16", "seed=44")),
    Case("engine with its own copy", ("sync.transport=copy", "seed=45")),
    Case("truncated importance sampling", ("algorithm.correction.kind=tis", "seed=46")),
    Case("a small model that always runs on", ("rollout={max_tokens: 8, stop: []}", "seed=47")),
    Case("supervised", ("loop=sft", SFT, "seed=48"), prepare=without_prompts),
)  # fmt: skip
