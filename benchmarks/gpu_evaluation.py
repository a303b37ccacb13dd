"""Whether a model is the same model afterwards: evaluated in training, in a fresh process, exported, and read by other programs.

    python benchmarks/gpu_evaluation.py --model DIR --out evaluation.json
    PYTHONPATH=vllm_site python benchmarks/gpu_evaluation.py --model DIR --vllm
    python benchmarks/gpu_evaluation.py --model smollm2-135m-instruct --cpu --steps 2 --items 16 --questions 4 --arms lora

Each arm trains recipes/gpu_sums.yaml for some steps (its task from a file: sums of three signed digits) and evaluates at the
last one, greedy and sampled. Then fresh processes evaluate the run's checkpoint and what `lockstep export` made of it, with
--adapter ("peft") and with --merge, and every item is compared with training's own: marks (right or wrong) and replies (word
for word). A checkpoint, an adapter, and a model without adapters are the same numbers. Merging rounds the sum of base and
adapter to the base's precision, and under quantised numerics the sum is quantised in place of the base: those rows show what
that does. Last, plain transformers and with --vllm vLLM read the merged folder, each in a process of its own, and answer
questions greedily from the same ids. Their answers and log-probabilities are compared with those of Lockstep's engine on that
folder, in plain precision. Ends with an error if the same numbers score otherwise: more than 1 % of the marks on a GPU, any on
a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ARMS = {
    "lora": (),
    "full": ("adapter={kind: none}", "optimizer.lr=2.0e-5"),
    "lora-w4a4": ("numerics.train=mxfp4-w4a4",),
    "lora-fp32": ("model.dtype=fp32",),
}
MODES = ("greedy", "sampled")
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
TARGET = 0.01
"""Share of items whose mark may differ on a GPU; none may on a CPU."""


# --- one arm ----------------------------------------------------------------------------------------------------------
def arm(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, evaluate again, export, evaluate the exports, ask other readers. Every command is a process of its own."""
    folder.mkdir(parents=True)
    recipe, clock = folder / "recipe.yaml", time.perf_counter
    recipe.write_text(recipe_of(name, args, folder))
    seconds, mark = {}, clock()
    lockstep("train", recipe)
    seconds["train"], mark = clock() - mark, clock()
    run, merged = folder / "run", folder / "merged"
    targets = [f"checkpoint={run}", f"merged={merged}"]
    lockstep("export", run, merged, "--merge", "--step", args.steps)
    if name != "full":
        lockstep("export", run, folder / "adapter", "--adapter", "--step", args.steps)
        targets.insert(1, f"peft={folder / 'adapter'}")
    seconds["export"], mark = clock() - mark, clock()
    lockstep("eval", *targets, "--no-base", "--recipe", recipe, "--out", folder / "scores")
    seconds["eval"], mark = clock() - mark, clock()
    result: dict[str, Any] = {"evaluation": compared(run, folder / "scores", args.steps)}
    exported = json.loads((merged / "lockstep_export.json").read_text())
    result["merged, off the trained model, nats"] = exported["verified"]["trained"]
    result["merged, off its base, nats"] = exported["verified"]["base"]
    ours = reader("lockstep", merged, "--recipe", recipe, "--questions", args.questions)
    for other in ("transformers", *(["vllm"] if args.vllm else [])):
        theirs = reader(other, merged, "--asked", folder / "lockstep.json", *(["--cpu"] if args.cpu else []))
        result[other] = agreement(ours, theirs)
    seconds["readers"] = clock() - mark
    return result | {"seconds": {key: round(value, 1) for key, value in seconds.items()}}


def recipe_of(name: str, args: argparse.Namespace, folder: Path) -> str:
    from lockstep.config.load import dump, load

    digits = product(range(10), "+-", range(1, 10), "+-", range(10))
    sums = [(f"{a} {s} {b} {t} {c}", a + (b if s == "+" else -b) + (c if t == "+" else -c)) for a, s, b, t, c in digits]
    ask = "State the final answer to the following arithmetic problem: {} ="
    rows = [json.dumps({"prompt": ask.format(text), "answer": str(value)}) + "\n" for text, value in sums]
    (folder / "sums.jsonl").write_text("".join(rows))
    small = ["device=cpu", "prompts_per_step=4", "samples_per_prompt=4", "rollout.slots=32"] if args.cpu else []
    every = [
        "name=run", f"runs_dir={folder}", f"model.path={args.model}", f"steps={args.steps}",
        f"task={{kind: file, data: {folder}/sums.jsonl, heldout_rows: {args.items}}}",
        f"eval={{every: {args.steps}, items: {args.items}, modes: [{{name: greedy}}, {{name: sampled, temperature: 1.0}}]}}",
        f"save.every={args.steps}",
    ]  # fmt: skip
    return dump(load([str(ROOT / "recipes" / "gpu_sums.yaml"), *every, *small, *ARMS[name], *args.set]))


def compared(run: Path, scores: Path, step: int) -> list[dict[str, Any]]:
    """Training's scores at its last step against every other of the same step's weights, item by item."""
    from lockstep.evaluate.records import read_score, score_path

    rows = []
    for mode in MODES:
        inside, base = (read_score(score_path(run, at, mode)) for at in (step, 0))
        for path in sorted(scores.glob(f"*_{mode}.json")):
            score = read_score(path)
            pairs = list(zip(inside.results, score.results, strict=True))
            assert all((a.id, a.sample) == (b.id, b.sample) for a, b in pairs)
            row = {
                "what": path.name.split("_step_")[0],
                "mode": mode,
                "numerics": score.conditions.numerics,
                "items": len(pairs),
                "base": base.accuracy,
                "in training": inside.accuracy,
                "afterwards": score.accuracy,
                "trained": inside.conditions.weights != base.conditions.weights,
                "exact": score.conditions.weights == inside.conditions.weights,
                "other marks": sum(a.correct != b.correct for a, b in pairs) / len(pairs),
                "other replies": sum(a.text != b.text for a, b in pairs) / len(pairs),
            }
            rows.append(row)
    return rows


def agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Of greedy replies to the same ids, and of teacher-forced log-probabilities: on the questions, and on random ids."""
    pairs = list(zip(ours["replies"], theirs["replies"], strict=True))
    texts = list(zip(ours["texts"], theirs["texts"], strict=True))
    count = len(pairs)
    gaps = [
        [abs(a - b) for a, b in zip(x, y, strict=True)]
        for x, y in zip(ours["logprobs"], theirs["logprobs"], strict=True)
    ]
    asked, probe = ([gap for row in part for gap in row] for part in (gaps[:count], gaps[count:]))
    return {
        "same replies": sum(a == b for a, b in pairs) / count,
        "same answers": sum(read(a) == read(b) for a, b in texts) / count,
        "same first tokens": sum(a[:1] == b[:1] for a, b in pairs) / count,
        "mean |dlogp| of the questions": sum(asked) / len(asked),
        "mean |dlogp| of the probe": sum(probe) / len(probe),
        "max |dlogp|": max(asked + probe),
    }


def read(text: str) -> str:
    found: list[str] = BOX.findall(text)
    return found[-1] if found else text


# --- running ----------------------------------------------------------------------------------------------------------
def lockstep(*words: object) -> None:
    command([sys.executable, "-m", "lockstep", *map(str, words)])


def reader(name: str, folder: Path, *more: object) -> dict[str, Any]:
    out = folder.parent / f"{name}.json"
    script = Path(__file__).with_name("evaluation_readers.py")
    command([sys.executable, *map(str, (script, name, folder, "--out", out, *more))])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def command(words: list[str]) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    quiet = {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    done = subprocess.run(words, env=os.environ | quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )


def table(results: dict[str, dict[str, Any]]) -> str:
    head = "| arm | afterwards | mode | numerics | base, % | in training, % | afterwards, % | other marks, % | other replies, % |"
    lines = [head, "|" + "---|" * 9]
    for name, result in results.items():
        for row in result["evaluation"]:
            shares = [row[key] for key in ("base", "in training", "afterwards", "other marks", "other replies")]
            cells = [name, row["what"], row["mode"], row["numerics"], *(f"{100 * share:.2f}" for share in shares)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| arm | merged folder in | same replies, % | same answers, % | same first tokens, % | mean dlogp of questions "
              "| of the probe |", "|" + "---|" * 7]  # fmt: skip
    for name, result in results.items():
        for other in ("transformers", "vllm"):
            if other in result:
                *shares, asked, probe, _ = result[other].values()
                cells = [name, other, *(f"{100 * share:.1f}" for share in shares), f"{asked:.2g}", f"{probe:.2g}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def faults(results: dict[str, dict[str, Any]], cpu: bool) -> list[str]:
    """Rows that are not what they must be: trained, the same weights number for number, and with the same marks."""
    found = []
    for name, result in results.items():
        for row in result["evaluation"]:
            what = f"{name}, {row['what']}, {row['mode']}"
            if not row["trained"]:
                found.append(f"{what}: no step changed a weight (no reward?), so this shows nothing: train longer")
            if not row["exact"] and (row["what"] != "merged" or name == "full"):
                found.append(f"{what}: the weights are not those of the training")
            if row["exact"] and row["other marks"] > (0 if cpu else TARGET):
                found.append(f"{what}: {row['other marks']:.2%} of {row['items']} marks differ")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model's folder, or the built-in one's name")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--questions", type=int, default=50, help="for the other readers of the merged folder")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="a.b=c", help="overrides for every arm"
    )
    parser.add_argument("--vllm", action="store_true", help="ask vLLM too")
    parser.add_argument("--cpu", action="store_true", help="smaller steps on a CPU")
    parser.add_argument("--work", type=Path, help="a folder to keep the runs in, instead of one that is deleted")
    parser.add_argument("--out", type=Path, default=Path("gpu_evaluation.json"))
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.arms:
            results[name] = arm(name, args, (args.work or Path(folder)).resolve() / name)
            print(json.dumps({name: results[name]}, indent=1), flush=True)
            args.out.write_text(json.dumps(results, indent=1))
    print(table(results))
    if found := faults(results, args.cpu):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
