"""Evaluates the gates of a run: pass criteria that its recipe declares before training, checked at declared steps."""

from __future__ import annotations

from lockstep.config.evaluate import Gate
from lockstep.config.schema import Recipe
from lockstep.evaluation.compare import compare
from lockstep.evaluation.intervals import ALPHA
from lockstep.evaluation.plan import gate_words
from lockstep.evaluation.records import read_score, score_path
from lockstep.track.rundir import RunDirectory


def judged_line(recipe: Recipe, run: RunDirectory, step: int) -> str:
    """Say which gates hold at a step that is judged. Raises EvaluationError for a damaged score."""
    found = [_judge(recipe, run, step, gate) for gate in recipe.eval.gates]
    verdict = "passed" if all(holds for holds, _ in found) else "not passed"
    return f"judged at step {step}, as said beforehand: {verdict}; " + "; ".join(text for _, text in found)


def verdict_lines(recipe: Recipe, run: RunDirectory) -> list[str]:
    """Return the outcome at every step judged so far, and the verdict on the run; nothing if it is not judged."""
    steps, gates = recipe.eval.judged.steps, recipe.eval.gates
    done = [step for step in steps if all(score_path(run.path, step, gate.score).is_file() for gate in gates)]
    if not steps:
        return []
    passed = [step for step in done if all(_judge(recipe, run, step, gate)[0] for gate in gates)]
    missing = f", {len(steps) - len(done)} not reached" if len(done) < len(steps) else ""
    verdict = f"success at step {', '.join(map(str, passed))}" if passed else "no success"
    return [
        *(judged_line(recipe, run, step) for step in done),
        f"verdict by what was said beforehand ({len(steps)} steps{missing}): {verdict}",
    ]


def _judge(recipe: Recipe, run: RunDirectory, step: int, gate: Gate) -> tuple[bool, str]:
    """Return whether a gate holds, and the evidence."""
    words = gate_words(gate)
    after = read_score(score_path(run.path, step, gate.score))
    if gate.rule == "reaches":
        holds = after.accuracy >= gate.limit
        return holds, f"{words}: {'yes' if holds else 'no'}, {after.accuracy:.1%}"
    found = compare(read_score(score_path(run.path, 0, gate.score)), after)
    alpha = ALPHA / len(recipe.eval.judged.steps)
    clear = found.p < alpha
    rises = clear and found.difference > 0 and found.difference >= gate.limit
    holds = rises if gate.rule == "improves" else not (clear and found.difference < 0)
    return (
        holds,
        f"{words}: {'yes' if holds else 'no'}, {100 * found.difference:+.1f} points, p {found.p:.2g} of {alpha:.2g}",
    )
