"""Columns and answer formats of known data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from lockstep.config.data import Data, Distinct, Extract, Filter, PresetName


@dataclass(frozen=True, slots=True)
class Preset:
    """What is known of a data set. Sizes and columns are those of its hub page."""

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
    also: tuple[str, ...] = ()
    """Other hub ids with the same columns."""


_VERL_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
_VERL_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

PRESETS: dict[PresetName, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "dapo-math-17k",
            "BytedTsinghua-SIA/DAPO-Math-17k",
            "competition problems with integer answers; the file has each about 100 times, of which one is kept",
            prompt="prompt",
            answer="reward_model.ground_truth",
            response="reward_model.ground_truth",
            before=_VERL_BEFORE,
            after=_VERL_AFTER,
            filters=(Distinct(name="repeats"),),
        ),
        Preset(
            "aime-2024",
            "BytedTsinghua-SIA/AIME-2024",
            "the 30 problems of AIME 2024; the file has each 32 times, of which one is kept",
            prompt="prompt",
            answer="reward_model.ground_truth",
            response="reward_model.ground_truth",
            before=_VERL_BEFORE,
            after=_VERL_AFTER,
            filters=(Distinct(name="repeats"),),
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

_BY_HUB_ID = {hub_id.lower(): preset for preset in PRESETS.values() for hub_id in (preset.source, *preset.also)}


def preset_of(data: Data) -> Preset | None:
    """The preset that is named, or that of the hub id; None if the recipe's own columns hold."""
    if data.preset is not None:
        return PRESETS[data.preset]
    named = next((preset for name, preset in PRESETS.items() if name == data.source), None)
    return named or _BY_HUB_ID.get(data.source.lower())


def completed(data: Data, *, folder_exists: bool) -> Data:
    """`data` with the hub id of its preset in place of the preset's name, and that data set's subset and split.

    With a local source a preset gives columns and answer format alone.
    """
    preset = preset_of(data)
    if preset is None or folder_exists:
        return data
    if data.source != preset.name and data.source.lower() != preset.source.lower():
        return data
    changes = {"source": preset.source, "subset": data.subset or preset.subset, "split": data.split or preset.split}
    return data.model_copy(update={**changes, "preset": preset.name})
