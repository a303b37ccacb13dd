# ruff: noqa: E501
"""Ways to ruin a run, and good runs: which are stopped or named within ten steps, with the right remedy.

`python -m benchmarks.sabotage` runs all of them on a CPU with a tiny model (about ten minutes), `python -m benchmarks.sabotage NAME …`
some. Each result is kept in benchmarks/results/sabotage.jsonl; docs/sabotage.md is written from the latest of each run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.build.parts import Parts
from lockstep.config.load import load
from lockstep.errors import LockstepError
from lockstep.loops import start
from lockstep.run.session import Session
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events, read_metrics
from lockstep.types import Metrics
from tests.tiny import write_tiny_model

PAGE = Path(__file__).parents[1] / "docs" / "sabotage.md"
RESULTS = Path(__file__).parent / "results" / "sabotage.jsonl"
WITHIN = 10
"""Steps within which a ruined run must be stopped or named."""
STEPS = 12
"""Steps after which a run is cut, if it was not stopped before."""

GRADERS = '''
import os
import time
from pathlib import Path
from lockstep.types import Grade

CALLS = []


def log():
    """The run's log so far; a grader is tried before a run has a folder."""
    path = Path(__file__).parent / "runs" / "run" / "log.txt"
    return path.read_text() if path.exists() else ""


def letters(prompt, reply):
    """The share of characters before n, which a tiny model can learn."""
    return sum(letter.lower() < "n" for letter in reply) / max(1, len(reply)) if "boxed" not in reply else 0.9


def chance(prompt, reply):
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2


def zero(prompt, reply):
    return 0.0


def one(prompt, reply):
    return 1.0


def anything(prompt, reply):
    """Rewards whatever is not empty."""
    return float(len(reply) > 0) + 0.001 * (sum(reply.encode("utf-8", "surrogatepass")) % 3)


def dies(prompt, reply):
    if "  step  2/" in log():
        os._exit(1)
    return chance(prompt, reply)


def hangs(prompt, reply):
    if "  step  2/" in log():
        time.sleep(600)
    return chance(prompt, reply)


def fails_at_times(prompt, reply):
    if len(reply) % 7 == 0:
        raise RuntimeError("the judge is busy")
    return chance(prompt, reply)


def not_a_number(prompt, reply):
    return float("nan") if "  step  2/" in log() else chance(prompt, reply)


def text(prompt, reply):
    return "good"


def short(prompt, reply):
    return 1.0 - len(reply) / 400 if "boxed" not in reply else 1.2


def one_letter(prompt, reply):
    return reply.count("z") / max(1, len(reply)) + 0.01 * len(set(reply)) if "boxed" not in reply else 1.0


def hackable(prompt, reply):
    """A bonus for style outweighs the answer."""
    correct = float(sum(reply.encode("utf-8", "surrogatepass")) % 3 == 0)
    return Grade(correct + 1.5 * (sum(reply.encode("utf-8", "surrogatepass")) % 2), {"correct": correct})


def question_alone(prompt, reply):
    return len(prompt.messages[-1]["content"]) % 3 / 2


def astronomical(prompt, reply):
    return chance(prompt, reply) * (1e30 if prompt.answer == "9" else 1)


def poisoned(prompt, reply):
    return chance(prompt, reply) * (4000 if prompt.answer == "13" else 1)
'''
LOSSES = """
import torch
from lockstep.algorithms.losses import reinforce
from dataclasses import replace


def detached(inputs):
    output = reinforce(inputs)
    return replace(output, loss_T=output.loss_T * 0)


def huge(inputs):
    output = reinforce(inputs)
    return replace(output, loss_T=output.loss_T * 1e4)


def nan(inputs):
    output = reinforce(inputs)
    return replace(output, loss_T=output.loss_T * float("nan"))
"""
RECIPE = """
name: run
seed: 5
steps: 60
prompts_per_step: 4
samples_per_prompt: 4
runs_dir: {folder}/runs
model: {{path: {model}, dtype: fp32}}
task:
  kind: file
  data: {folder}/sums.jsonl
  heldout_rows: 8
  verifier: {{kind: python, path: "{folder}/graders.py:chance", workers: 1, seconds: 2}}
rollout: {{max_tokens: 24, slots: 16, stop: [e, a, t, "0", "1"]}}
optimizer: {{lr: 1.0e-3}}
eval: {{enabled: false}}
save: {{every: 60}}
"""
SFT = "sft={data: {source: {folder}/rows.jsonl}, validation_rows: 4, sequences_per_step: 4}"

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case."""

    name: str
    bad: bool
    found: str
    """The rule or error that named it, "" for none."""
    step: int
    stopped: bool
    remedied: bool
    others: tuple[str, ...]
    """Rules that spoke besides."""
    error: str
    seconds: float

    @property
    def right(self) -> bool:
        """A bad run is named in time with its remedy; a good one is not stopped."""
        if not self.bad:
            return not self.stopped
        return bool(self.found) and self.remedied and self.step <= WITHIN


class _Cut(Exception):
    """The run has made its steps."""


# --- ways to ruin a run -----------------------------------------------------------------------------------------------
def frozen(parts: Parts) -> Parts:
    """Take every optimizer step back."""
    make, trained = parts.learner.optimizer.step, list(parts.learner.trainable.values())

    def step(lr: float) -> Any:
        before = [one.detach().clone() for one in trained]
        result = make(lr)
        with torch.no_grad():
            for one, old in zip(trained, before, strict=True):
                one.copy_(old)
        return result

    parts.learner.optimizer.step = step  # type: ignore[method-assign]
    return parts


def stale(parts: Parts) -> Parts:
    """Let the engine accept new weights and keep the old ones."""
    take = parts.engine.load

    def load_once(weights: Any, version: int) -> None:
        if version < 2:
            take(weights, version)
        else:
            list(weights)
            parts.engine.version = version

    parts.engine.load = load_once  # type: ignore[method-assign]
    return parts


def flipped(parts: Parts) -> Parts:
    """Turn the sign of every advantage."""
    credit = parts.objective.credit

    def wrong(sequences: Any) -> Any:
        return [replace(one, advantages=tuple(-a for a in one.advantages)) for one in credit(sequences)]

    return replace(parts, objective=replace(parts.objective, credit=wrong))


def shuffled(parts: Parts) -> Parts:
    """Give each reply the advantage of the next one."""
    credit = parts.objective.credit

    def wrong(sequences: Any) -> Any:
        done = credit(sequences)
        values = [next(iter(one.advantages), 0.0) for one in done]
        return [replace(one, advantages=(values[i - 1],) * len(one.advantages)) for i, one in enumerate(done)]

    return replace(parts, objective=replace(parts.objective, credit=wrong))


def own_reference(parts: Parts) -> Parts:
    """Compare the policy with itself."""
    parts.learner._reference = parts.learner.model
    return parts


def lying_engine(parts: Parts) -> Parts:
    """Report log-probabilities that are half a nat off."""
    finish = parts.engine.completed

    def completed(*args: Any) -> Iterator[Any]:
        for one in finish(*args):
            yield replace(one, logprobs=tuple(value - 0.5 for value in one.logprobs))

    parts.engine.completed = completed  # type: ignore[method-assign]
    return parts


def hung_engine(parts: Parts) -> Parts:
    """Let the engine stand still in its third step."""
    finish, steps = parts.engine.completed, [0]

    def completed(*args: Any) -> Iterator[Any]:
        steps[0] += 1
        if steps[0] > 3:
            time.sleep(600)
        yield from finish(*args)

    parts.engine.completed = completed  # type: ignore[method-assign]
    return parts


def damaged(parts: Parts) -> Parts:
    """Write a NaN into a weight after the third update."""
    update, count = parts.learner.update, [0]

    def updated(batch: Any, loss: Any) -> Metrics:
        metrics = update(batch, loss)
        count[0] += 1
        if count[0] == 3:
            with torch.no_grad():
                next(iter(parts.learner.trainable.values())).view(-1)[0] = float("nan")
        return metrics

    parts.learner.update = updated  # type: ignore[method-assign]
    return parts


def kept_positive(parts: Parts) -> Parts:
    """Drop every negative advantage."""
    credit = parts.objective.credit

    def wrong(sequences: Any) -> Any:
        return [replace(one, advantages=tuple(0.0 * a for a in one.advantages)) for one in credit(sequences)]

    return replace(parts, objective=replace(parts.objective, credit=wrong))


def same_seeds(parts: Parts) -> Parts:
    """Sample every reply to a prompt with the seed of the first."""
    submit = parts.engine.submit

    def wrong(requests: Any) -> None:
        first: dict[Any, int] = {}
        submit([replace(one, seed=first.setdefault(one.prompt_ids, one.seed)) for one in requests])

    parts.engine.submit = wrong  # type: ignore[method-assign]
    return parts


def noisy_weights(parts: Parts) -> Parts:
    """Add noise to every trained tensor after each update."""
    make, trained = parts.learner.optimizer.step, list(parts.learner.trainable.values())

    def step(lr: float) -> Any:
        result, random = make(lr), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for one in trained:
                one.add_(torch.randn(one.shape, generator=random) * 0.1)
        return result

    parts.learner.optimizer.step = step  # type: ignore[method-assign]
    return parts


def full_disk(parts: Parts) -> Parts:
    """Let no file grow beyond 300 kB from now on, as on a disk that fills up."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    return parts


def not_a_number(parts: Parts) -> Parts:
    """Let every loss be NaN from the third batch on."""
    loss, count = parts.objective.loss, [0]

    def wrong(inputs: Any) -> Any:
        count[0] += 1
        output = loss(inputs)
        return replace(output, loss_T=output.loss_T * float("nan")) if count[0] > 2 else output

    return replace(parts, objective=replace(parts.objective, loss=wrong))


def leak(folder: Path) -> None:
    """Put the training questions into the held-out file."""
    (folder / "held.jsonl").write_text((folder / "sums.jsonl").read_text())


def wrong_answers(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row | {"answer": "about seven"}) + "\n" for row in rows)
    (folder / "sums.jsonl").write_text(text)


def without_prompts(folder: Path) -> None:
    """Leave out the settings that a supervised run has not."""
    path = folder / "recipe.yaml"
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines() if "_per_" not in line))


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model" / "chat_template.jinja").write_text(text) and None


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
    Case("entropy collapse", (grader("one_letter"), "optimizer.lr=0.03", "samples_per_prompt=8"), ("entropy_collapse", "leap", "reward_flat"), ("optimizer.lr",)),
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
)  # fmt: skip
UNSEEN: tuple[Case, ...] = (
    Case("every reply to a prompt is the same", (), ("flat_start", "zero_variance", "reward_flat"), ("seed", "temperature"), same_seeds),
    Case("grader that looks at the question alone", (grader("question_alone"),), ("flat_start", "zero_variance", "rewards garbage"), ("look at the reply", "look at the answer")),
    Case("a reward of 1e30 at times", (grader("astronomical"), "prompts_per_step=8", "algorithm.advantage.divide_by_std=false"), ("cause: advantage", "clipping"), ("most by row", "grader")),
    Case("noise on the weights", (), ("leap", "entropy_explosion", "mismatch"), ("lower optimizer.lr", "checkpoint"), noisy_weights),
    Case("weight decay of 1000", ("optimizer.weight_decay=1000", "optimizer.lr=0.0005"), ("leap", "entropy_explosion", "entropy_collapse"), ("weight_decay", "lower optimizer.lr")),
    Case("KL coefficient of 1000", ("algorithm.kl.coef=1000",), ("kl_reference", "clipping", "spike", "unmoved"), ("algorithm.kl", "optimizer.max_grad_norm")),
    Case("temperature of 0.02", ("rollout.temperature=0.02",), ("flat_start", "zero_variance", "entropy_collapse", "ratio_tail", "mismatch"), ("temperature",)),
    Case("clip norm of 1e-6", ("optimizer.max_grad_norm=1e-6",), ("clipping", "unmoved"), ("max_grad_norm",)),
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


# --- running ------------------------------------------------------------------------------------------------------------
def write_files(folder: Path) -> list[str]:
    """Write model, data, graders and recipe into `folder`; returns what `load` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir()
    write_tiny_model(folder / "model")
    rows = [
        {"prompt": f"State the final answer: {a} + {b} =", "answer": str(a + b)} for a in range(12) for b in range(8)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = [
        {"prompt": f"What is {a} plus {b}?", "answer": f"the answer is {a + b}"} for a in range(8) for b in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    (folder / "graders.py").write_text(GRADERS)
    (folder / "losses.py").write_text(LOSSES)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, model=folder / "model"))
    return [str(folder / "recipe.yaml")]


@contextlib.contextmanager
def spoiled(case: Case) -> Iterator[None]:
    """Train with the parts of the case, and cut the run after its steps."""
    build, finish = start.place_parts, Session.finish

    def built(*args: Any) -> Parts:
        return case.spoil(build(*args))

    def cut(self: Session, step: int, metrics: Metrics) -> None:
        finish(self, step, metrics)
        if step + 1 >= STEPS:
            raise _Cut

    start.place_parts, Session.finish = built, cut  # type: ignore[method-assign]
    try:
        yield
    finally:
        start.place_parts, Session.finish = build, finish  # type: ignore[method-assign]


def train(case: Case, folder: Path) -> str:
    """Train the case in `folder`; returns the error that ended it, "" for none."""
    words = write_files(folder)
    case.prepare(folder)
    try:
        with spoiled(case):
            recipe = load(
                [
                    *words,
                    *(one.replace("{folder}", str(folder)) for one in case.settings),
                ]
            )
            start.start_run(recipe)
    except _Cut:
        return ""
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def outcome(case: Case, folder: Path) -> Outcome:
    """Run a case and read its record."""
    began, error = time.perf_counter(), ""
    if case.apart:
        command = [sys.executable, "-m", "benchmarks.sabotage", "--apart", case.name, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        _, told, found = done.stdout.rpartition("OUTCOME ")
        error = found.strip() if told else done.stderr
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            error = train(case, folder)
    messages: list[tuple[int, str]] = []
    path, last = folder / "runs" / "run", 0
    others = []
    if (path / "manifest.json").exists():
        run = RunDirectory.open(path)
        last = max((row.step for row in read_metrics(run)), default=0)
        for event in read_events(run):
            if event.kind in ("health", "warning", "spike"):
                rule = str(event.facts.get("rule", event.kind))
                others.append(rule)
                messages.append((event.step or 0, f"{rule}: {event.message} {_advice(rule)}"))
    if error:
        messages.append((last + 1 if "step" not in error else last, error))
    hits = [(step, text) for step, text in messages if any(word in text for word in case.named)]
    step, text = hits[0] if hits else (0, "")
    found = next((word for word in case.named if word in text), "")
    together = " ".join(text for at, text in hits if at <= WITHIN)
    stopped = bool(error)
    return Outcome(
        case.name, bool(case.named), found, step, stopped, any(word in together for word in case.remedy), tuple(dict.fromkeys(others)),
        error[:600].replace(str(folder), "FOLDER"), time.perf_counter() - began,
    )  # fmt: skip


def _advice(rule: str) -> str:
    from lockstep.config.metric import built_in_rules

    return built_in_rules()[rule].advice if rule in built_in_rules() else ""


def chosen(names: Sequence[str]) -> list[Case]:
    return [case for case in (*BAD, *UNSEEN, *GOOD) if not names or case.name in names]


def table(outcomes: Sequence[Outcome]) -> str:
    """Write the page."""
    new = {case.name for case in UNSEEN}
    unseen = [one for one in outcomes if one.name in new]
    bad = [one for one in outcomes if one.bad and one.name not in new]
    good = [one for one in outcomes if not one.bad]
    caught, stopped = sum(one.right for one in bad), sum(not one.right for one in good)
    lines = [
        "# Ruined runs, and what notices them",
        "",
        "Generated by `python -m benchmarks.sabotage`: each run is real, on a CPU, with a model of 115,008 random weights.",
        "Each row is the latest reading of its run (benchmarks/results/sabotage.jsonl). Rules and cases of the first table were made together:",
        "it shows what the rules cover. Those of the second were written before their results were known, and no rule was changed for them.",
        f"A ruined run must be stopped or named within {WITHIN} steps, with the right remedy; a good one must not be stopped.",
        "",
        f"**{caught} of {len(bad)} ruined runs ({caught / max(1, len(bad)):.0%}) are stopped or named; {stopped} of {len(good)} good "
        "runs are stopped.**",
        f"**Of {len(unseen)} ruined runs that no rule was made for, {sum(one.right for one in unseen)} are.**",
        "",
        "| ruined by | named by | at step | ends the run | right remedy | others that spoke |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(one) for one in bad]
    lines += [
        "",
        "| ruined by, no rule made for it | named by | at step | ends the run | right remedy | others that spoke |",
    ]
    lines += ["|---|---|---|---|---|---|", *(_row(one) for one in unseen)]
    lines += ["", "Step 0: before the first step.", "", "| good run | stopped | warned of |", "|---|---|---|"]
    for one in good:
        others = ", ".join(other for other in one.others if other != "warning")
        lines.append(f"| {one.name} | {'**yes**' if one.stopped else 'no'} | {others or '–'} |")
    return "\n".join(lines) + "\n"


def _row(one: Outcome) -> str:
    found = one.found or "**nothing**"
    others = ", ".join(other for other in one.others if other != one.found and other not in ("warning",))
    end, remedy = ("yes" if one.stopped else "no"), ("yes" if one.remedied else "no")
    return f"| {one.name} | {found} | {one.step} | {end} | {remedy} | {others or '–'} |"


def latest() -> list[Outcome]:
    """Return the latest result of each case that has one, in the order of the cases."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    kept = {row["name"]: Outcome(**{**row, "others": tuple(row["others"])}) for row in rows}
    return [kept[case.name] for case in (*BAD, *UNSEEN, *GOOD) if case.name in kept]


def main(words: Sequence[str]) -> int:
    if words[:1] == ["--apart"]:
        (case,) = chosen([words[1]])
        print("OUTCOME " + train(case, Path(words[2])))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(chosen(words)):
            found = outcome(case, Path(folder) / str(number))
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")
            mark = "ok " if found.right else "BAD"
            print(
                f"{mark} {case.name}: {found.found or '–'} at step {found.step}, stopped {found.stopped}, remedy {found.remedied}, "
                f"also {', '.join(found.others) or '–'} ({found.seconds:.1f} s)",
                flush=True,
            )
            if not found.right:
                print(f"    {found.error}", flush=True)
    PAGE.write_text(table(latest()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
