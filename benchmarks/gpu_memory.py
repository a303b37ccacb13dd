"""The memory plan against measured peaks on one GPU: updates of random-weight models in many configurations.

    python benchmarks/gpu_memory.py --write                          # 36 configurations, some six minutes on an H200
    python benchmarks/gpu_memory.py --shapes 1.5b --modes none full --budgets 8192 32768
    python benchmarks/gpu_memory.py --shapes qwen3-30b-a3b gpt-oss-20b --training lora --modes full --budgets 16384 \
        --lengths 512 2048 8192 --write                              # mixtures of experts, by the length of a sequence
    python benchmarks/gpu_memory.py --cpu                            # a tiny model, nothing measured: does the script run?

Each configuration builds a model and a learner, makes one update (moments appear, kernels are compiled), then measures the peak
of a second one in several micro-batches: torch's allocated and reserved bytes, and what the process has outside torch. Reference
passes are measured likewise. Shapes: random_model.py and family_models.py; a sequence's length includes a prompt of 256
tokens that 8 samples share. A configuration that fails says why and the next one runs. `--write` writes the table to
benchmarks/results/gpu_memory.txt.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import family_models
import torch
from devices import device_name, synchronise
from random_model import random_model
from results_file import RESULTS, header, write_section

from lockstep.config.load import load
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.models.attention import NAME
from lockstep.plan.activations import per_token
from lockstep.plan.choice import TOLERATED
from lockstep.plan.memory import OUTSIDE, Sizes, peak, phases
from lockstep.plan.memory_inputs import GIB, memory_inputs_of
from lockstep.plan.model_shape import shape_of_model
from lockstep.rollout.allocator import grow_segments
from lockstep.types import Batch, LossInput, LossOutput, TrainSequence

PROMPT, SAMPLES, RANK = 256, 8, 32
RESULT = RESULTS / "gpu_memory.txt"
PACKAGES = ("torch", "triton", "transformers", "peft")


@dataclass(frozen=True)
class Configuration:
    shape: str
    training: str
    mode: str
    budget: int
    length: int

    @property
    def reply(self) -> int:
        return self.length - PROMPT

    @property
    def groups(self) -> int:
        """Prompts of an update: two micro-batches and a half, or more."""
        return max(4, -(-5 * self.budget // (2 * (PROMPT + SAMPLES * self.reply))))

    def __str__(self) -> str:
        return f"{self.shape:>5} {self.training:<5} {self.mode:<10} {self.budget:>6} {self.length:>5}"


@dataclass(frozen=True)
class Measured:
    configuration: Configuration
    predicted: float
    allocated: float
    reserved: float
    outside: float
    """Bytes of the process that torch's allocator does not count."""
    tokens: int
    """Of the largest micro-batch."""
    rate: float
    """Tokens of all sequences that an update trains per second."""
    passes: tuple[float, float]
    """Predicted and measured peak of a pass without gradient."""
    kept: float
    """Predicted bytes per token."""

    @property
    def error(self) -> float:
        return self.allocated / self.predicted - 1


def batch(configuration: Configuration, vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary - 300, (count,), generator=generator).tolist())

    sequences, reply = [], configuration.reply
    for group in range(configuration.groups):
        prompt = ids(PROMPT)
        for _ in range(SAMPLES):
            lists = (True,) * reply, (-10.0,) * reply, (1.0,) * reply
            sequences.append(TrainSequence(prompt, ids(reply), *lists, 1e-4, group))
    return Batch(tuple(sequences))


def loss(inputs: LossInput) -> LossOutput:
    return LossOutput(-(inputs.logprobs_T - inputs.old_logprobs_T).exp() * inputs.advantages_T)


def measure(configuration: Configuration, device: str) -> Measured:
    adapter = f"{{kind: lora, rank: {RANK}}}" if configuration.training == "lora" else "{kind: none}"
    recipe = load(
        [
            "task={kind: reasoning_gym}",
            f"adapter={adapter}",
            f"prompts_per_step={configuration.groups}",
            f"samples_per_prompt={SAMPLES}",
            f"rollout={{max_tokens: {configuration.reply}, slots: 1}}",
            f"update={{recompute: {configuration.mode}, tokens_per_microbatch: {configuration.budget}}}",
            "model.dtype=bf16",
            "optimizer.lr=1e-6",
        ]
    )
    if configuration.shape in family_models.SHAPES:
        model = family_models.random_model(configuration.shape, device, NAME, cpu=device == "cpu")
    else:
        model = random_model(configuration.shape, "bfloat16", device, NAME)
    shape = shape_of_model(model)
    learner = TorchLearner(attach(model, recipe.adapter, 0), recipe)
    work = batch(configuration, shape.vocab)
    learner.update(work, loss)
    before = reset(device)
    start = time.perf_counter()
    learner.update(work, loss)
    synchronise()
    seconds = time.perf_counter() - start
    allocated, reserved, outside = peaks(device)
    tokens = max(packed.tokens for packed in learner._streams(work.sequences))
    reset(device)
    learner.response_logprobs(work.sequences, 1.0)
    passes = peaks(device)[0]
    inputs = memory_inputs_of(recipe, shape, "cuda", 1e12, prompt_tokens=PROMPT, passes=True)
    found = phases(inputs, Sizes(configuration.budget, configuration.mode, 1))  # type: ignore[arg-type]
    update = peak(tuple(phase for phase in found if phase.name in ("train", "optimizer")))
    forward = next(phase for phase in found if phase.name == "log-probabilities")
    kept = per_token(shape, inputs.layers, configuration.mode).kept  # type: ignore[arg-type]
    print(
        f"  static {before / GIB:.2f}; predicted: " + ", ".join(f"{t.name} {t.bytes / GIB:.2f}" for t in update.terms)
    )
    rate = configuration.groups * SAMPLES * configuration.length / seconds
    told = (forward.bytes, passes)
    return Measured(configuration, update.bytes, allocated, reserved, outside, tokens, rate, told, kept)


def reset(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peaks(device: str) -> tuple[float, float, float]:
    """Allocated, reserved, outside."""
    if device != "cuda":
        return 0.0, 0.0, 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved()), float(outside)


def run_all(configurations: list[Configuration], device: str) -> tuple[list[Measured], list[str]]:
    done: list[Measured] = []
    failed: list[str] = []
    for configuration in configurations:
        print(configuration, flush=True)
        try:
            result = measure(configuration, device)
            done.append(result)
            print(f"  predicted {result.predicted / GIB:.2f}, measured {result.allocated / GIB:.2f} GiB", flush=True)
        except Exception as error:  # the next configuration is worth measuring
            failed.append(
                f"{configuration}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            traceback.print_exc()
        gc.collect()  # outside the handler: the traceback holds the tensors
        if device == "cuda":
            torch.cuda.empty_cache()
    return done, failed


def table(done: list[Measured], failed: list[str]) -> list[str]:
    lines = [
        *header(__file__, device_name(), PACKAGES),
        f"prompts of {PROMPT} tokens, {SAMPLES} samples each; tokens/s: of all sequences, prompts included; GiB",
        "",
        "| shape | training | recompute | budget | length | tokens | tokens/s | predicted GiB | allocated | error | reserved "
        "| outside torch | pass predicted | pass measured | error |",
        "|" + "---|" * 15,
    ]
    for one in done:
        c, (predicted, measured) = one.configuration, one.passes
        lines.append(
            f"| {c.shape} | {c.training} | {c.mode} | {c.budget} | {c.length} | {one.tokens} | {one.rate:,.0f} "
            f"| {one.predicted / GIB:.2f} | {one.allocated / GIB:.2f} | {percent(one.allocated, one.predicted)} "
            f"| {one.reserved / GIB:.2f} | {one.outside / GIB:.2f} "
            f"| {predicted / GIB:.2f} | {measured / GIB:.2f} | {percent(measured, predicted)} |"
        )
    return [*lines, "", *slopes(done), *summary(done), *(f"failed: {line}" for line in failed)]


def percent(measured: float, predicted: float) -> str:
    return f"{measured / predicted - 1:+.1%}" if measured else "not measured"


def slopes(done: list[Measured]) -> list[str]:
    """Bytes per token between the smallest and the largest budget, and how well two of three budgets foretell the third."""
    lines = []

    def kind(one: Measured) -> tuple[str, str, str, str]:
        c = one.configuration
        return c.shape, c.training, c.mode, str(c.length)

    for key, rows in itertools.groupby((one for one in done if one.allocated), kind):
        points = sorted(rows, key=lambda one: one.tokens)
        if len(points) < 2 or points[-1].tokens == points[0].tokens:
            continue
        slope = (points[-1].allocated - points[0].allocated) / (points[-1].tokens - points[0].tokens)
        text = f"{' '.join(key)}: {slope / 1e3:.1f} kB a token measured, {points[0].kept / 1e3:.1f} kept by prediction"
        if len(points) > 2:
            few, many, third = points[0], points[1], points[2]
            rate = (many.allocated - few.allocated) / (many.tokens - few.tokens)
            foretold = many.allocated + rate * (third.tokens - many.tokens)
            text += f"; calibrated on two, the third is off by {third.allocated / foretold - 1:+.1%}"
        lines.append(text)
    return lines


def summary(done: list[Measured]) -> list[str]:
    measured = [one for one in done if one.allocated]
    if not measured:
        return ["nothing was measured"]
    errors = [one.error for one in measured]
    near = sum(abs(error) <= TOLERATED for error in errors)
    outside = max(one.outside for one in measured) / GIB
    gap = statistics.median(one.reserved / one.allocated - 1 for one in measured)
    return [
        f"within {TOLERATED:.0%}: {near} of {len(errors)}",
        f"measured over predicted: from {min(errors):+.1%} to {max(errors):+.1%}",
        f"reserved over allocated: {gap:+.1%} in the median",
        f"outside torch: at most {outside:.2f} GiB, planned {OUTSIDE['cuda'] / GIB:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "1.5b"], help="of random_model.py or family_models.py")
    parser.add_argument("--training", nargs="+", default=["full", "lora"])
    parser.add_argument("--modes", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument("--lengths", nargs="+", type=int, default=[768], help="tokens of a sequence, prompt included")
    parser.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the table to a file, {RESULT.name}")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU: nothing is measured")
    args = parser.parse_args()
    if args.cpu:
        args.shapes, args.budgets = (
            [one for one in args.shapes if one in family_models.SHAPES] or ["tiny"],
            [2048, 4096],
        )
        if args.write == RESULT:
            raise SystemExit("a CPU's figures are none: give --write another file")
    device = "cpu" if args.cpu else "cuda"
    grow_segments(os.environ)  # as a run does
    chosen = itertools.product(args.shapes, args.training, args.modes, args.budgets, args.lengths)
    done, failed = run_all([Configuration(*one) for one in chosen], device)
    lines = table(done, failed)
    print("\n".join(lines))
    if args.write:
        experts = all(shape in family_models.SHAPES for shape in args.shapes)
        write_section(args.write, "mixtures of experts" if experts else "updates and passes", lines)


if __name__ == "__main__":
    main()
