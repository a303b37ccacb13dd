"""One training step on one and on two GPUs of a machine: the same work, by phases, beside the physical floor.

    python benchmarks/gpu_two.py --write              # everything but 7B, in one call; tables into results/gpu_two.txt
    python benchmarks/gpu_two.py --part full trl      # some of it
    python benchmarks/gpu_two.py --part full lora equal --shape 7b --write results/gpu_two_7b.txt
    python benchmarks/gpu_two.py --tiny               # tiny, on CPU workers, to try the program out: no figures

The work is that of gpu_step.py: the Qwen2.5-1.5B shape with random weights, 64 prompts of 256 tokens x 8 samples of 512 tokens,
one update a step; `double` has 128 prompts, `lognormal` replies of log-normal lengths, `lora` adapters of rank 32 on all linear
layers; `sft` is gpu_sft.py's. All arms have the same micro-batches. Proofs are those of a run's later steps: every one compares
all tensors, and only the first and each tenth has a probe. `trl` is TRL as gpu_step.py tunes it, on both GPUs.
`queue` (128 rows a GPU) and `offload` compare settings of two GPUs.
`equal` updates the same weights with the same saved rollouts on one GPU, on one again, and on two; `exchange` times what goes
over the link: a micro-batch's gradients to their owners, and new weights to all. Each arm is a process of its own.
`runs` makes whole runs with `numerics.exact` of a small shape (40 million parameters) on one GPU, on two, and with one that
trains and one that samples, and compares all weights, optimizer states, samples and metrics bit by bit; `runs-lora` does so with
adapters; `eval` scores the checkpoint of such a run on one GPU and on two. `gpt-oss` runs the recipe for gpt-oss-20b on four GPUs
and four, scaled to one that trains and one that samples.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import trl_arms
from devices import device_name
from gpu_two_runs import KINDS, PLACES, evaluations, gpt_oss, runs
from results_file import RESULTS, header, write_section
from step_work import WORKS, Size, floors_of, title

RESULT = RESULTS / "gpu_two.txt"
TRL = "TRL tuned"
VARIANTS = {
    "queue": ("lognormal", {"prompts in turn": ["rollout.deal=static"], "from a queue": ["rollout.deal=queue"]}),
    "offload": ("full", {"optimizer on the GPUs": [], "optimizer in main memory": ["optimizer.offload=cpu"]}),
}
"""Settings that are compared on two GPUs, and the work that they do."""
PARTS = (
    "full", "trl", "double", "lognormal", "lora", "lora-merged", "sft", "equal", "exchange", "runs", "runs-lora", "eval",
    "gpt-oss", *VARIANTS,
)  # fmt: skip
PHASES = ("generate", "train", "sync", "grade")


# --- a step ---------------------------------------------------------------------------------------------------------
class Memory(threading.Thread):
    """The most memory that any of the program's GPUs had in use, GiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0

    def run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        if given := os.environ.get("CUDA_VISIBLE_DEVICES"):  # which nvidia-smi does not read
            query += ["-i", given]
        while True:
            found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
            self.peak = max([self.peak, *(int(used) / 1024 for used in found)])
            time.sleep(0.5)


def step(
    work: str, place: str, args: argparse.Namespace, folder: Path, variant: str = "", more: Sequence[str] = ()
) -> dict[str, Any]:
    """Run gpu_step.py's own arm with a placement."""
    memory = Memory()
    if not args.tiny:
        memory.start()
    out = folder / f"{work} {place} {variant}.json".replace(" ", "_")
    settings = [PLACES[place], f"update.tokens_per_microbatch={args.tokens}", "update.recompute=none"]
    settings += ["sync.probe_first=1"]
    settings += ["rollout.slots=128"] if "rollout.deal=" in "".join(more) else []
    words = ["--arm", "Lockstep", "--work-name", work, "--model", args.model, "--steps", str(args.steps)]
    words += ["--arm-out", str(out), *["--cpu"] * args.tiny, "--set", *settings, *more, *args.set]
    result = arm("gpu_step.py", words, out, args) | {"peak": memory.peak}
    seconds = {phase: round(_median(result, phase), 3) for phase in ("step", *PHASES)}
    # at once, in case the program is stopped before its table
    print(f"{work}, {variant or place}: {seconds}, {memory.peak:.1f} GiB", flush=True)
    return result


def arm(
    program: str, words: list[str], out: Path, args: argparse.Namespace, launch: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run an arm in a process of its own; returns what it wrote, nothing if it failed."""
    command = [sys.executable, *launch, str(Path(__file__).with_name(program)), *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as done:
        try:
            said = done.communicate(timeout=args.limit)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)  # its workers, too
            said = ("", f"no end after {args.limit:.0f} s")
        except BaseException:
            os.killpg(done.pid, signal.SIGKILL)
            raise
    if done.returncode or not out.is_file():
        print(f"failed: {' '.join(command)}", said[0][-1500:], said[1][-3000:], sep="\n", flush=True)
        return {}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def trl(args: argparse.Namespace, folder: Path) -> list[str]:
    """Run TRL's tuned arm on both GPUs: as many processes, each with its own vLLM beside it."""
    memory = Memory()
    if not args.tiny:
        memory.start()
    out = folder / "trl.json"
    words = [
        "--arm",
        TRL,
        "--work-name",
        "full",
        "--model",
        args.model,
        "--steps",
        str(args.steps),
        "--arm-out",
        str(out),
    ]
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = arm("gpu_step.py", [*words, *["--cpu"] * args.tiny], out, args, launch)
    if not result:
        return [f"{TRL} on two GPUs: failed"]
    phases = ", ".join(f"{phase} {_median(result, phase):.3f}" for phase in ("generate", "train", "sync"))
    took, tokens = _median(result, "step"), f"{_median(result, 'trained'):,.0f} tokens trained a step"
    return [f"{TRL} on two GPUs: {took:.2f} s a step ({phases}), {memory.peak:.1f} GiB a GPU, {tokens}"]


def sft(args: argparse.Namespace, folder: Path) -> list[str]:
    """Run gpu_sft.py's own arm on one and on two GPUs."""
    lines = ["| on | step, s | tokens trained/s | speed-up |", "| --- | --- | --- | --- |"]
    one = 0.0
    for place in ("one GPU", "two GPUs"):
        out = folder / f"sft_{place.replace(' ', '_')}.json"
        words = ["--arm", "Lockstep", "--model", args.model, "--steps", str(args.steps), "--arm-out", str(out)]
        words += ["--cpu", "--rows", "4", "--tokens", "32"] if args.tiny else []
        settings = [
            PLACES[place],
            f"update.tokens_per_microbatch={48 if args.tiny else 16384}",
            "update.recompute=none",
        ]
        result = arm("gpu_sft.py", [*words, "--set", *settings, *args.set], out, args)
        if not result:
            lines.append(f"| {place} | failed |")
            continue
        took = _median(result, "step")
        one = one or took
        lines.append(f"| {place} | {took:.3f} | {_median(result, 'trained') / took:,.0f} | {one / took:.2f}x |")
    return ["SFT, full training:", "", *lines]


def step_lines(work: str, results: dict[str, dict[str, Any]], args: argparse.Namespace) -> list[str]:
    size = Size.of(work, cpu=args.tiny)
    floors = floors_of(work, args.model, size)
    lines = [
        f"{title(work, size)}; floor of one GPU {floors['step']:.2f} s; micro-batches of {args.tokens} tokens, no recomputation",
        "",
        "| on | step, s | generate | train | sync and proof | grade | peak GiB a GPU | speed-up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    one = _median(results.get("one GPU", {}), "step")
    for place, result in results.items():
        if not result.get("rows"):
            lines.append(f"| {place} | failed |")
            continue
        took = _median(result, "step")
        phases = " | ".join(f"{_median(result, phase):.3f}" for phase in PHASES)
        gain = f"{one / took:.2f}x" if one else ""
        lines.append(f"| {place} | {took:.2f} | {phases} | {result['peak']:.1f} | {gain} |")
    for place, result in results.items():
        if "memory/predicted_gib" in result.get("metrics", {}):
            planned, used = (result["metrics"][f"memory/{name}_gib"] for name in ("predicted", "gpu"))
            lines.append(f"{place}: torch's peak {used:.1f} GiB, planned {planned:.1f} ({used / planned - 1:+.1%})")
    for place, result in results.items():
        if result.get("rows"):
            start = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["start"].items())
            lines.append(f"{place}: {start}; {_median(result, 'trained'):,.0f} tokens trained a step")
    return lines


def _median(result: dict[str, Any], key: str) -> float:
    return float(statistics.median(row.get(key, 0.0) for row in result["rows"])) if result.get("rows") else 0.0


# --- the same update ------------------------------------------------------------------------------------------------
def equal(args: argparse.Namespace, folder: Path) -> list[str]:
    """Two updates with the same rollouts on one and on two workers."""
    from gpu_step import recipe_words

    from lockstep.cluster.group import GroupLearner, Meanwhile
    from lockstep.cluster.process_workers import ProcessWorkers, Workers
    from lockstep.config.load import load
    from lockstep.config.schema import Colocated

    named = argparse.Namespace(
        **vars(args) | {"cpu": args.tiny, "work_name": "full", "tokens": 0, "arm": "Lockstep", "set": []}
    )
    words = [
        *recipe_words(named, str(folder)),
        f"update.tokens_per_microbatch={40 if args.tiny else 4096}",
        "threads=1",
    ]
    recipe = json.dumps(load([*words, *args.set, PLACES["two GPUs"]]).model_dump(mode="json"))
    rows: list[tuple[str, list[dict[str, float]], str]] = []
    for number, (name, size) in enumerate({"one GPU": 1, "one GPU again": 1, "two GPUs": 2}.items()):
        placement = Colocated(gpus=size, timeout_s=300)
        processes = ProcessWorkers(placement, folder / f"equal_{number}", gpu=not args.tiny)
        workers = Workers(processes, range(size))
        learner = GroupLearner(workers, workers.call("build", recipe, False)[0].learner, Meanwhile())
        batch = saved_rollouts(args)
        metrics = [learner.update(batch, lambda inputs: None) for _ in range(2)]  # type: ignore[arg-type,return-value]
        rows.append((name, metrics, learner.fingerprint().combined))
        processes.close()
    lines = ["Two updates of the same weights with the same saved rollouts:", ""]
    for name, metrics, fingerprint in rows:
        found = "; ".join(f"loss {m['loss/policy']:.9g}, norm {m['grad/norm']:.9g}" for m in metrics)
        lines.append(f"{name}: {found}; weights {fingerprint}")
    for name, metrics, fingerprint in rows[1:]:
        gaps = [
            abs(a[key] - b[key]) / max(abs(a[key]), 1e-30)
            for a, b in zip(rows[0][1], metrics, strict=True)
            for key in ("loss/policy", "grad/norm")
        ]
        bits = "equal" if rows[0][2] == fingerprint else "different"
        lines.append(f"one GPU and {name}: largest relative difference {max(gaps):.2g}; bits of the weights {bits}")
    return lines


def saved_rollouts(args: argparse.Namespace) -> Any:
    """Sequences of tokens drawn at random, eight to a prompt, with advantages."""
    import random

    from lockstep.types import Batch, TrainSequence

    draw = random.Random(3)
    prompts, prompt, reply, vocabulary = (3, 8, 12, 200) if args.tiny else (8, 256, 512, 20000)
    sequences = []
    for group in range(prompts):
        ids = tuple(draw.randrange(vocabulary) for _ in range(prompt))
        for sample in range(8):
            tokens = tuple(draw.randrange(vocabulary) for _ in range(reply))
            advantage = 1.0 if sample % 2 else -0.9
            sequences.append(
                TrainSequence(
                    ids,
                    tokens,
                    (True,) * reply,
                    (-11.0,) * reply,
                    (advantage,) * reply,
                    1 / (8 * prompts * reply),
                    group,
                )
            )
    return Batch(tuple(sequences))


# --- the link -------------------------------------------------------------------------------------------------------
def exchange(args: argparse.Namespace, folder: Path) -> list[str]:
    """Time the messages of the optimizer between two processes over the parameters of the model."""
    import torch.multiprocessing as mp

    out = folder / "exchange.json"
    mp.spawn(exchange_rank, args=(args.model, str(folder / "meet"), str(out), args.tiny), nprocs=2)  # type: ignore[no-untyped-call]
    found = json.loads(out.read_text())
    moved = found["bytes"] / 2 / 1e9

    def line(what: str, seconds: float) -> str:
        return f"{what}: {seconds * 1e3:.1f} ms ({moved / seconds:.0f} GB/s)"

    return [
        f"What goes over the link for {found['bytes'] / 1e9:.2f} GB of weights on two workers, half of it each way:",
        "",
        line("gradients of a micro-batch to their owners, added", found["exchange"]),
        line("new weights to all, copies included", found["publish"]),
        line("of that the messages alone", found["share"]),
    ]


def exchange_rank(rank: int, model: str, meet: str, out: str, cpu: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from lockstep.config.schema import AdamW
    from lockstep.learner.ranks import TorchRanks
    from lockstep.learner.sharded import ShardedOptimizer
    from lockstep.plan.model_shape import meta_model

    if cpu:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if cpu else "nccl", init_method=f"file://{meet}", rank=rank, world_size=2)
    device = torch.device("cpu" if cpu else "cuda")
    shapes = {name: p.shape for name, p in meta_model(Path(model)).named_parameters()}
    parameters = {n: nn.Parameter(torch.zeros(s, dtype=torch.bfloat16, device=device)) for n, s in shapes.items()}
    ranks = TorchRanks()
    optimizer = ShardedOptimizer(parameters, AdamW(), ranks)
    (bucket,) = optimizer._buckets

    def timed(body: Any, times: int = 10) -> float:
        for _ in range(2):
            body()
        if not cpu:
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            body()
        if not cpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    def exchanged() -> None:
        bucket.start(2)
        bucket.finish()

    found = {
        "bytes": sum(p.numel() * 2 for p in parameters.values()),
        "exchange": timed(exchanged),
        "publish": timed(lambda: bucket.publish(parameters)),
        "share": timed(lambda: ranks.share(bucket._sent.split(bucket._give))),
    }
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


# --- driver ---------------------------------------------------------------------------------------------------------
def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    made.add_argument(
        "--places", nargs="*", choices=PLACES, help="of a step; none given: one GPU, two, and for `full` split"
    )
    made.add_argument("--model", default="", help="folder made by random_model.py; none makes one")
    made.add_argument("--tokens", type=int, default=20480, help="of a micro-batch; 14 of them make a step of two GPUs")
    made.add_argument("--steps", type=int, default=3)
    made.add_argument("--tiny", action="store_true", help="tiny versions on CPU workers, to try things out")
    made.add_argument("--shape", default="1.5b", choices=["1.5b", "7b"], help="model, if none is given")
    made.add_argument("--set", nargs="*", default=[], help="more settings of both arms")
    made.add_argument("--limit", type=float, default=150, help="seconds that an arm may take")
    made.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the tables to a file, {RESULT.name}")
    args = made.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # arms end with the program, whatever ends it
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            args.model = f"{folder}/model"
            trl_arms.write_model(Path(args.model), "tiny" if args.tiny else args.shape, cpu=args.tiny)
        for part in args.part:
            if part in WORKS:
                places = args.places or (list(PLACES) if part == "full" else list(PLACES)[:2])
                results = {place: step(part, place, args, Path(folder)) for place in places}
                lines = step_lines(part, results, args)
            elif part in VARIANTS:
                work, variants = VARIANTS[part]
                lines = step_lines(
                    work,
                    {name: step(work, "two GPUs", args, Path(folder), name, more) for name, more in variants.items()},
                    args,
                )
            else:
                found: dict[str, Any] = {
                    "trl": trl,
                    "sft": sft,
                    "equal": equal,
                    "exchange": exchange,
                    "eval": evaluations,
                    "gpt-oss": gpt_oss,
                }
                found |= {kind: partial(runs, kind=kind) for kind in KINDS}
                lines = found[part](args, Path(folder))
            print("\n".join([*lines, ""]), flush=True)
            if args.write:
                write_section(args.write, part, [*header(__file__, device_name(), ("torch",)), "", *lines])


if __name__ == "__main__":
    main()
