"""Whole runs and evaluations on one and on two GPUs, compared bit by bit: parts of gpu_two.py."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import trl_arms

PLACES = {
    "one GPU": "placement={kind: local}",
    "two GPUs": "placement={kind: colocated, gpus: 2, restarts: 0}",
    "split 1 + 1": "placement={kind: split, train: 1, rollout: 1, restarts: 0}",
}
RUN_STEPS = 4
OSS_METRICS = ("memory/gpu_gib", "memory/predicted_gib", "mismatch/mean_abs_dlogp", "grad/norm")
KINDS = {"runs": "adapter={kind: none}", "runs-lora": "adapter={kind: lora, rank: 16}"}


def runs(args: argparse.Namespace, folder: Path, kind: str) -> list[str]:
    """Make the same run in each placement; say what differs in its weights, optimizer, samples and metrics."""
    from resume_kill9 import differences, read

    lines = [f"Whole runs, {KINDS[kind]}, against one GPU, bit by bit:", ""]
    first = None
    for place, placement in PLACES.items():
        path = folder / "runs" / f"{kind} {place}".replace(" ", "_").replace("+", "and")
        begin = time.perf_counter()
        if failed := lockstep("train", *run_words(args, path), KINDS[kind], placement):
            lines.append(f"{place}: failed: {failed}")
            print(lines[-1], flush=True)
            continue
        seconds, found = time.perf_counter() - begin, read(path, RUN_STEPS)
        gap = max(row.metrics.get("mismatch/max_abs_dlogp", 0.0) for row in found.rows.values())
        first = first or found
        differ = differences(first, found)
        said = f"{len(differ)} differences: {'; '.join(differ[:4])}" if differ else "equal"
        lines.append(f"{place}: {said}; largest |sampled - trained| {gap:.3g}; {seconds:.0f} s in all")
        print(lines[-1], flush=True)
    return lines


def evaluations(args: argparse.Namespace, folder: Path) -> list[str]:
    """Score a checkpoint on one GPU and on two; say whether all replies are equal."""
    from lockstep.evaluation.records import read_score

    path = folder / "runs" / "scored"
    words = [*run_words(args, path), KINDS["runs-lora"], PLACES["one GPU"]]
    if failed := lockstep("train", *words):
        return [f"the run to be scored failed: {failed}"]
    lines, replies = ["An evaluation alone, 512 questions:", ""], []
    for gpus in (1, 2):
        begin = time.perf_counter()
        out = folder / f"scores_{gpus}"
        given = (
            "--mode",
            "sampled",
            "--items",
            "8" if args.tiny else "512",
            "--gpus",
            str(gpus),
            "--no-base",
            "--out",
            str(out),
        )
        if failed := lockstep("eval", str(path), *given):
            lines.append(f"{gpus} GPUs: failed: {failed}")
            continue
        (score,) = [read_score(file) for file in out.rglob("*.json")]
        replies.append(score.results)
        lines.append(f"{gpus} GPUs: {time.perf_counter() - begin:.1f} s in all, {len(score.results)} replies")
    return [*lines, f"replies {'equal' if len(replies) == 2 and replies[0] == replies[1] else 'different'}"]


def gpt_oss(args: argparse.Namespace, folder: Path) -> list[str]:
    """Run the recipe for gpt-oss-20b on four GPUs and four, scaled to one and one, with random weights and other questions."""
    from lockstep.track.rundir import RunDirectory
    from lockstep.track.writer import read_metrics

    shape = "gpt-oss-tiny" if args.tiny else "gpt-oss-20b"
    model, steps = folder / shape, 3
    model.mkdir()
    trl_arms.write_model(model, shape, cpu=args.tiny)
    words = [
        str(Path(__file__).resolve().parents[1] / "recipes" / "gpt_oss_20b_4x4.yaml"),
        PLACES["split 1 + 1"],
        f"name={shape}",
        f"runs_dir={folder / 'runs'}",
        f"model.path={model}",
        f"steps={steps}",
        f"rollout.max_tokens={16 if args.tiny else 1024}",
        "eval.enabled=false",
        "save.every=1000",
        "allow=[disk, busy_gpu, long_warmup]",
        task_words(),
    ]
    if args.tiny:
        words += ["device=cpu", "threads=1", "prompts_per_step=2", "samples_per_prompt=2"]
    begin = time.perf_counter()
    if failed := lockstep("train", *words, *args.set):
        return [f"the recipe for gpt-oss-20b failed: {failed}"]
    seconds = time.perf_counter() - begin
    rows = read_metrics(RunDirectory.open(folder / "runs" / shape))
    lines = [f"{words[0].rpartition('/')[2]} on one GPU that trains and one that samples; {seconds:.0f} s in all:", ""]
    for row in rows:
        spent = ", ".join(
            f"{phase} {row.metrics[f'time/{phase}']:.2f}" for phase in ("step", "rollout", "update", "sync")
        )
        more = "".join(f", {name} {row.metrics[name]:.4g}" for name in OSS_METRICS if name in row.metrics)
        lines.append(f"step {row.step}: seconds {spent}{more}")
    return lines


def task_words() -> str:
    """The setting of a task whose rewards differ, whatever a model can do."""
    script = Path(__file__).with_name("step_work.py")
    return f"task={{kind: python, path: {script}:BenchmarkTask, settings: {{prompts: 64}}}}"


def run_words(args: argparse.Namespace, path: Path) -> list[str]:
    """The settings of a short run that saves everything."""
    model = path.parent / ("tiny" if args.tiny else "40m")
    if not model.exists():
        trl_arms.write_model(model, model.name, cpu=args.tiny)
    tokens, group = (6, 4) if args.tiny else (64, 8)
    return [
        f"name={path.name}",
        f"runs_dir={path.parent}",
        f"model={{path: {model}, dtype: {'fp32' if args.tiny else 'bf16'}}}",
        task_words(),
        f"steps={RUN_STEPS}",
        f"prompts_per_step={group}",
        f"samples_per_prompt={group}",
        f"rollout={{max_tokens: {tokens}, slots: {group * group}}}",
        "optimizer={lr: 1.0e-4}",
        f"update={{tokens_per_microbatch: {64 if args.tiny else 4096}, recompute: none}}",
        f"numerics.exact={'false' if args.tiny else 'true'}",
        "sync.probe_every=1",
        "eval.enabled=false",
        "save.every=1000",
        "allow=[disk, busy_gpu]",
        "threads=1",
        *(["device=cpu"] if args.tiny else []),
    ]


def lockstep(*words: str) -> str:
    """Run a command; return the end of what it said if it failed. If this program is stopped meanwhile, that is printed."""
    with tempfile.TemporaryFile("w+") as said:

        def end() -> str:
            said.seek(0)
            return said.read()[-1500:]

        command = [sys.executable, "-m", "lockstep", *words]
        try:
            done = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False)
        except BaseException:
            print(end(), flush=True)
            raise
        return end() if done.returncode else ""
