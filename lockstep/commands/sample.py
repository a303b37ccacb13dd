"""`lockstep sample`: asks a run, a checkpoint or a model held-out questions, and shows each reply with its grade."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.commands.eval import add_target_arguments, one_target, positive
from lockstep.commands.rollouts import add_seen, counted, framing_note, word
from lockstep.track.text import block, one_line, reading_line

if TYPE_CHECKING:
    from lockstep.scoring.targets import Target
    from lockstep.types import ItemResult, Prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """One question and what became of it."""

    prompt: Prompt
    reply: ItemResult
    seen: str = ""
    """The prompt as the model saw it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `sample TARGET`."""
    parser = subparsers.add_parser("sample", help="print replies to held-out questions, with their grades")
    add_target_arguments(parser)
    parser.add_argument("-n", type=positive, default=10, metavar="N", help="how many questions (default 10)")
    add_seen(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="the most likely token at each place")
    how.add_argument(
        "--temperature", type=temperature, metavar="T", help="draw at this temperature (default: as the recipe trains)"
    )


def run(args: argparse.Namespace) -> int:
    """Sample and print. Raises LockstepError as `lockstep eval` does."""
    from lockstep.scoring.targets import find_target

    name, overrides = one_target(args, "sampled")
    target = find_target(name, args.recipe, overrides, args.step)
    warm = target.recipe.rollout.temperature if args.temperature is None else args.temperature
    heat = 0.0 if args.greedy else warm
    samples, head = draw(target, args.n, heat)
    shown = (show(sample, seen=args.seen) for sample in samples)
    print("\n\n".join(["\n".join([*(f"warning: {note}" for note in target.notes), head]), *shown]))
    replies = f"{len(samples)} replies: {counted([sample.reply.correct for sample in samples])}"
    print(f"\n{replies}" + ("" if args.seen else framing_note(target.recipe.chat)))
    return 0


def draw(target: Target, count: int, heat: float) -> tuple[list[Sample], str]:
    """Return one reply to each of the first `count` held-out questions, or the episode that it begins, as an evaluation does
    it: with the target's own weights, in its numerics. And a line that says which."""
    from dataclasses import replace

    from lockstep.config.schema import EvalMode
    from lockstep.evaluation.plan import eval_plan
    from lockstep.evaluation.runner import graded_replies, heldout_items, require_numerics
    from lockstep.run.evaluation import computing
    from lockstep.scoring.score import placed, saved_of
    from lockstep.scoring.targets import build_eval_session

    session = build_eval_session(target.recipe)
    numerics = target.recipe.numerics.label("eval", session.policy.numerics)
    plan = eval_plan(target.recipe, numerics, session.policy.context)
    prompts = heldout_items(session.task, replace(plan, items=count), "-n ")
    saved = saved_of(target, session)
    proof = placed(target, session, saved)
    mode = EvalMode(name="sample", temperature=heat)
    chat = session.policy.chat
    with computing(session.engine, numerics):
        require_numerics(session.engine, numerics)
        graded = graded_replies(session.engine, session.task, chat, prompts, mode, plan, proof)
    samples = [
        Sample(prompt, reply, chat.preview(prompt.messages, prompt.tools).partition("\n")[2])
        for prompt, (reply, _) in zip(prompts, graded, strict=True)
    ]
    note = f"{saved.note}\n" if saved is not None and saved.note else ""
    how = "greedy" if heat == 0 else f"T={heat:g}"
    return samples, f"{note}{target.label}: weights {proof.fingerprint} in {numerics}, {how}, {plan.role}"


def show(sample: Sample, *, seen: bool = False) -> str:
    """Return one sample as text; nothing in it can act on the terminal."""
    reply = sample.reply
    reward = "none" if reply.reward is None else f"{reply.reward:g}"
    end = ", cut off" if reply.truncated else ""
    lines = [
        f"── {one_line(sample.prompt.id, 60)} · {word(reply.correct)} · reward {reward}",
        f"   {reading_line(reply.extracted, reply.method, sample.prompt.answer)}, {reply.tokens} tokens{end}",
    ]
    lines += [f"   not scored: {one_line(reply.error, 200)}"] if reply.error else []
    turns = [block(message["role"], message["content"]) for message in sample.prompt.messages]
    if seen:
        turns = [block("prompt, as the model saw it", sample.seen)]
    return "\n".join([*lines, *turns, block("reply", reply.text)])


def temperature(text: str) -> float:
    """Return a finite number of at least 0, for argparse."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or above")
    return number
