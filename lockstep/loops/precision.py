"""Reports the precision of each phase, and measures how closely learner and engine agree in it.

Between rollouts and evaluations the engine computes in the precision of the weights, and so does the learner for a proof of
sync: the proof compares like with like, so its tolerance can be tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.config.numerics import Phase
from lockstep.errors import DEFECT, EngineError
from lockstep.numerics.spec import parse
from lockstep.rollout.precision import computing
from lockstep.types import Forward

if TYPE_CHECKING:
    from lockstep.build.parts import Parts
    from lockstep.config.schema import Recipe


PROBE = 4
"""Number of prompts on which learner and engine are compared."""


def numerics_lines(parts: Parts, recipe: Recipe) -> list[str]:
    """Return start lines: the precision of each phase and the number of layers that it quantises. Empty for a run that
    quantises nothing.

    Raises EngineError if a phase would quantise no layer.
    """
    settings, weights = recipe.numerics, parts.policy.numerics
    phases: dict[Phase, str] = {"train": "training", "rollout": "rollouts", "eval": "evaluation"}
    if recipe.loop != "rl":
        del phases["rollout"]
    if not any(settings.of(phase) for phase in phases):
        return []
    excluded: tuple[str, ...] = ()
    lines = []
    for phase, name in phases.items():
        if phase == "train":
            count, excluded = parts.learner.prepare_numerics(settings.of(phase))
        else:
            with computing(parts.engine, Forward(settings.of(phase))):
                count = parts.engine.set_forward(parts.engine.forward).quantised_layers
        lines.append(f"numerics: {name} in {settings.label(phase, weights)}, {count} linear layers quantised")
    if excluded:
        lines.append(f"numerics: {len(excluded)} linear layers left alone: {_some(excluded)}")
    if recipe.adapter.kind != "none":
        lines.append("numerics: adapters see the input as it is and compute in the precision of the weights")
    if "rollout" in phases and settings.of("rollout") != settings.of("train"):
        lines.append("numerics: rollouts are off-policy, as they use another precision than training; see mismatch/*")
    lines.append(f"numerics: proofs of sync compare learner and engine in {weights}")
    return lines


def probe_lines(parts: Parts, recipe: Recipe) -> list[str]:
    """Return how far learner and engine differ in the rollouts' numerics, beside the effect of these numerics on the model;
    nothing for plain ones.

    Called after a proof of sync. Raises EngineError if quantisation changes no log-probability of the engine.
    """
    numeric = recipe.numerics.of("rollout")
    if not numeric:
        return []
    prompts = parts.task.batch(0, recipe.prompts_per_step)[:PROBE]
    sequences = [parts.policy.chat.render_prompt(prompt) for prompt in prompts]
    plain = parts.engine.score(sequences)
    with computing(parts.engine, Forward(numeric)):
        quantised = parts.engine.score(sequences)
    effect = _gap(plain, quantised)
    if not effect:
        raise EngineError(
            f"the engine reports that it computes in {numeric}, but its log-probabilities are those of unquantised layers",
            where="numerics.rollout",
            fix=DEFECT,
        )
    gap = _gap(parts.learner.logprobs(sequences, numeric), quantised)
    lines = [
        f"numerics: mean |Δlogp| over {len(sequences)} prompts in {numeric}: learner and engine {gap:.3g}; "
        f"from the model in {parts.policy.numerics} {effect:.3g}"
    ]
    if parse(numeric).activations:
        lines.append(
            "numerics: rounding to four bits turns last-bit differences into whole steps; see docs/numerics.md"
        )
    if gap > effect / 2:
        lines.append(
            "numerics: warning: learner and engine are as far apart as from the unquantised model; watch mismatch/*"
        )
    return lines


def _gap(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return mean |Δ log-probability|, nats."""
    gaps = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return math.fsum(gaps) / len(gaps)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
