"""Rubrics as the documentation of verifiers 0.1 to 0.3 writes them: functions of completion, answer, parser, state, info."""

import asyncio
import time

import verifiers as vf

parser = vf.XMLParser(["think", "answer"], answer_field="answer")


def correct_answer(parser, completion, answer):
    return 1.0 if parser.parse_answer(completion) == answer else 0.0


async def short(completion, state, **kwargs):
    await asyncio.sleep(0.05)
    assert state["completion"][-1].content == completion[-1]["content"]
    return 1.0 if len(completion[-1]["content"]) < 60 else 0.0


def level(info, prompt):
    return info["level"] + (prompt[-1]["role"] == "user")


def longest(completions) -> list[float]:
    sizes = [len(completion[-1]["content"]) for completion in completions]
    return [float(size == max(sizes)) for size in sizes]


def breaks(completion, answer):
    return 1 / completion[-1]["content"].count(answer)


def gives_none(completion):
    return None


def hangs(completion):
    time.sleep(1000 if "hang" in completion[-1]["content"] else 0)
    return 1.0


rubric = vf.Rubric(funcs=[correct_answer, short, level], weights=[1.0, 0.5, 0.0], parser=parser)
group = vf.RubricGroup([vf.Rubric(funcs=[correct_answer], parser=parser), vf.Rubric(funcs=[longest], weights=[0.25])])
broken = vf.Rubric(funcs=[correct_answer, breaks], parser=parser)
empty = vf.Rubric(funcs=[gives_none])
slow = vf.Rubric(funcs=[hangs])


def load_environment(bonus: float = 0.0):
    environment = type("Environment", (), {})()
    environment.rubric = vf.Rubric(funcs=[correct_answer, short], weights=[1.0, bonus], parser=parser)
    return environment
