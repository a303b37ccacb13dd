"""Whole training steps of mixtures of experts with LoRA on one GPU, by the length of a sequence, with floors and the memory plan.

    python benchmarks/gpu_moe_step.py --write                    # both shapes; some ten minutes on an H200
    python benchmarks/gpu_moe_step.py --shapes gpt-oss-20b --lengths 512
    python benchmarks/gpu_moe_step.py --cpu                      # tiny models on a CPU, to try the program out: no figures

Shapes of family_models.py, random bf16 weights, LoRA of rank 32 on attention, groups of 8 samples. Half of a sequence is its
prompt, and every reply has all of the other half (end tokens are ignored). Each arm is a process of its own that runs Lockstep's
training loop as `lockstep train` does: memory plan, rollout, advantages, update, sync with proof. Only loading is replaced, by
weights that are drawn on the GPU; and nothing is saved. The plan chooses micro-batches and recomputation. Figures are those of
the last step; the peak is the largest since the start, and is compared with the plan's. An update's floor has the products of
attention, which grow with the square of the length; beside it stands the share of 989 TFLOP/s that its active parameters alone
take, 4 FLOP each and token. Rollouts have no floor here: how many experts a few random rows reach is not known beforehand.
The last column is the largest difference of a log-probability between sampling and training, in nats; it is 0 in an exact run.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import family_models
import trl_arms
from devices import device_name
from random_model import write_tokenizer
from results_file import RESULTS, header, write_section

GROUPS = {512: 64, 2048: 8, 8192: 2}
"""Prompts of a step, by the length of a sequence; other lengths have 2."""
SAMPLES, RANK, PEAK = 8, 32, 989e12
RESULT = RESULTS / "gpu_moe_step.txt"
PACKAGES = ("torch", "triton", "transformers", "peft")
TASK = Path(__file__).with_name("step_work.py")


def write_folder(folder: Path, shape: str, *, cpu: bool) -> None:
    """Write a model folder whose weight file has the right header and no content: it takes no room on the disk."""
    config = family_models.config_of(shape, cpu=cpu)
    vocab = config.vocab_size if not cpu else 1024
    config.vocab_size, config.eos_token_id, config.pad_token_id = vocab, vocab - 291, vocab - 293
    config.dtype = "float32" if cpu else "bfloat16"
    config.save_pretrained(folder)
    write_tokenizer(folder, vocab)
    tensors: dict[str, Any] = {}
    size = 0
    for name, parameter in drawn(folder, "meta").named_parameters():
        end = size + 2 * parameter.numel()
        tensors[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [size, end]}
        size = end
    head = json.dumps(tensors).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + size)


def drawn(folder: Path, device: str) -> Any:
    """The model of a folder with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lockstep.models.attention import NAME

    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype, attn_implementation=NAME).eval()


def step(args: argparse.Namespace) -> dict[str, Any]:
    """Run a few steps in this process, and return the last one's metrics."""
    from lockstep.build import build
    from lockstep.config.load import load
    from lockstep.loops.start import start_run
    from lockstep.track.writer import read_metrics

    trl_arms.save_nothing()
    device = "cpu" if args.cpu else "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_folder(folder, args.shape, cpu=args.cpu)
        build.load_model = lambda *_, **__: drawn(folder, device)  # type: ignore[assignment]
        run = start_run(load(recipe_words(args, folder, scratch)))
        return read_metrics(run)[-1].metrics | {"device": device_name()}


def recipe_words(args: argparse.Namespace, folder: Path, scratch: str) -> list[str]:
    groups, (prompt, reply) = groups_of(args.length, cpu=args.cpu), halves(args.length)
    return [
        "name=bench",
        f"runs_dir={scratch}/runs",
        f"model={{path: {folder}, dtype: {'fp32' if args.cpu else 'bf16'}}}",
        f"adapter={{kind: lora, rank: {RANK}, targets: attention}}",
        f"task={{kind: python, path: {TASK}:BenchmarkTask, settings: {{prompts: {2 * groups}, tokens: {prompt}}}}}",
        f"steps={args.steps}",
        f"prompts_per_step={groups}",
        f"samples_per_prompt={SAMPLES}",
        f"rollout={{max_tokens: {reply}, ignore_eos: true}}",
        "optimizer.lr=1e-6",
        "update.drop_zero_advantage=false",
        "eval.enabled=false",
        "save.every=1000",
        "track.rollouts_every=1000",
        "allow=[disk]",
        *(["device=cpu"] if args.cpu else []),
        *args.set,
    ]


def groups_of(length: int, *, cpu: bool) -> int:
    return 2 if cpu else GROUPS.get(length, 2)


def halves(length: int) -> tuple[int, int]:
    return length // 2, length - length // 2


# --- driver ---------------------------------------------------------------------------------------------------------
def arm(shape: str, length: int, args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Run one arm in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file, log.open("w") as stream:
        command = [sys.executable, __file__, "--shape", shape, "--length", str(length), "--arm-out", file.name]
        command += ["--steps", str(args.steps), *["--cpu"] * args.cpu, "--set", *args.set]
        try:
            code = subprocess.run(command, stdout=stream, stderr=stream, timeout=args.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"no result after {args.limit:.0f} s"}
        text = Path(file.name).read_text()
    return json.loads(text) if text else {"failed": f"exit status {code}; see {log.name}"}


def update_floor(shape: str, length: int) -> tuple[float, float]:
    """Least seconds of an update on an H200 with one forward pass, and the FLOP of active parameters for a token."""
    from lockstep.plan import floors
    from lockstep.plan.model_shape import shape_of_model

    sizes = shape_of_model(family_models.random_model(shape, "meta", "eager", cpu=False))
    work = floors.Work.equal(groups_of(length, cpu=False), SAMPLES, *halves(length))
    seconds = floors.train_seconds(sizes, work, floors.Update(0, adapter=True), floors.H200)
    return seconds, 4.0 * (sizes.body + sizes.head)


def row(shape: str, length: int, one: dict[str, Any], *, cpu: bool) -> str:
    groups, (prompt, reply) = groups_of(length, cpu=cpu), halves(length)
    cells = [shape, str(length), f"{groups} x {SAMPLES}", f"{one['time/step']:.2f}"]
    sampled, trained = groups * SAMPLES * reply, groups * (prompt + SAMPLES * reply)
    update, rates = one["time/update"], [sampled / one["time/rollout"], trained / one["time/update"]]
    cells += [f"{one['time/rollout']:.2f}", f"{rates[0]:,.0f}", f"{update:.2f}", f"{rates[1]:,.0f}"]
    gap = f"{one['mismatch/max_abs_dlogp']:.2g}"
    if cpu:
        return "| " + " | ".join([*cells, *[""] * 5, gap]) + " |"
    floor, flops = update_floor(shape, length)
    planned, error = one["memory/predicted_gib"], one["memory/plan_error"]
    cells += [f"{floor / update:.0%}", f"{flops * rates[1] / PEAK:.0%}"]
    cells += [f"{planned:.1f}", f"{planned * (1 + error):.1f}", f"{error:+.1%}", gap]
    return "| " + " | ".join(cells) + " |"


def table(results: dict[tuple[str, int], dict[str, Any]], *, cpu: bool) -> list[str]:
    lines = [
        "| shape | length | samples | step, s | rollout | tokens/s | update | computed tokens/s | of the floor | of 989 TFLOP/s "
        "| planned GiB | peak | error | max dlogp |",
        "| --- " * 14 + "|",
    ]
    lines += [row(*which, one, cpu=cpu) for which, one in results.items() if "failed" not in one]
    lines.append("")
    return [
        *lines,
        *(f"{shape} {length}: {one['failed']}" for (shape, length), one in results.items() if "failed" in one),
    ]


def publish(results: dict[tuple[str, int], dict[str, Any]], args: argparse.Namespace) -> None:
    where = next((one["device"] for one in results.values() if "device" in one), "no device")
    lines = [*header(__file__, where, PACKAGES), "", *table(results, cpu=args.cpu)]
    print("\n".join(lines), flush=True)
    if args.write:
        write_section(args.write, ", ".join(args.shapes), lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=family_models.MIXTURES, default=list(family_models.MIXTURES))
    parser.add_argument("--lengths", nargs="*", type=int, default=[512, 2048, 8192], help="prompt and reply together")
    parser.add_argument(
        "--steps", type=int, default=2, help="of each arm; the memory plan is compared from the second on"
    )
    parser.add_argument("--set", nargs="*", default=[], help="settings. Example: update.recompute=full")
    parser.add_argument("--limit", type=float, default=240, help="seconds of an arm")
    parser.add_argument("--shape", choices=family_models.MIXTURES, help="of one arm")
    parser.add_argument("--length", type=int, default=512, help="of one arm")
    parser.add_argument("--arm-out", help="run one arm in this process")
    parser.add_argument("--logs", type=Path, default=Path(), help="folder of what the arms print")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the table to a file, {RESULT.name}")
    args = parser.parse_args(words)
    if args.cpu and args.write == RESULT:
        raise SystemExit("a CPU's figures are none: give --write another file")
    if args.arm_out:
        Path(args.arm_out).write_text(json.dumps(step(args)))
        return
    results = {}
    for shape in args.shapes:
        for length in [64] if args.cpu else args.lengths:
            results[shape, length] = arm(shape, length, args, args.logs / f"gpu_moe_step.{shape}.{length}.log")
            publish(results, args)


if __name__ == "__main__":
    main()
