"""Test that a verifier accepts the right answer and only that: before a run and during it, with real prompts."""

from __future__ import annotations

from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import Verifier, shown
from lockstep.verifiers.composite import Composite
from lockstep.verifiers.judge import Judge
from lockstep.verifiers.mutations import right_reply, wrong_replies
from lockstep.verifiers.python import UserFunction

GARBAGE = ("qwerty uiop", "\\boxed{@#!}", "\\boxed{")


def self_test(
    verifier: Verifier, prompt: Prompt, *, pays: bool = True, garbage: bool = True, mutations: bool = False
) -> list[str]:
    """The problems found with this prompt: a right reply must score 1; an empty one and `garbage` 0; wrong
    answers made from the reference (`mutations`) 0.

    With `pays=False` the probes only have to be scored: a grader of one's own may score as it likes.
    Example of a problem: "chain_sum/3f9a…: the reference '4 + 3' in a box scores 0.0, not 1"
    """
    probes: list[tuple[str, str, float]] = []
    if (right := right_reply(verifier, prompt)) is not None:
        where = "in a box" if "\\boxed" in right else "as it is to be written"
        probes.append((f"the reference {shown(prompt.answer)!r} {where}", right, 1.0))
    if garbage:
        probes.append(("an empty reply", "", 0.0))
        probes += [(f"the garbage {text!r}", text, 0.0) for text in GARBAGE]
    if mutations:
        probes += [(f"the wrong reply {shown(text)!r}", text, 0.0) for text in wrong_replies(verifier, prompt)]
    problems = []
    for name, reply, due in probes:
        grade = verifier.grade(prompt, reply)
        label = f"{shown(prompt.id)}: {name}"
        score = _score(verifier, grade)
        if score is None:
            problems.append(f"{label} cannot be scored: {grade.error}")
        elif pays and score != due:
            problems.append(f"{label} scores {score:g}, not {due:g}")
    return problems


def oddities(verifier: Verifier, prompt: Prompt) -> list[str]:
    """What a user should know of a grader of their own: one that scores an empty reply or garbage as high as the
    reference, or the same reply not the same twice."""
    if not isinstance(verifier, UserFunction):
        return []
    right = right_reply(verifier, prompt) or ""
    due, again = (verifier.grade(prompt, right).reward for _ in range(2))
    found = []
    if due != again:
        found.append(f"{shown(prompt.id)}: the boxed reference scores {due}, and {again} when it is graded again")
    for reply in ("", *GARBAGE):
        score = verifier.grade(prompt, reply).reward
        if score is not None and due is not None and score >= due:
            name = f"the reply {reply!r}" if reply else "an empty reply"
            found.append(f"{shown(prompt.id)}: {name} scores {score:g}, as the boxed reference or more ({due:g})")
    return found


def _score(verifier: Verifier, grade: Grade) -> float | None:
    """The reward; of a judge or a weighted composition, whether it counts as right: more may be asked for than the answer."""
    if grade.reward is not None and isinstance(verifier, Judge):
        return grade.metrics["correct"]
    if grade.reward is None or not isinstance(verifier, Composite):
        return grade.reward
    if verifier.combine == "all":
        return grade.metrics[f"part_{verifier.parts[0].name}"]
    return grade.metrics["correct"]
