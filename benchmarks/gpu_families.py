"""Families of models on one GPU: plain transformers, learner and engine on the same small random models, in fp32 and in bf16.

    python benchmarks/gpu_families.py --write                  # every family of docs/models.md; some two minutes on an H100
    python benchmarks/gpu_families.py --families gpt_oss gemma2
    python benchmarks/gpu_families.py --cpu --families llama   # on a CPU, to try the program out: no figures

Each family has the small model that a run's own check computes (4 layers, heads of 16, a window of 6 tokens). In fp32, four ways
to compute log-probabilities are compared with transformers' eager forward pass of each sequence alone, on the same GPU: those of
the engine's samples, the engine's scores, and the learner's, of whole sequences and of replies that share their prompt. Beside
them stands what the same pass on a CPU differs by: rounding alone. In bf16 the engine's samples are compared with the learner's
packed forward pass; for models with experts, once with the learner's own routes and once with those that sampling took
(update.replay_routing). Several processes share the GPU, each with its part of the families.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))

import numpy as np
import torch
from devices import device_name
from results_file import RESULTS, header, write_section

from lockstep.config.schema import Recipe
from lockstep.device import prepare_process
from lockstep.learner.learner import TorchLearner
from lockstep.models.attention import NAME
from lockstep.models.decoder import context_of
from lockstep.models.small import CONTEXT, random_model, small_config
from lockstep.rollout.build import native_engine
from lockstep.types import Completion, Request, Sampling, TokenIds, TrainSequence

ASKED = 1e-5
"""Nats between two ways to compute a token in fp32, at most."""
PROMPTS, SAMPLES = 6, 4
SPECIAL = {0, 1, 2}
"""The special tokens of all small models."""
RESULT = RESULTS / "gpu_families.txt"
PACKAGES = ("torch", "triton", "transformers")


def families_of_the_page() -> list[str]:
    from tests.docs.models_page import shown

    served, _ = shown()
    return [line.split("|")[1].strip() for line in served.splitlines()[2:]]


def compare(family: str, device: str) -> dict[str, Any]:
    """Return the largest differences of a family in fp32, and the mean ones in bf16."""
    from tests.docs.models_page import default

    meta = default(family)
    config = small_config(meta.config)
    plain = random_model(type(meta), config, "eager")
    ours = random_model(type(meta), config, NAME)
    ours.load_state_dict(plain.state_dict())
    found = in_fp32(ours.to(device), copy.deepcopy(plain).to(device), plain)
    experts = any(".experts." in name for name, _ in ours.named_parameters())
    for parameter in ours.parameters():  # not ours.to(...), which would round the rotary frequencies too
        parameter.data = parameter.data.bfloat16()
    found["bf16"] = in_bf16(ours, replay=False)
    if experts:
        try:
            found["replay"] = in_bf16(ours, replay=True)
        except Exception as error:  # the page says which families have no replay
            found["no replay"] = f"{type(error).__name__}: {error}"
    return found


def work_of(model: Any, count: int, longest: int) -> list[Request]:
    """Prompts of different lengths, with samples up to the model's context, or `longest` tokens in all."""
    context = min(context_of(model.config) or longest, longest)
    draw = np.random.default_rng(0)
    requests = []
    for group in range(count):
        length = context // 4 + 3 * group % (context // 4)
        ids = tuple(draw.integers(3, 256, length).tolist())
        for sample in range(SAMPLES):
            sampling = Sampling(context - length - sample, ignore_eos=True)
            requests.append(Request(f"{group}/{sample}", ids, str(group), 10 * group + sample, sampling, 0))
    return requests


def sampled(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    """Replies without special tokens: transformers gives those that stand for an image or sound the embedding of padding."""
    engine.load(iter(()), 0)
    engine.submit(requests)
    done = [one for one in engine.completed() if not SPECIAL & {*one.ids}]
    return sorted(done, key=lambda one: one.request.id)


def as_trained(done: Completion) -> TrainSequence:
    zeros = (0.0,) * len(done.ids)
    group = int(done.request.group)
    return TrainSequence(
        done.request.prompt_ids, done.ids, (True,) * len(zeros), done.logprobs, zeros, 1.0, group, routes=done.routes
    )


def in_fp32(ours: Any, plain: Any, on_cpu: Any) -> dict[str, Any]:
    learner = TorchLearner(ours, Recipe())
    engine = native_engine(ours, slots=6, stop_ids=frozenset(), decode=str)
    done = sampled(engine, work_of(ours, 3, CONTEXT // 2))
    whole = [(*one.request.prompt_ids, *one.ids) for one in done]
    wanted = [transformers_own(plain, ids) for ids in whole]
    replies = [row[-len(one.ids) :] for row, one in zip(wanted, done, strict=True)]
    return {
        "transformers, CPU": largest([transformers_own(on_cpu, ids) for ids in whole], wanted),
        "sampled": largest([one.logprobs for one in done], replies),
        "scored": largest(engine.score(whole), wanted),
        "learner, whole": largest(learner.logprobs(whole), wanted),
        "learner, shared": largest(learner.response_logprobs([as_trained(one) for one in done], 1.0), replies),
        "engine": type(engine).__name__.removesuffix("Engine").lower(),
        "fused": getattr(engine, "_fused", None) is not None,
    }


def in_bf16(ours: Any, *, replay: bool) -> dict[str, float]:
    """Mean and largest difference of a token between its sampling and the learner's forward pass of an update."""
    recipe = Recipe.model_validate({"update": {"replay_routing": replay}})
    learner = TorchLearner(ours, recipe)
    engine = native_engine(ours, slots=16, stop_ids=frozenset(), decode=str, routes=replay)
    done = sampled(engine, work_of(ours, PROMPTS, CONTEXT))
    trained = learner.response_logprobs([as_trained(one) for one in done], 1.0)
    gaps = np.concatenate([np.abs(np.subtract(a.logprobs, b)) for a, b in zip(done, trained, strict=True)])
    return {"mean": float(gaps.mean()), "max": float(gaps.max()), "tokens": len(gaps)}


@torch.no_grad()
def transformers_own(model: Any, ids: TokenIds) -> list[float]:
    ids_1T = torch.tensor([ids], device=model.device)
    logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    chosen: list[float] = logprobs_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].tolist()
    return chosen


def largest(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(found, wanted, strict=True))


# --- driver ---------------------------------------------------------------------------------------------------------
def part(families: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run a part of the families in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--part-out", file.name, *["--cpu"] * args.cpu, "--families", *families]
        code = subprocess.run(command, check=False).returncode
        found: dict[str, Any] = json.loads(Path(file.name).read_text() or "{}")
    return {family: found.get(family, {"failed": f"the process ended with {code}"}) for family in families}


def run_part(args: argparse.Namespace) -> None:
    device = "cpu" if args.cpu else "cuda"
    prepare_process(torch.device(device), 1)
    results: dict[str, Any] = {}
    for family in args.families:
        try:
            results[family] = compare(family, device)
        except Exception as error:  # the next family is worth comparing
            traceback.print_exc()
            results[family] = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        Path(args.part_out).write_text(json.dumps(results))


WAYS = ("sampled", "scored", "learner, whole", "learner, shared")
COLUMNS = ("transformers, CPU", *WAYS)


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| family | engine | fused | "
        + " | ".join(f"fp32: {way}" for way in COLUMNS)
        + " | bf16: mean, max | with replay |",
        "| --- " * (len(COLUMNS) + 5) + "|",
    ]
    for family, one in results.items():
        if "failed" in one:
            continue
        gaps = [f"{one[way]:.1e}" for way in COLUMNS]
        replayed = told(one["replay"]) if "replay" in one else "none" if "no replay" in one else "–"
        cells = (family, one["engine"], "yes" if one["fused"] else "no", *gaps, told(one["bf16"]), replayed)
        lines.append("| " + " | ".join(cells) + " |")
    computed = [one for one in results.values() if "failed" not in one]
    worst = [max(one[way] for way in WAYS) for one in computed]
    within = sum(gap <= ASKED for gap in worst)
    lines += [
        "",
        f"fp32 within {ASKED:g} nats: {within} of {len(results)} families; the largest {max(worst, default=0):.1e}",
    ]
    failed = (f"{family}: {one['failed']}" for family, one in results.items() if "failed" in one)
    alone = (f"{family}, replay: {one['no replay']}" for family, one in results.items() if "no replay" in one)
    return [*lines, *failed, *alone]


def told(gap: dict[str, float]) -> str:
    return f"{gap['mean']:.2g}, {gap['max']:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=[], help="those of docs/models.md, if none is named")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--part-out", help="compare these families in this process")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the table to a file, {RESULT.name}")
    args = parser.parse_args()
    if args.cpu and args.write == RESULT:
        raise SystemExit("a CPU's figures are none: give --write another file")
    if args.part_out:
        run_part(args)
        return
    families = args.families or families_of_the_page()
    count = min(args.processes, len(families))
    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(lambda start: part(families[start::count], args), range(count)))
    found = {family: one for results in parts for family, one in results.items()}
    results = {family: found[family] for family in families}
    lines = [*header(__file__, "CPU" if args.cpu else device_name(), PACKAGES), "", *table(results)]
    print("\n".join(lines))
    if args.write:
        write_section(args.write, "families", lines)


if __name__ == "__main__":
    main()
