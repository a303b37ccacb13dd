"""`lockstep sample`: held-out questions, the replies of a run, a checkpoint or a model, and how each is graded."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.commands.eval import add_target_arguments, positive, split_arguments
from lockstep.errors import ConfigError, EvaluationError, TaskError
from lockstep.track.text import one_line, visible

if TYPE_CHECKING:
    from lockstep.loops.target import Target
    from lockstep.types import Grade, Prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """One question and what became of it."""

    prompt: Prompt
    text: str
    tokens: int
    ended: bool
    """False: cut off at the token budget."""
    grade: Grade


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `sample TARGET`."""
    parser = subparsers.add_parser("sample", help="print replies to held-out questions, with their grades")
    add_target_arguments(parser)
    parser.add_argument("-n", type=positive, default=10, metavar="N", help="how many questions (default 10)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="the most likely token at each place")
    how.add_argument(
        "--temperature", type=temperature, metavar="T", help="draw at this temperature (default: as the recipe trains)"
    )


def run(args: argparse.Namespace) -> int:
    """Sample and print. Raises LockstepError as `lockstep eval` does."""
    from lockstep.loops.target import find_target

    names, overrides = split_arguments(args)
    if len(names) > 1:
        raise ConfigError([f"{names[1]}: one target at a time"], fix="give overrides as section.setting=value")
    target = find_target(names[0], args.recipe, overrides, args.step)
    warm = target.recipe.rollout.temperature if args.temperature is None else args.temperature
    heat = 0.0 if args.greedy else warm
    samples, head = draw(target, args.n, heat)
    print("\n\n".join(["\n".join([*(f"warning: {note}" for note in target.notes), head]), *map(show, samples)]))
    print("\n" + summary(samples))
    return 0


def draw(target: Target, count: int, heat: float) -> tuple[list[Sample], str]:
    """One reply to each of the first `count` held-out questions, drawn as an evaluation draws them, and a line on the weights."""
    from dataclasses import replace

    from lockstep.config.schema import EvalMode
    from lockstep.evaluate.plan import eval_plan
    from lockstep.evaluate.runner import collect, eval_requests, heldout_items, request_id
    from lockstep.loops.target import build_rig
    from lockstep.types import FinishReason
    from lockstep.verifiers.beside import Grading

    rig = build_rig(target.recipe)
    plan = eval_plan(target.recipe, rig.policy.numerics, rig.policy.context)
    try:
        prompts = heldout_items(rig.task, replace(plan, items=count))
    except (TaskError, EvaluationError) as error:  # they speak of an evaluation's setting
        raise type(error)(error.what, where=error.where, fix=error.fix.replace("eval.items=", "-n ")) from error
    proof = rig.prove_saved(rig.read(target.checkpoint)) if target.checkpoint else rig.prove()
    mode = EvalMode(name="sample", temperature=heat)
    rig.engine.submit(eval_requests(prompts, rig.policy.chat, mode, plan, proof.version))
    samples = []
    with Grading(rig.task) as grading:
        found = collect(rig.engine, rig.policy.chat, prompts, 1, proof, grading)
        for prompt in prompts:
            done = found[request_id(prompt, 0)]
            text, ended = rig.policy.chat.decode(done.ids), done.finish is FinishReason.STOP
            samples.append(Sample(prompt, text, len(done.ids), ended, grading.grade(done.request.id)))
    how = "greedy" if heat == 0 else f"T={heat:g}"
    return samples, f"{target.label}: weights {proof.fingerprint} in {rig.policy.numerics}, {how}, {plan.role}"


def show(sample: Sample) -> str:
    """One sample as text; nothing in it can act on the terminal."""
    grade, answer = sample.grade, one_line(sample.prompt.answer, 80)
    reward = "none" if grade.reward is None else f"{grade.reward:g}"
    found = "nothing" if grade.extracted is None else repr(one_line(grade.extracted, 80))
    how = f" by {one_line(grade.method, 40)}" if grade.method else ""
    end = "" if sample.ended else ", cut off"
    lines = [
        f"── {one_line(sample.prompt.id, 60)} · {word(sample)} · reward {reward}",
        f"   extracted {found}{how}, answer {answer!r}, {sample.tokens} tokens{end}",
    ]
    lines += [f"   not scored: {one_line(grade.error, 200)}"] if grade.error else []
    turns = [_block(message["role"], message["content"]) for message in sample.prompt.messages]
    return "\n".join([*lines, *turns, _block("reply", sample.text)])


def word(sample: Sample) -> str:
    """right, wrong or unscored, as an evaluation counts it."""
    from lockstep.evaluate.runner import is_correct

    return {True: "right", False: "wrong", None: "unscored"}[is_correct(sample.grade)]


def summary(samples: list[Sample]) -> str:
    """How many there are of each kind."""
    words = [word(sample) for sample in samples]
    return f"{len(samples)} replies: " + ", ".join(
        f"{words.count(kind)} {kind}" for kind in ("right", "wrong", "unscored")
    )


def temperature(text: str) -> float:
    """A finite number of at least 0, for argparse."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or above")
    return number


def _block(title: str, content: str) -> str:
    return f"   {one_line(title, 20)}:\n" + textwrap.indent(visible(content), "     │ ", lambda line: True)
