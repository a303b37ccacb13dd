"""Small runs, written by the package's own writers, for tests of what reads them."""

from __future__ import annotations

import math
from pathlib import Path

from lockstep.evaluation.records import score_path, write_score
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import RunWriter, write_rollouts
from lockstep.types import FinishReason, Grade, Group, Message, Probe, Prompt, Proof, Rollout
from tests.evaluation.scores import score

FACTS = {
    "time": "2026-11-21T03:30:00Z", "lockstep": "0.1.0", "command": ["lockstep", "train", "quick.yaml"], "host": "node7",
    "pid": 4711, "code": {"commit": "0123456789abcdef", "changed_files": 2}, "packages": {"torch": "2.13.0"},
    "python": "CPython 3.11.7", "platform": "Linux", "cpu": {"model": "EPYC", "cores": 1, "threads": 2, "memory_gib": 23.5},
    "threads": 2, "gpu": [], "formula": "J(θ) = mean_i 1/|o_i| Σ_t min(r A, clip(r, 1-0.2, 1+0.2) A)",
}  # fmt: skip
RECIPE = "name: demo\nsteps: 30\nprompts_per_step: 2\nsamples_per_prompt: 2\nadapter:\n  kind: lora\n"

HOSTILE = '</pre><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[2J\x1b]0;owned\x07 \x00 ‮txet \ud800 "quoted" & 4<5'
"""A reply that tries to be markup, a terminal command, and invalid text."""


def proof(version: int, *, mismatched: tuple[str, ...] = (), mean: float = 1e-7) -> Proof:
    """A proof of sync that passed, unless told otherwise."""
    probe = Probe(tokens=128, mean=mean, p99=2e-7, max=3e-7, tolerance=1e-4)
    return Proof(version, f"{version:016x}", 12, 4096, mismatched, 12, probe, 0.002)


def rollout(
    prompt: Prompt, sample: int, text: str, *, correct: bool | None = True, error: str | None = None
) -> Rollout:
    """One graded completion; correct None means that it could not be scored."""
    grade = Grade(
        reward=None if correct is None else float(correct),
        metrics={} if correct is None else {"correct": float(correct)},
        extracted=None if correct is None else ("7" if correct else "8"),
        method="boxed",
        error=error,
    )
    ids, logprobs = (5, 6, 2), (-0.5, -0.25, -1.0)
    return Rollout(prompt, (1, 3, 4), ids, logprobs, (True,) * 3, text, FinishReason.STOP, 3, grade, sample)


def group(identity: str, question: str, replies: list[tuple[str, bool | None]]) -> Group:
    """All samples of one question."""
    prompt = Prompt(identity, (Message(role="user", content=question),), "7", "sums")
    errors = {None: "the verifier's worker was killed after 2 s"}
    rollouts = [rollout(prompt, i, text, correct=ok, error=errors.get(ok)) for i, (text, ok) in enumerate(replies)]
    return Group(prompt, tuple(rollouts))


def groups(step: int) -> list[Group]:
    """Two questions with two replies each: right, wrong, hostile and unscored."""
    return [
        group(
            f"sums/{step}",
            f"State the final answer: 4 + 3 = (step {step})",
            [("\\boxed{7}", True), ("\\boxed{8}", False)],
        ),
        group(f"sums/{step}b", "What is <b>5</b> + 2?", [(HOSTILE, False), ("\\boxed{10^{10^{10}}}", None)]),
    ]


def metrics(step: int) -> dict[str, float]:
    """Numbers of a run that goes well, but for a spike of the gradient at step 17 and truncation at the end."""
    share = step / 30
    values = {
        "reward/mean": 0.2 + 0.6 * share, "reward/p90": 1.0, "reward/zero_std_groups": 0.25, "reward/unscored": 0.0,
        "answer/correct": 0.3 + 0.6 * share, "answer/boxed": 0.95, "length/mean": 10 - 3 * share, "length/max": 16.0,
        "length/truncated": 0.6 if step > 27 else 0.0, "advantage/std": 0.9, "loss/policy": -0.01 * share,
        "entropy/mean": 0.5 - 0.2 * share, "entropy/p10": 0.01, "entropy/p90": 1.4, "grad/norm": 250.0 if step == 17 else 0.8,
        "grad/skipped": 0.0, "lr": 1e-5, "mismatch/mean_abs_dlogp": 1e-6 * step, "weights/changed_tensors": 12.0,
        "sync/probe_mean": 1e-7, "time/step": 3.4, "time/rollout": 1.2, "time/grade": 0.05, "time/update": 2.0,
        "time/sync": 0.1, "time/evaluate": 0.0, "memory/rss_gib": 2.1,
    }  # fmt: skip
    for mode, base in (("greedy", 0.3), ("sampled", 0.2)) if step in (10, 20, 30) else ():
        accuracy = base + 0.5 * share
        high = accuracy + 0.15 if mode == "greedy" else math.nan
        values |= {f"eval/{mode}/accuracy": accuracy, f"eval/{mode}/low": accuracy - 0.1, f"eval/{mode}/high": high}
    return values


def finished_run(path: Path, steps: int = 30) -> Path:
    """A run of two attempts: the first is killed at step 12 of which it saved 10, the second goes to the end."""
    with RunDirectory.create(path, RECIPE, FACTS) as run:
        write_steps(run, 1, 12)
    with RunDirectory.resume(path, FACTS) as run:
        write_steps(run, 11, steps)
        wrong, right = [False] * 30 + [True] * 10, [False] * 12 + [True] * 28
        for mode in ("greedy", "sampled"):
            write_score(score_path(path, 0, mode), score(wrong, mode=mode))
            write_score(score_path(path, steps, mode), score(right, mode=mode, weights="b" * 16, step=steps))
    return path


def write_steps(run: RunDirectory, first: int, last: int) -> None:
    """Metrics, proofs, an event and rollouts of some steps."""
    with RunWriter(run) as writer:
        writer.event("started", f"attempt {run.attempt} starts at step {first}")
        for step in range(first, last + 1):
            writer.step(step, metrics(step), proof(step))
            write_rollouts(run, step, groups(step), [[0.5, -0.5], [-0.5, 0.0]])
