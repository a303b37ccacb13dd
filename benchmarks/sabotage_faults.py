"""Faults that benchmarks.sabotage plants: functions that change the parts of a run, or its files before it starts."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.build.parts import Parts
from lockstep.types import Metrics


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
