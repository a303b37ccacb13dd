"""Reward functions as TRL's documentation and examples write them."""

import asyncio
import json
import re
from pathlib import Path

CALLS = Path(__file__).with_suffix(".calls.jsonl")


def think_format(completions, **kwargs):
    """Conversational: 1 for <think>…</think> and something after it."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>.+", content, re.DOTALL) else 0.0 for content in contents]


def correct(completions, ground_truth, **kwargs):
    """Conversational: the boxed answer equals the column `ground_truth`."""
    boxed = [re.search(r"\\boxed\{(.*?)\}", completion[0]["content"]) for completion in completions]
    contents = [match.group(1) if match else "" for match in boxed]
    return [1.0 if content == str(truth) else 0.0 for content, truth in zip(contents, ground_truth, strict=True)]


def unique_letters(completions, **kwargs):
    """Standard format: completions are text."""
    return [float(len(set(completion))) for completion in completions]


def short(completion_ids, **kwargs):
    return [-len(ids) / 10 for ids in completion_ids]


def math_only(prompts, completions, task, log_metric=None, **kwargs):
    """Multi-task: None for rows of another task."""
    if log_metric:
        log_metric("seen/math", sum(one == "math" for one in task))
    return [float("7" in c[0]["content"]) if one == "math" else None for c, one in zip(completions, task, strict=True)]


def ratio(completions, log_metric, **kwargs):
    """A share of nothing."""
    for value in (float("nan"), 2.0):
        log_metric("share", value)
    log_metric("undefined", float("inf"))
    return [1.0] * len(completions)


def coding_only(prompts, completions, task, log_extra=None, **kwargs):
    if log_extra:
        log_extra("length", [len(c[0]["content"]) for c in completions])
        log_extra("text", [c[0]["content"] for c in completions])
    return [
        float("def" in c[0]["content"]) if one == "code" else None for c, one in zip(completions, task, strict=True)
    ]


async def slow_judge(prompts, completions, **kwargs):
    """Asynchronous, one await for each completion."""

    async def score(prompt, completion):
        await asyncio.sleep(0.05)
        return float(len(completion[0]["content"]) < len(prompt[-1]["content"]))

    return await asyncio.gather(*(score(p, c) for p, c in zip(prompts, completions, strict=True)))


def own_loop(completions, **kwargs):
    """A plain function that runs async code itself."""

    async def score(completion):
        await asyncio.sleep(0)
        return float(len(completion[0]["content"]))

    return [asyncio.run(score(completion)) for completion in completions]


def longest_of_group(completions, **kwargs):
    """Compares the samples of a call."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def echo(prompts, completions, completion_ids, **kwargs):
    """Writes down what it was called with."""
    kwargs.pop("log_metric"), kwargs.pop("log_extra")
    with CALLS.open("a") as file:
        file.write(json.dumps([prompts, completions, completion_ids, kwargs]) + "\n")
    return [0.5 for _ in completions]


def too_few(completions, **kwargs):
    return [1.0]


def texts(completions, **kwargs):
    return ["1" for _ in completions]


def nan(completions, **kwargs):
    return [float("nan") for _ in completions]


def with_state(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step) for _ in completions]


def without_kwargs(completions):
    return [1.0 for _ in completions]


def hangs(completions, **kwargs):
    while any("hang" in completion[0]["content"] for completion in completions):
        pass
    return [1.0 for _ in completions]


def never(completions, **kwargs):
    return [None for _ in completions]
