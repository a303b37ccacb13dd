"""Tests that a verifier accepts the right answer and no wrong one: before a run and during it, with the task's prompts."""

from __future__ import annotations

import math

from lockstep.types import Grade, Prompt, ReplyText
from lockstep.verifiers.base import Verifier, grade_replies, reads_of, shown
from lockstep.verifiers.composite import Composite
from lockstep.verifiers.judge import Judge
from lockstep.verifiers.mutations import right_reply, wrong_replies
from lockstep.verifiers.python import UserFunction, UserGrader
from lockstep.verifiers.trl import NONE_APPLIES

FORMS = ("#### {}", "Answer: {}", "<answer>{}</answer>", "<think>\nso\n</think>\n\\boxed{{{}}}", "{}")
"""Forms of a right reply that examples of TRL and verl read, besides the boxed answer."""
NEARLY = 0.95
"""Share of the reference's reward from which garbage counts as rewarded alike."""
GARBAGE = ("qwerty uiop", "\\boxed{@#!}", "\\boxed{")


def self_test(
    verifier: Verifier, prompt: Prompt, *, exact: bool | None = None, garbage: bool = True, mutations: bool = False
) -> list[str]:
    """Return the problems found with this prompt: a right reply must score 1; an empty one and `garbage` 0; wrong
    answers made from the reference (`mutations`) 0.

    With `exact=False`, the default for a grader of the user's, which may give any reward, the replies only have to be scored.
    Example of a problem: "chain_sum/3f9a…: the reference '4 + 3' in a box scores 0.0, not 1"
    """
    exact = not isinstance(verifier, UserGrader) if exact is None else exact
    trials: list[tuple[str, str, float]] = []
    if (right := right_reply(verifier, prompt)) is not None:
        where = "in a box" if "\\boxed" in right else "as it is to be written"
        trials.append((f"the reference {shown(prompt.answer)!r} {where}", right, 1.0))
    if garbage:
        trials.append(("an empty reply", "", 0.0))
        trials += [(f"the garbage {text!r}", text, 0.0) for text in GARBAGE]
    if mutations:
        trials += [(f"the wrong reply {shown(text)!r}", text, 0.0) for text in wrong_replies(verifier, prompt)]
    problems = []
    for name, reply, due in trials:
        grade = verifier.grade(prompt, reply)
        label = f"{shown(prompt.id)}: {name}"
        score = _score(verifier, grade)
        if score is None and applies(grade):
            problems.append(f"{label} cannot be scored: {grade.error}")
        elif exact and score != due:
            problems.append(f"{label} scores {score:g}, not {due:g}")
    return problems or _group_problems(verifier, prompt, [reply for _, reply, _ in trials])


def _group_problems(verifier: Verifier, prompt: Prompt, replies: list[str]) -> list[str]:
    """Return the fault of a grader of whole groups that scores single replies, but not several in one call."""
    if reads_of(verifier) != "group":
        return []
    grades = grade_replies(verifier, prompt, [ReplyText.probe(reply) for reply in replies])
    failed = [grade.error for grade in grades if grade.reward is None and applies(grade)]
    where = f"{shown(prompt.id)}: {len(replies)} replies in one call"
    return [f"{where} cannot be scored: {failed[0]}"] if failed else []


def applies(grade: Grade) -> bool:
    """Return whether a grader has anything to say of a reply: reward functions of TRL may return None instead."""
    return grade.error != NONE_APPLIES


def oddities(verifier: Verifier, prompt: Prompt) -> list[str]:
    """Return what a user should know of their own grader: it scores an empty reply or garbage as high as the reference, or
    the same reply not the same twice."""
    if not isinstance(verifier, UserGrader):
        return []
    name = "the reference in its best form"
    scores = _reference_scores(verifier, prompt)
    due, right = max(scores, key=lambda pair: -math.inf if pair[0] is None else pair[0])
    again = verifier.grade(prompt, right).reward
    found = []
    if due != again:
        found.append(f"{shown(prompt.id)}: {name} scores {due}, and {again} when it is graded again")
    for reply in ("", *GARBAGE):
        score = verifier.grade(prompt, reply).reward
        if score is not None and due is not None and score >= due:
            what = f"the reply {reply!r}" if reply else "an empty reply"
            found.append(f"{shown(prompt.id)}: {what} scores {score:g}, as {name} or more ({due:g})")
    return found


def _reference_scores(verifier: Verifier, prompt: Prompt) -> list[tuple[float | None, str]]:
    """Return the rewards of replies with the reference, boxed and in other forms: a user's function may read one form alone."""
    forms = [right_reply(verifier, prompt) or "", *(form.format(prompt.answer) for form in FORMS)]
    return [(verifier.grade(prompt, form).reward, form) for form in forms]


def scored_garbage(verifier: Verifier, prompt: Prompt) -> str:
    """Return the evidence that a user's grader rewards every garbage reply about as much as the reference, else ""."""
    if not isinstance(verifier, UserFunction):  # the others must score 0: see self_test
        return ""
    known = [score for score, _ in _reference_scores(verifier, prompt) if score is not None]
    due = max(known, default=0.0)
    scores = [verifier.grade(prompt, reply).reward for reply in GARBAGE]
    if due <= 0 or any(score is None or score <= 0 or score < NEARLY * due for score in scores):
        return ""
    return f"{shown(prompt.id)}: {', '.join(map(repr, GARBAGE))} score {scores}, the reference {due:g}"


def _score(verifier: Verifier, grade: Grade) -> float | None:
    """Return the reward; for a judge or a weighted composite, whether it counts as right: they ask for more than the answer."""
    if grade.reward is not None and isinstance(verifier, Judge):
        return grade.metrics["correct"]
    if grade.reward is None or not isinstance(verifier, Composite):
        return grade.reward
    if verifier.combine == "all":
        return grade.metrics[f"part_{verifier.parts[0].name}"]
    return grade.metrics["correct"]
