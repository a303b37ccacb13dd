"""Estimates the time of a run before it starts: a few prompts go through the real model, grader and update on this device.

Seconds are stored in the cache by machine, model and the settings that they depend on. Replies are those of the first weights:
a run whose replies grow takes longer, up to the bound that is given beside the estimate.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor

from lockstep import __version__
from lockstep.build.build import build_task_of
from lockstep.build.parts import Parts
from lockstep.checkpoint.state import save_state
from lockstep.cluster.build import place_parts
from lockstep.config.schema import Recipe
from lockstep.device import choose_device, gpus, wait
from lockstep.errors import ConfigError
from lockstep.evaluation.plan import evaluation_steps, replies_in_all
from lockstep.loops.preflight import ready_items
from lockstep.loops.rollouts import sample_groups
from lockstep.loops.sampling import mixed, round_prompts
from lockstep.loops.sft_data import read_material, sft_batch, tokenised, validation_metrics, validation_steps
from lockstep.loops.update import improve
from lockstep.models.cache import cache_root
from lockstep.plan.disk import saves
from lockstep.run.logger import Clock
from lockstep.run.state import checkpoint_of
from lockstep.track.facts import cpu_facts
from lockstep.track.files import existing, write_atomic
from lockstep.types import Group, Prompt, Proof

BUDGET = 15.0
"""Seconds of sampling and training, about; fewer prompts than a step has are extrapolated."""
TOKENS = {"cpu": 64, "cuda": 512}
"""Longest reply that is sampled; longer ones are extrapolated."""
ITEMS = 8
"""Held-out items that are timed first; more if they fit the budget."""
UPDATES = 4
"""Updates of SFT that are timed: the first ones are slower."""
LARGEST = 2e9
"""Bytes of each file of a checkpoint that are written to see how long it takes; the time of more is extrapolated."""
ASIDE = {"name", "runs_dir", "steps", "epochs", "seed", "allow", "save", "track", "health", "warm_start"}
"""Settings that change no second of what is measured."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on one machine."""

    sample: float
    """Sampling and grading of a step."""
    update: float
    """Updates of a step, if every sample trains."""
    live: float
    """Share of the samples that train: those of groups with unequal rewards."""
    sync: float
    """Proof that the engine has the new weights, with a probe of log-probabilities, as at the first steps. SFT makes it before
    an evaluation or a checkpoint, not after every step.
    """
    probe: float
    """Seconds of the probe in it, which most steps of a long run do not make."""
    item: float
    """One reply of an evaluation."""
    validate: float
    """One validation loss of SFT."""
    save: float
    tokens: float
    """Mean length of a reply."""
    longest: float
    """Times as long as now replies may become."""

    @property
    def step(self) -> float:
        return self.sample + self.live * self.update + self._sync

    @property
    def most(self) -> float:
        """Seconds of a step whose replies are as long as they may be and all train."""
        return self.longest * (self.sample + self.update) + self._sync

    @property
    def _sync(self) -> float:
        return self.sync if self.sample else 0.0

    def run(self, recipe: Recipe, step: float) -> float:
        """Return the seconds of the whole run, with `step` seconds a step that probes."""
        seconds = recipe.steps * step + replies_in_all(recipe) * self.item + saves(recipe) * self.save
        if recipe.loop == "sft":
            validated = validation_steps(recipe)
            saved = range(recipe.save.every, recipe.steps, recipe.save.every)
            return (
                seconds
                + len({*evaluation_steps(recipe), *validated, *saved}) * self.sync
                + len(validated) * self.validate
            )
        every, first = recipe.sync.probe_every, max(0, min(recipe.steps, recipe.sync.probe_first - 1))
        probed = first + recipe.steps // every - first // every  # push 0 is before the first step
        return seconds - (recipe.steps - probed) * self.probe


def timing_lines(timing: Timing, recipe: Recipe) -> list[str]:
    """Say how long a step and the run take."""
    update = f"{timing.update:.2g} s if all samples train, as {timing.live:.0%} did"
    most = (
        ""
        if timing.most <= timing.step
        else f"; at most {_words(timing.run(recipe, timing.most))}, {timing.most:.3g} s a step"
    )
    return [
        f"a step takes about {timing.step:.3g} s here: sampling and grading {timing.sample:.2g} s with replies of "
        f"{timing.tokens:.0f} tokens, update {update}, proof {timing.sync:.2g} s",
        f"the run of {recipe.steps} steps, with evaluations ({timing.item:.2g} s a reply) and checkpoints ({timing.save:.2g} s): "
        f"about {_words(timing.run(recipe, timing.step))}{most}",
    ]


def stored_timing(recipe: Recipe) -> Timing | None:
    """Return what was measured of this recipe on this machine before."""
    try:
        return Timing(**json.loads(_path(recipe).read_text()))
    except (OSError, ValueError, TypeError, ConfigError):  # not there, of another version, or for a GPU not here
        return None


def measure_timing(recipe: Recipe) -> Timing:
    """Return the seconds of this recipe on this machine, measured now if they were not before. Raises the errors of a start."""
    if (known := stored_timing(recipe)) is not None:
        return known
    timing = _measured(recipe)
    path = _path(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(timing), indent=1))
    return timing


def _measured(recipe: Recipe) -> Timing:
    """Measure with the workers of the recipe, in a folder that stands for the run's."""
    task = build_task_of(recipe)
    every_other = recipe.sync.model_copy(update={"probe_first": 0, "probe_every": 2})
    quick = _shortened(recipe.model_copy(update={"sync": every_other}), recipe.rollout.max_tokens)
    held = ready_items(recipe, task)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-timing-"))
        parts = place_parts(quick, task, Path(folder), stack)
        parts.sync.push(parts.learner, parts.engine)
        validate = 0.0
        if recipe.loop == "sft":
            (update, validate), sample, groups = _sft_step(parts, recipe), 0.0, list[Group]()
        else:
            sample, update, groups = _rl_step(parts, quick)
        proofs: list[Proof] = []
        pushes = [_seconds(lambda: proofs.append(parts.sync.push(parts.learner, parts.engine))) for _ in range(2)]
        by_probe = sorted((proof.probe is not None, s) for proof, s in zip(proofs, pushes, strict=True))
        plain, sync = (seconds for _, seconds in by_probe)
        longer, tokens = _lengths(groups, recipe.rollout.max_tokens)
        return Timing(
            sample=sample * longer,
            update=update * longer,
            live=_live(groups) if groups and recipe.update.drop_zero_advantage else 1.0,
            sync=sync,
            probe=max(0.0, sync - plain),
            item=_item(parts, recipe, held) if held else 0.0,
            validate=validate,
            save=_save(parts, recipe),
            tokens=tokens,
            longest=recipe.rollout.max_tokens / tokens if tokens else 1.0,
        )


def _shortened(recipe: Recipe, longest: int) -> Recipe:
    """Return the recipe with replies that are sampled in seconds."""
    cap = min(longest, TOKENS[choose_device(recipe.device).type])
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_tokens": cap})})


def _lengths(groups: list[Group], longest: int) -> tuple[float, float]:
    """Return how many times longer the replies would have been without the cap, and their mean length then.

    A reply that was cut off counts as one of `longest` tokens.
    """
    replies = [one for group in groups for one in group.rollouts]
    if not replies:
        return 1.0, 0.0
    ended = [longest if one.finish == "length" else len(one.ids) for one in replies]
    return sum(ended) / max(1, sum(len(one.ids) for one in replies)), fmean(ended)


def _item(parts: Parts, recipe: Recipe, held: list[Prompt]) -> float:
    """Return the seconds of one reply among as many as the engine samples side by side."""
    longest = recipe.eval.max_tokens or recipe.rollout.max_tokens
    alone = _shortened(recipe.model_copy(update={"samples_per_prompt": 1}), longest)
    together, few = min(len(held), _slots(recipe)), min(len(held), ITEMS)
    _sampled(parts, alone, held[:few])  # allocates, compiles
    first, groups = _sampled(parts, alone, held[:few])
    count = max(few, min(together, int(BUDGET / first * few)))
    whole, groups = _sampled(parts, alone, held[:count]) if count > few else (first, groups)
    return _line(few, first, count, whole, together) / together * _lengths(groups, longest)[0]


def _line(few: int, first: float, count: int, seconds: float, together: int) -> float:
    """Return the seconds of `together` things where `few` took `first` and `count` took `seconds`: a straight line."""
    if count == few:
        return seconds * together / count
    return seconds + max(0.0, seconds - first) * (together - count) / (count - few)


def _rl_step(parts: Parts, recipe: Recipe) -> tuple[float, float, list[Group]]:
    """Return seconds of sampling and of updating a whole step, and the groups that were sampled.

    Times of n and 2n prompts are taken and continued in a straight line, up to what the engine samples side by side.
    """
    whole = recipe.model_copy(update={"update": recipe.update.model_copy(update={"drop_zero_advantage": False})})
    prompts = round_prompts(parts.task, recipe, 0, 0, (), 0)
    size = -(-recipe.samples_per_update // recipe.samples_per_prompt) if recipe.samples_per_update else 1
    least = min(len(prompts), size if size < len(prompts) else 1)

    def step(count: int) -> tuple[float, float, list[Group]]:
        sample, groups = _sampled(parts, recipe, prompts[:count])
        update = _seconds(lambda: improve(parts, whole, groups, 0))
        parts.sync.push(parts.learner, parts.engine)
        return sample, update, groups

    def timed(count: int) -> tuple[float, float, list[Group]]:
        if warm == 2:
            step(count)  # a GPU compiles kernels and records graphs for each number of rows
        return step(count)

    warm = 2 if choose_device(recipe.device).type == "cuda" else 1
    step(least)  # allocates, compiles, makes the optimizer's state
    together = min(len(prompts), max(least, _slots(recipe) // recipe.samples_per_prompt))
    few = count = least
    half = full = timed(least)
    while (fits := int(BUDGET / warm / (full[0] + full[1])) * count) > count < together:
        few, half = (fits // 2, timed(fits // 2)) if count < fits // 2 < together else (count, full)
        count = min(together, fits)
        full = timed(count)
    sample, update = (
        _line(few, a, count, b, together) * len(prompts) / together for a, b in zip(half[:2], full[:2], strict=True)
    )
    return sample, update, full[2]


def _slots(recipe: Recipe) -> int:
    """Return how many replies all engines together sample side by side."""
    return recipe.engines * recipe.slots(choose_device(recipe.device).type)


def _sft_step(parts: Parts, recipe: Recipe) -> tuple[float, float]:
    """Return the seconds of an update and of a validation."""
    assert recipe.sft is not None
    rows = tokenised(read_material(recipe), parts.policy.chat, recipe.sft, parts.policy.context)
    times: list[float] = []
    while len(times) < UPDATES and (len(times) < 2 or sum(times) < BUDGET):
        batch = sft_batch(parts, recipe, rows, len(times))
        times.append(_seconds(lambda batch=batch: parts.learner.update(batch, parts.objective.loss)))  # type: ignore[misc]
    validate = _seconds(lambda: validation_metrics(parts, rows)) if rows.validation else 0.0
    return median(times[1:]), validate


def _live(groups: list[Group]) -> float:
    """Estimate the share of groups with unequal rewards, which is neither 0 nor 1 by so few (Laplace's rule of succession)."""
    return (sum(map(mixed, groups)) + 1) / (len(groups) + 2)


def _sampled(parts: Parts, recipe: Recipe, prompts: list[Prompt]) -> tuple[float, list[Group]]:
    found: list[Group] = []
    seconds = _seconds(lambda: found.extend(sample_groups(parts, recipe, prompts, 0, Clock())))
    return seconds, found


def _save(parts: Parts, recipe: Recipe) -> float:
    proof = parts.sync.push(parts.learner, parts.engine)
    state, files = checkpoint_of(parts, recipe, 1, proof)
    part = replace(state, weights=_first(state.weights), optimizer=_first(state.optimizer))
    disk = existing(recipe.paths.disk(recipe.runs_dir))
    with tempfile.TemporaryDirectory(dir=disk, prefix=".lockstep-timing-") as folder:
        return _seconds(lambda: save_state(Path(folder), part, files)) * state.bytes / part.bytes


def _first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first of these tensors, up to LARGEST bytes of them, and at least one."""
    ends = accumulate(tensor.nbytes for tensor in tensors.values())
    return {
        name: tensors[name]
        for at, (name, end) in enumerate(zip(tensors, ends, strict=True))
        if end <= LARGEST or not at
    }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def _path(recipe: Recipe) -> Path:
    """Return where the seconds of this recipe on this machine are stored."""
    device = gpus()[0].name if choose_device(recipe.device).type == "cuda" else cpu_facts()
    versions = [__version__, torch.__version__]
    disk = existing(recipe.paths.disk(recipe.runs_dir)).stat().st_dev
    machine = [platform.node(), device, *versions, disk, recipe.threads or torch.get_num_threads()]
    settings = recipe.model_dump(mode="json", exclude=ASIDE)
    key = hashlib.sha256(json.dumps([machine, settings], sort_keys=True, default=str).encode()).hexdigest()[:16]
    return cache_root() / "timing" / f"{key}.json"


def _words(seconds: float) -> str:
    """Example: "3 min", "2:05:00 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{timedelta(seconds=round(seconds))} h"
