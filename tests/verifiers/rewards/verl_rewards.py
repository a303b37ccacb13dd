"""Reward functions as verl's documentation and reward_score folder write them."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """One function for several data sources."""
    if data_source == "openai/gsm8k":
        return gsm8k(solution_str, ground_truth)
    if data_source == "math_dapo":
        return math_dapo(solution_str, ground_truth)
    raise NotImplementedError(f"Reward function is not implemented for {data_source=}")


def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    if not found:
        return 0
    return score if found[-1].replace(",", "") == ground_truth else format_score


def math_dapo(solution_str, ground_truth):
    match = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", solution_str)
    pred = match[-1] if match else "[INVALID]"
    correct = pred == ground_truth
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def any_of(data_source, solution_str, ground_truth, extra_info=None, partial=0.0):
    """The ground truth is a list, the index is in extra_info, `partial` comes from reward_kwargs."""
    hit = solution_str.strip() in ground_truth["target"]
    return {
        "score": 1.0 if hit else partial,
        "index": extra_info["index"],
        "note": "text",
        "turns": extra_info["num_turns"],
    }


async def by_model(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)


def as_list(data_source, solution_str, ground_truth, extra_info):
    return [solution_str == ground_truth, "details"]


def broken(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}


def nothing(data_source, solution_str, ground_truth, extra_info):
    return None


def hangs(data_source, solution_str, ground_truth, extra_info):
    while "hang" in solution_str:
        pass
    return 1.0
