"""Does a verifier pay for the right answer and only for that? Asked before a run, of real prompts."""

from __future__ import annotations

from lockstep.types import Prompt
from lockstep.verifiers.base import Verifier, shown

GARBAGE = ("qwerty uiop", "\\boxed{@#!}", "\\boxed{")


def self_test(verifier: Verifier, prompt: Prompt, *, pays: bool = True) -> list[str]:
    """The problems found with this prompt: the boxed reference must pay 1, an empty reply and garbage 0.

    With `pays=False` the probes only have to be scored: a grader of one's own may pay as it likes.
    Example of a problem: "chain_sum/3f9a…: the reference '4 + 3' in a box pays 0.0, not 1"
    """
    boxed = f"The answer is \\boxed{{{prompt.answer}}}."
    probes = [(f"the reference {shown(prompt.answer)!r} in a box", boxed, 1.0), ("an empty reply", "", 0.0)]
    probes += [(f"the garbage {text!r}", text, 0.0) for text in GARBAGE]
    problems = []
    for name, reply, due in probes:
        grade = verifier.grade(prompt, reply)
        label = f"{shown(prompt.id)}: {name}"
        if grade.reward is None:
            problems.append(f"{label} cannot be scored: {grade.error}")
        elif pays and grade.reward != due:
            problems.append(f"{label} pays {grade.reward:g}, not {due:g}")
    return problems
