"""Columns and answer formats of known data sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from lockstep.config.data import Among, Data, Distinct, Extract, Filter, PresetName


@dataclass(frozen=True, slots=True)
class Preset:
    """Known facts of a data set. Sizes and columns are those of its hub page."""

    name: PresetName
    source: str
    """Hub id."""
    about: str
    prompt: str
    answer: str
    response: str
    """Column with the worked solution, which SFT learns."""
    subset: str | None = None
    split: str = "train"
    extract: Extract = "text"
    id: str | None = None
    before: str = ""
    """Removed from the start of each question: instructions on the form of the reply, which a recipe gives itself."""
    after: str = ""
    """Removed from its end."""
    filters: tuple[Filter, ...] = field(default=())
    """Run before those of the recipe."""
    max_rows: int | None = None
    """Rows taken after the filters, if the recipe does not say."""
    also: tuple[str, ...] = ()
    """Other hub ids with the same columns."""
    by_name: bool = False
    """A choice of another preset's rows: its hub id alone does not mean it."""


_VERL: Mapping[str, Any] = {
    "prompt": "prompt",
    "answer": "reward_model.ground_truth",
    "response": "reward_model.ground_truth",
    "before": "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    "after": '\n\nRemember to put your answer on its own line after "Answer:".',
    "filters": (Distinct(name="repeats"),),
}
"""Columns of verl's data sets; each question has many copies."""

PRESETS: dict[PresetName, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "dapo-math-17k",
            "BytedTsinghua-SIA/DAPO-Math-17k",
            "competition problems with integer answers; the file has each about 100 times, of which one is kept",
            **_VERL,
        ),
        Preset(
            "aime-2024",
            "BytedTsinghua-SIA/AIME-2024",
            "the 30 problems of AIME 2024; the file has each 32 times, of which one is kept",
            **_VERL,
        ),
        Preset(
            "gsm8k",
            "openai/gsm8k",
            "grade-school word problems: train 7,473, test 1,319; the answer follows ####",
            prompt="question",
            answer="answer",
            response="answer",
            subset="main",
            extract="after_hashes",
        ),
        Preset(
            "math",
            "DigitalLearningGmbH/MATH-lighteval",
            "MATH (Hendrycks et al. 2021): train 7,500, test 5,000; the answer is boxed in the solution",
            prompt="problem",
            answer="solution",
            response="solution",
            subset="default",
            extract="last_boxed",
            also=("EleutherAI/hendrycks_math", "HuggingFaceH4/MATH-500"),
        ),
        Preset(
            "math-l45",
            "HuggingFaceH4/MATH-500",
            "45 problems of MATH's test split, levels 4 and 5: the first of MATH-500, whose subjects are mixed",
            prompt="problem",
            answer="answer",
            response="solution",
            split="test",
            id="unique_id",
            filters=(Among(name="levels_4_and_5", columns=["level"], values=[4, 5]),),
            max_rows=45,
            by_name=True,
        ),
        Preset(
            "numinamath-1.5",
            "AI-MO/NuminaMath-1.5",
            "896,215 problems of many sources; recipes/data/numinamath.yaml chooses among them",
            prompt="problem",
            answer="answer",
            response="solution",
        ),
        Preset(
            "apex-shortlist",
            "MathArena/apex-shortlist",
            "48 problems that strong models rarely solve",
            prompt="problem",
            answer="answer",
            response="answer",
            id="problem_idx",
        ),
    )
}
assert tuple(PRESETS) == get_args(PresetName)

_BY_HUB_ID = {
    hub_id.lower(): preset
    for preset in PRESETS.values()
    for hub_id in (preset.source, *preset.also)
    if not preset.by_name
}


def preset_of(data: Data) -> Preset | None:
    """Return the preset that is named, or that of the hub id; None if that is no known one."""
    if data.preset is not None:
        return PRESETS[data.preset]
    named = next((preset for name, preset in PRESETS.items() if name == data.source), None)
    return named or _BY_HUB_ID.get(data.source.lower())


def limited(data: Data) -> Data:
    """Return `data` with its preset's number of rows, if it has none of its own."""
    preset = preset_of(data)
    return data if preset is None or data.max_rows else data.model_copy(update={"max_rows": preset.max_rows})


def completed(data: Data) -> Data:
    """Return `data`, whose source is not local, with its preset's hub id, subset and split in place of the preset's name."""
    preset = preset_of(data)
    if preset is None or (data.source != preset.name and data.source.lower() != preset.source.lower()):
        return data
    changes = {"source": preset.source, "subset": data.subset or preset.subset, "split": data.split or preset.split}
    return data.model_copy(update={**changes, "preset": preset.name})
